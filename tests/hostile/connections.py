"""Connections that say nothing, in numbers, while a probe goes on asking.

The client holds them open on every port until the end. What the server closes counts as closed;
whether it answers probes is the result.
"""

import http.client
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

PROBE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
EVERY_S = 0.02  # between two probes
REST_S = 0.5  # after the last connection was opened


def silent_connections(
    host: str,
    ports: Sequence[int],
    *,
    count: int = 3000,
    path: str = "/livez",
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Open `count` silent connections on each port, probe `path` of the first port all the time on
    connections of their own, and call `meanwhile` when all are open.

    Return, by port, how many could be opened and how many the server still held open at the end;
    how many probes were asked and answered (any status below 500, or 503 from a server whose engine
    restarts, is an answer) and the longest time of one; and the seconds in all.
    """
    began, stop = time.perf_counter(), threading.Event()
    probe = _Probe(host, ports[0], path)
    prober = threading.Thread(target=probe.run, args=(stop,), daemon=True)
    prober.start()
    with ExitStack() as stack:
        try:
            held = {port: _open(host, port, count, stack) for port in ports}
            meanwhile()
            time.sleep(REST_S)
        finally:
            stop.set()
            prober.join()
        open_at_end = {
            port: len(connections) - _closed(connections) for port, connections in held.items()
        }
    return {
        "count": count,
        "opened": {port: len(connections) for port, connections in held.items()},
        "open_at_end": open_at_end,
        "probes_asked": probe.asked,
        "probes_answered": probe.answered,
        "slowest_probe_s": round(probe.slowest_s, 4),
        "seconds": round(time.perf_counter() - began, 3),
    }


class _Probe:
    def __init__(self, host: str, port: int, path: str) -> None:
        self._host, self._port, self._path = host, port, path
        self.asked = self.answered = 0
        self.slowest_s = 0.0

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(EVERY_S):
            began = time.perf_counter()
            self.asked += 1
            self.answered += self._answered()
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began)

    def _answered(self) -> bool:
        """Return True if the route itself answered: a refusal names the limit that it met."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", self._path)
            reply = connection.getresponse()
            return reply.status == 200 or b"(max_" not in reply.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _open(host: str, port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    opened = []
    for _ in range(count):
        try:
            connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        except ConnectionError:  # closed by the server as soon as it was open
            continue
        connection.setblocking(False)
        opened.append(stack.enter_context(connection))
    return opened


def _closed(connections: Sequence[socket.socket]) -> int:
    """Return how many of these the server has closed."""
    closed = 0
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        for key, _ in selector.select(0):
            closed += _ended(key.fileobj)  # type: ignore[arg-type]
    return closed


def _ended(connection: socket.socket) -> bool:
    """Read what has come, such as the settings of HTTP/2, and tell whether the end has too."""
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
