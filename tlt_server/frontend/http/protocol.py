"""Uvicorn's HTTP protocol with bounds on input that no application sees: requests that are not
HTTP/1, late or large headers, unexpected bytes, and unread replies.

A client keeps its sending side open until it has its reply, so the end of that side means that it
has left. To detect this always, bytes after an unanswered request are dropped unread, up to the
size of one more request, and the connection closes after the reply.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tlt_server.config import Config
from tlt_server.errors import InvalidRequest, WrongHttpVersion
from tlt_server.frontend.http.auth import shown_to
from tlt_server.frontend.http.connections import OpenConnections
from tlt_server.frontend.http.limits import RESTS
from tlt_server.frontend.http.replies import error_reply

VERSIONS = ("1.0", "1.1")
FEED_BYTES = 2**14  # parsed before the bounds are checked again
ABSOLUTE = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)  # RFC 9112, 3.2.2
LINE_BYTES = 12  # the rest of a request line with method and target


class BoundedProtocol(HttpToolsProtocol):
    """One connection, from its accept on. `bounded_protocol` creates the class with the server's
    settings.
    """

    max_header_bytes = 32 * 1024
    max_body_bytes = 2**24
    header_timeout_s = 10.0
    send_timeout_s = 60.0
    origins: tuple[str, ...] = ()  # their pages may read refusals
    room: OpenConnections
    arriving: asyncio.Task[None] | None = None  # as long as a TLS handshake lasts
    _headers_due: asyncio.TimerHandle | None = None
    _unread_check: asyncio.TimerHandle | None = None
    _in_headers = True
    _header_bytes = 0  # received since the request began, until its headers are complete
    _pipelined = False  # bytes followed a request that still runs
    _dropped_bytes = 0

    _body_bytes = 0  # bytes of the body received so far
    _framing_bytes = 0  # bytes around those of the body
    _begun = 0  # requests of this connection that began

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._parts: list[bytes] = []  # parts of the body in the bytes that are parsed now

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.arriving = None
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.room.closed(self)
        self._headers_arrived()
        self._reader_moves()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once."""
        if self.arriving is not None:
            self.arriving.cancel()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._pipelined:
            self._drop_bytes(len(data))
            return
        try:
            self._feed(data)
        except InvalidRequest as error:
            self._refuse(error)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        view = memoryview(data)
        for at in range(0, len(data), FEED_BYTES):
            part = view[at : at + FEED_BYTES]
            in_headers, body_bytes, begun = self._in_headers, self._body_bytes, self._begun
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade:
                return  # the request is answered as one that asks for no upgrade
            except httptools.HttpParserError as error:
                if not self._pipelined:  # else the connection belongs to the reply of that request
                    raise _refusal(error) from None
                self._drop_bytes(len(data) - at)
                return
            finally:
                self._hand_over()
            if self._in_headers:
                self._header_bytes += len(part)
                self._bound_headers(self._header_bytes)
            elif not in_headers and begun == self._begun:  # this part has no headers
                self._bound_framing(len(part) - (self._body_bytes - body_bytes))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else it is a trailer, which nothing here reads
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        self._hand_over()
        super().on_message_complete()

    def _hand_over(self) -> None:
        """Pass the body's parts to the application as one: each would copy the unread ones."""
        if self._parts:
            body = b"".join(self._parts)
            self._parts.clear()
            super().on_body(body)

    def _bound_framing(self, size: int) -> None:
        """Refuse a body whose chunks have more bytes of framing than of data, or long trailers."""
        self._framing_bytes += size
        if self._framing_bytes > self.max_header_bytes + self._body_bytes:
            raise InvalidRequest(
                f"the body of {self._body_bytes} bytes has {self._framing_bytes} bytes of chunk "
                f"headers and trailers; the limit is its size and {self.max_header_bytes} bytes "
                "(max_header_kb) more: send larger chunks"
            )

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._pipelined = True
            # This also puts `Connection: close` into a reply that has not started.
            self.cycle.keep_alive = False
            raise _Pipelined
        self._begun += 1
        if not self._in_headers:
            self._await_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._check_request()
        self._headers_arrived()
        self.room.asks(self)
        self.scope["state"][RESTS] = partial(self.room.rests, self)
        super().on_headers_complete()
        if self.scope["method"] == "HEAD":
            # Its reply is complete for the client before it is for us, so a next request on this
            # connection would come too early.
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        self.room.rests(self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._reader_moves()
        super().resume_writing()

    def _check_request(self) -> None:
        """Refuse a request whose line or headers two programs could interpret differently."""
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            raise WrongHttpVersion(f"the request is HTTP/{version}; send HTTP/1.1")
        size = LINE_BYTES + len(self.parser.get_method()) + len(self.url)
        self._bound_headers(size + sum(len(name) + len(value) + 4 for name, value in self.headers))
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise InvalidRequest(f"the request has {len(hosts)} headers Host; send exactly one")
        absolute = ABSOLUTE.match(self.url)
        if absolute is not None and not hosts:
            hosts = [absolute[1]]
            self.headers.append((b"host", absolute[1]))
        if absolute is not None and absolute[1].lower() == hosts[0].lower():
            rest = self.url[absolute.end() :]
            self.url = rest if rest.startswith(b"/") else b"/" + rest
        if not self.url.startswith(b"/"):
            raise InvalidRequest(
                f"the target is {self.url[:100].decode('latin-1')!r}; it must be a path, or a URL "
                "of the server that the header Host names"
            )

    def _bound_headers(self, size: int) -> None:
        if size > self.max_header_bytes:
            raise InvalidRequest(
                f"the headers are over the limit of {self.max_header_bytes} bytes (max_header_kb): "
                "send fewer or shorter ones"
            )

    def _drop_bytes(self, size: int) -> None:
        self._dropped_bytes += size
        if self._dropped_bytes > self.max_header_bytes + self.max_body_bytes:
            self.transport.abort()

    def _refuse(self, error: InvalidRequest) -> None:
        """Answer a request that no application can see, and close."""
        body = msgspec.json.encode(error_reply(error))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **shown_to(self.headers or (), self.origins),
        }
        status = HTTPStatus(error.http_status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self.transport.close()

    def _await_headers(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        self._body_bytes = self._framing_bytes = 0
        self._headers_due = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _headers_arrived(self) -> None:
        self._in_headers = False
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _watch_reader(self, unread_bytes: int) -> None:
        """Check after `send_timeout_s` that the client has read something; otherwise disconnect it,
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


def _refusal(error: httptools.HttpParserError) -> InvalidRequest:
    """Return the refusal for an error of the parser or of a check that it called."""
    if isinstance(error.__context__, InvalidRequest):
        return error.__context__
    if "HTTP version" in str(error) or "PRI" in str(error):  # the latter begins HTTP/2
        return WrongHttpVersion("the request is not HTTP/1; send HTTP/1.1")
    return InvalidRequest(
        "this is not an HTTP/1.1 request; check its request line, headers and body framing"
    )


def bounded_protocol(config: Config, room: OpenConnections) -> type[BoundedProtocol]:
    return type(
        "ConfiguredProtocol",
        (BoundedProtocol,),
        {
            "max_header_bytes": config.max_header_kb * 1024,
            "max_body_bytes": config.max_body_mb * 2**20,
            "header_timeout_s": config.header_timeout_s,
            "send_timeout_s": config.send_timeout_s,
            "origins": config.origins,
            "room": room,
        },
    )
