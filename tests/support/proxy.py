"""A TCP proxy that can be cut: the network between a worker and its server, as a test sees it."""

from __future__ import annotations

import selectors
import socket
import threading

__all__ = ("Proxy",)


class Proxy:
    """Forward a local port to another until :meth:`cut`; again after :meth:`mend`.

    While cut, connections are refused, and those that were open are closed.
    """

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._stopped = False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.mend()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def mend(self) -> None:
        """Accept connections."""
        with self._lock:
            if self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", self.port))
                self._selector.register(self._listener, selectors.EVENT_READ)

    def cut(self, *, refuse: bool = True) -> None:
        """Close every connection; with ``refuse=False`` clients may come back at once."""
        with self._lock:
            if refuse and self._listener is not None:
                self._selector.unregister(self._listener)
                self._listener.close()
                self._listener = None
            for side in list(self._peers):
                self._drop(side)

    def stop(self) -> None:
        """Cut, and end the thread."""
        self._stopped = True
        self.cut()
        self._thread.join(5)
        self._selector.close()

    def _run(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select(0.05):
                with self._lock:
                    self._handle(key.fileobj)

    def _handle(self, ready: object) -> None:
        if ready is self._listener:
            self._join(self._listener.accept()[0])
        elif isinstance(ready, socket.socket) and ready in self._peers:
            try:
                data = ready.recv(65536)
                if data:
                    self._peers[ready].sendall(data)
                    return
            except OSError:
                pass
            self._drop(ready)

    def _join(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        for one, other in ((client, server), (server, client)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _drop(self, side: socket.socket) -> None:
        other = self._peers.pop(side, None)
        for end in (side, other):
            if end is not None and end.fileno() >= 0:
                self._peers.pop(end, None)
                self._selector.unregister(end)
                end.close()
