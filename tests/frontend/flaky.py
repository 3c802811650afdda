"""A proxy in front of a server that does to each connection what its script says; past the script
it lets everything through.
"""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal
from urllib.parse import urlsplit

Deed = Literal["drop", "refuse", "lose", "pass"]
REFUSAL = b'{"error": {"code": "unavailable", "message": "not now", "retryable": true}}'


class Flaky:
    """drop: close the connection before the server has seen anything. refuse: answer 503. lose:
    pass it on, and lose the reply.
    """

    def __init__(self, url: str, script: Sequence[Deed], retry_after_s: int = 0) -> None:
        self._server, self._script, self._retry_after_s = urlsplit(url), list(script), retry_after_s
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                deed = (
                    self._script[self.connections]
                    if self.connections < len(self._script)
                    else "pass"
                )
                self.connections += 1
                threading.Thread(target=self._serve, args=(client, deed), daemon=True).start()

    def _serve(self, client: socket.socket, deed: Deed) -> None:
        assert self._server.hostname and self._server.port
        with client, suppress(OSError):
            request = _request(client)
            if deed == "refuse":
                client.sendall(
                    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: %d\r\n"
                    b"connection: close\r\ncontent-length: %d\r\n\r\n%s"
                    % (self._retry_after_s, len(REFUSAL), REFUSAL)
                )
            elif deed != "drop":
                with socket.create_connection((self._server.hostname, self._server.port)) as server:
                    server.sendall(request)
                    if deed == "lose":
                        server.recv(1)
                        return
                    threading.Thread(target=_pump, args=(client, server), daemon=True).start()
                    _pump(server, client)


def _request(client: socket.socket) -> bytes:
    """The first request, whole."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    ]
    while len(body) < sum(lengths):
        body += client.recv(65536)
    return head + b"\r\n\r\n" + body


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def flaky(url: str, *script: Deed, retry_after_s: int = 0) -> Iterator[Flaky]:
    proxy = Flaky(url, script, retry_after_s)
    try:
        yield proxy
    finally:
        proxy.close()
