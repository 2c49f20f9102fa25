"""Children of a pool that outlive a killed worker and finish what they have.

Celery has the kernel kill them together with their parent. Then a task that acknowledges early
may be acknowledged and never begin, as without this package; a test that counts runs could not
tell that from a loss. Imported by a worker process; for tests that kill the main process alone.
"""

from __future__ import annotations

import ctypes
from typing import Any

from celery.signals import worker_process_init

__all__ = ("outlive",)

_PR_SET_PDEATHSIG = 1


@worker_process_init.connect
def outlive(**_: Any) -> None:
    """Runs in each child as it starts."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
