"""Uvicorn's HTTP protocol with bounds on what no application sees: headers that are late or large,
and replies that are not read.

A client keeps its sending side open until it has its reply, so the end of that side shows that it
has left. To see this always, bytes that follow a request that still runs are dropped unread, and
the connection closes after the reply.
"""

from __future__ import annotations

import asyncio

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tlt_server.config import Config
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.limits import CONNECTIONS
from tlt_server.frontend.http.replies import error_reply


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `bounded_protocol` makes the class with the settings of the server."""

    max_header_bytes = 32 * 1024
    header_timeout_s = 10.0
    send_timeout_s = 60.0
    _headers_due: asyncio.TimerHandle | None = None
    _unread_check: asyncio.TimerHandle | None = None
    _in_headers = True
    _header_bytes = 0
    _pipelined = False  # bytes followed a request that still runs

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTIONS: len(self.connections)}
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_arrived()
        self._reader_moves()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._pipelined:
            return
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if (
            self._in_headers
            and self._header_bytes > self.max_header_bytes
            and not self.transport.is_closing()
        ):
            self._refuse(
                f"the headers are over the limit of {self.max_header_bytes} bytes (max_header_kb): "
                "send fewer or shorter ones"
            )

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._pipelined = True
            # This also puts `Connection: close` into a reply that has not started.
            self.cycle.keep_alive = False
            raise _Pipelined
        if not self._in_headers:
            self._await_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._headers_arrived()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._pipelined:  # the connection belongs to the reply of the running request
            self._refuse(
                "this is not an HTTP/1.1 request; check its request line, headers and body framing"
            )

    def _refuse(self, message: str) -> None:
        """Answer a request that no application can see with 400, and close."""
        body = msgspec.json.encode(error_reply(InvalidRequest(message)))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n" % len(body) + body
        )
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._reader_moves()
        super().resume_writing()

    def _await_headers(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        self._headers_due = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _headers_arrived(self) -> None:
        self._in_headers = False
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _watch_reader(self, unread_bytes: int) -> None:
        """Check after `send_timeout_s` that the client has read something; otherwise cut it off,
        which aborts its sequences.
        """

        def check() -> None:
            left = self.transport.get_write_buffer_size()
            if left >= unread_bytes:
                self.transport.abort()
            else:
                self._watch_reader(left)

        self._unread_check = self.loop.call_later(self.send_timeout_s, check)

    def _reader_moves(self) -> None:
        if self._unread_check is not None:
            self._unread_check.cancel()
            self._unread_check = None


class _Pipelined(Exception):
    """A signal that stops the parser."""


def bounded_protocol(config: Config) -> type[BoundedProtocol]:
    return type(
        "ConfiguredProtocol",
        (BoundedProtocol,),
        {
            "max_header_bytes": config.max_header_kb * 1024,
            "header_timeout_s": config.header_timeout_s,
            "send_timeout_s": config.send_timeout_s,
        },
    )
