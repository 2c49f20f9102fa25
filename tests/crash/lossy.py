"""A network that loses what goes one way, or that is slow."""

from __future__ import annotations

import socket
import time
from typing import Any

from tests.support.proxy import Proxy

__all__ = ("LossyProxy",)


class LossyProxy(Proxy):
    """``swallows`` may be ``requests`` or ``answers``; an answer takes ``delay_s`` longer."""

    def __init__(self, target_port: int) -> None:
        self.swallows: str | None = None
        self.delay_s = 0.0
        self._clients: set[socket.socket] = set()
        super().__init__(target_port)

    def _join(self, client: socket.socket) -> None:
        super()._join(client)
        self._clients = {side for side in (*self._clients, client) if side in self._peers}

    def _handle(self, ready: Any) -> None:
        way = "requests" if ready in self._clients else "answers"
        if ready in self._peers and way == "answers" and self.delay_s:
            time.sleep(self.delay_s)
        if ready not in self._peers or way != self.swallows:
            super()._handle(ready)
            return
        try:
            if ready.recv(65536):
                return
        except OSError:
            pass
        self._drop(ready)
