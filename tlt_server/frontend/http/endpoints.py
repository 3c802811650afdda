"""A route and the facts about it, declared by a decorator above its handler.

Handlers parse with `takes` and encode `gives`, so `openapi.document` describes the types in use.
Its sentences are the handlers' docstrings and the descriptions of the fields.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from tlt_server.errors import TltError
from tlt_server.frontend.http.keys import Needs
from tlt_server.frontend.http.replies import error_reply

Handler = Callable[[Any, Request], Awaitable[Response]]  # the first argument is the service
Declared = TypeVar("Declared", bound=Handler)
Shape = Callable[[TltError], Any]  # error -> body of its reply
NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Parameter(NamedTuple):
    """A value that a client sends outside the body; one of the path is always required."""

    name: str
    place: Literal["path", "query", "header"]
    sentence: str
    schema: Mapping[str, Any] = {"type": "string"}


class About(TypedDict, total=False):
    """The facts that a route may state; each has a default in `Endpoint`."""

    parameters: tuple[Parameter, ...]
    takes: Any  # struct, or a union of structs, of the JSON body
    takes_bytes: str  # media type of a body that is not JSON
    optional_body: bool
    changes: bool  # whether it changes state; if so it is audited
    example: Mapping[str, Any]  # body that the route accepts
    gives: Any  # msgspec type of the reply, or `str` for a text
    text: str  # media type of a reply that is a text
    gives_instead: tuple[Any, ...]  # further types of the reply
    gives_also_at: tuple[int, ...]  # further statuses that have the reply; 200 always has it
    others: Mapping[int, Any]  # status -> type of another reply
    headers: Mapping[str, str]  # name -> sentence, of headers that a reply may have
    streams: tuple[tuple[str, Any], ...]  # name and type of the server-sent events
    raises: tuple[type[TltError], ...]  # errors of the handler, beyond those of every route
    error_shape: Shape


class Endpoint(Route):
    """A route of the router, with the facts that authentication and the document need.

    `needs` is the scope that a key must have; `any` stands for any key and `open` for no key.
    `changes` is true by default where the scope is push-weights or operate, for every method but
    GET.
    """

    def __init__(
        self, method: str, path: str, handler: Handler, *, needs: Needs, **about: Unpack[About]
    ) -> None:
        async def serve(request: Request) -> Response:
            return await handler(request.app.state.service, request)

        super().__init__(path, serve, methods=[method])
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")
        self.path = self.path_format  # as clients read it, without the names of patterns
        self._slashed = ":path}" in path  # a name may have slashes
        self.method, self.handler, self.needs = method, handler, needs
        self.parameters = about.get("parameters", ())
        self.takes = about.get("takes")
        self.takes_bytes = about.get("takes_bytes", "")
        self.optional_body = about.get("optional_body", False)
        admin = needs in ("push-weights", "operate")
        self.changes = about.get("changes", admin and method != "GET")
        self.example = about.get("example")
        self.gives = about.get("gives", str)
        self.text = about.get("text", "text/plain")
        self.gives_instead = about.get("gives_instead", ())
        self.gives_also_at = about.get("gives_also_at", ())
        self.others: Mapping[int, Any] = about.get("others", NOTHING)
        self.headers: Mapping[str, str] = about.get("headers", NOTHING)
        self.streams = about.get("streams", ())
        self.raises = about.get("raises", ())
        self.error_shape = about.get("error_shape", error_reply)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match as routes do, but an escaped slash never parts a path: it belongs to a name."""
        if not self._slashed and b"%2f" in scope["raw_path"].lower():
            return Match.NONE, {}
        return super().matches(scope)


class Routes(list[Endpoint]):
    """The routes of one dialect, in the order in which their handlers stand.

    The decorators leave the handler as it is, so one handler may have several routes.
    """

    def __init__(self, *, error_shape: Shape = error_reply) -> None:
        """`error_shape` is that of the routes that name none."""
        super().__init__()
        self._error_shape = error_shape

    def get(
        self, path: str, *, needs: Needs, **about: Unpack[About]
    ) -> Callable[[Declared], Declared]:
        return self._declare("GET", path, needs, about)

    def post(
        self, path: str, *, needs: Needs, **about: Unpack[About]
    ) -> Callable[[Declared], Declared]:
        return self._declare("POST", path, needs, about)

    def put(
        self, path: str, *, needs: Needs, **about: Unpack[About]
    ) -> Callable[[Declared], Declared]:
        return self._declare("PUT", path, needs, about)

    def delete(
        self, path: str, *, needs: Needs, **about: Unpack[About]
    ) -> Callable[[Declared], Declared]:
        return self._declare("DELETE", path, needs, about)

    def _declare(
        self, method: str, path: str, needs: Needs, about: About
    ) -> Callable[[Declared], Declared]:
        shaped: About = {"error_shape": self._error_shape, **about}

        def declare(handler: Declared) -> Declared:
            self.append(Endpoint(method, path, handler, needs=needs, **shaped))
            return handler

        return declare
