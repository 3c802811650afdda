"""The record of a request: an id in its reply and its log lines, one access line, and metrics.

A request that changes state also gets the line `audit`, unless it was refused; a request whose
client left may have changed state. No line or label contains a client's text from the body, the
query or the headers, except a well-formed X-Request-Id and the version of pushed weights.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tlt_server.frontend.http.auth import is_change
from tlt_server.frontend.http.traces import CURRENT, UNTRACED, Begin, untraced
from tlt_server.metrics import Metrics

HEADER = b"x-request-id"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
# Probes and scrapes ask for these every few seconds, and an open page polls the others by GET.
QUIET = frozenset({"/health", "/livez", "/readyz", "/startupz", "/metrics"})
POLLED = frozenset({"/server_info", "/strategy"})
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")

log = structlog.get_logger()


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return a client's well-formed X-Request-Id; empty without one."""
    given = next((value for name, value in headers if name == HEADER), b"")
    return given.decode() if _WELL_FORMED.fullmatch(given) else ""


class Access:
    """A wrapper of the whole application, so that it also records refusals and failures."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        template: Callable[[str], str],
        begin: Begin = untraced,
    ) -> None:
        """`template(path)`: returns the route of a path, from a bounded set. `begin`: starts the
        trace of a request.
        """
        self._app, self._metrics, self._template, self._begin = app, metrics, template, begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["raw_path"].endswith(b"/") and len(scope["path"]) > 1:  # some clients append one
            scope = {**scope, "path": scope["path"][:-1]}
        request = _Request(scope, receive, send)
        started = time.perf_counter()
        trace = UNTRACED if scope["path"] in QUIET else self._begin(scope["headers"])
        outer = CURRENT.set(trace)
        with structlog.contextvars.bound_contextvars(request_id=request.id):
            try:
                await self._app(scope, request.receive, request.send)
            except Exception:
                if not request.status:
                    raise
                # Otherwise the error was answered and logged by `replies.unexpected`. Uvicorn would
                # log its message, which may quote a prompt.
            finally:
                CURRENT.reset(outer)
                trace.end(
                    failed=not 0 < request.status < 500,
                    http__request__method=scope["method"]
                    if scope["method"] in METHODS
                    else "other",
                    http__route=self._template(scope["path"]),
                    http__response__status_code=request.status,
                    tlt__request_id=request.id,
                )
                self._keep(scope, request, time.perf_counter() - started)

    def _keep(self, scope: Scope, request: _Request, seconds: float) -> None:
        status, route = request.status, self._template(scope["path"])
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.exchanges.http.labels(method, route, str(status)).inc()
        self._metrics.exchanges.http_s.labels(route).observe(seconds)
        quiet = route in QUIET or (method == "GET" and route in POLLED)
        probe_says_no = route in QUIET and status == 503
        answered = 0 < status < 400 or probe_says_no
        write = (
            log.debug
            if quiet and answered
            else log.info
            if answered or status == 499
            else log.warning
        )
        client = scope["client"][0] if scope.get("client") else ""
        write(
            "request",
            method=method,
            route=route,
            status=status,
            seconds=round(seconds, 6),
            request_bytes=request.received,
            response_bytes=request.sent,
            client=client,
        )
        if (status < 400 or status == 499) and is_change(scope):
            log.info("audit", method=method, route=route, status=status, client=client)


class _Request:
    """A request in progress, with its id and the bytes received and sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.id = given_id(scope["headers"]) or secrets.token_hex(8)
        self.received = self.sent = 0  # body bytes
        self.status = 0  # HTTP status; 0 without a reply
        self._receive, self._send = receive, send

    async def receive(self) -> Message:
        message = await self._receive()
        self.received += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (HEADER, self.id.encode())]
        else:
            self.sent += len(message.get("body", b""))
        await self._send(message)
