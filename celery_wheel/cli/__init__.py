"""``celery wheel …``: Celery's own command line, extended through ``celery.commands``.

Loading this package also makes ``celery inspect wheel`` known. Exit codes: 0 done, 1 it failed,
2 the command line is wrong; both with one line that says what to do.
"""

from __future__ import annotations

from celery_wheel import remote
from celery_wheel.cli.group import wheel
from celery_wheel.cli.look import COMMANDS as LOOKING
from celery_wheel.cli.steer import COMMANDS as STEERING

__all__ = ("wheel",)

remote.register()
for _command in (*LOOKING, *STEERING):
    wheel.add_command(_command)
