"""A route that also says who may call it, what it takes, what it gives and in which shape it tells
its errors.

Handlers parse with `takes` and encode `gives`, so the OpenAPI document (`openapi.document`) is made
of the types that are in use; its words are the handlers' docstrings and the fields' descriptions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tlt_server.errors import TltError
from tlt_server.frontend.http.keys import Needs
from tlt_server.frontend.http.replies import error_reply

Handler = Callable[[Request], Awaitable[Response]]


class Parameter(NamedTuple):
    """What a client says beside the body; those of the path are always required."""

    name: str
    place: Literal["path", "query", "header"]
    sentence: str
    schema: Mapping[str, Any] = {"type": "string"}


class Endpoint(Route):
    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        needs: Needs,
        parameters: tuple[Parameter, ...] = (),
        takes: Any = None,
        takes_bytes: str = "",
        optional_body: bool = False,
        example: Mapping[str, Any] | None = None,
        gives: Any = str,
        text: str = "text/plain",
        gives_instead: tuple[Any, ...] = (),
        gives_also_at: tuple[int, ...] = (),
        others: Mapping[int, Any] = MappingProxyType({}),
        headers: Mapping[str, str] = MappingProxyType({}),
        streams: tuple[tuple[str, Any], ...] = (),
        raises: tuple[type[TltError], ...] = (),
        error_shape: Callable[[TltError], Any] = error_reply,
    ) -> None:
        """`needs`: the scope of the keys that may call it; `any` key; or `open`.

        `takes`: a pydantic model or a union of them, `example` a body that is accepted;
        `takes_bytes`: the media type of a body that is no JSON. `gives`: a msgspec type, or `str`
        for a text of the media type `text`, at 200 and `gives_also_at`; `gives_instead`: further
        forms of it; `others`: what it gives with other statuses; `headers`: name -> sentence of
        those that these replies may have. `streams`: names and types of the server-sent events that
        come instead, where the request asks for them. `raises`: errors of the handler; those that
        every route has (`openapi`) are not repeated.
        """
        super().__init__(path, handler, methods=[method])
        self.method, self.handler, self.needs, self.parameters = method, handler, needs, parameters
        self.takes, self.takes_bytes, self.optional_body, self.example = (
            takes,
            takes_bytes,
            optional_body,
            example,
        )
        self.gives, self.text, self.gives_also_at, self.others, self.streams = (
            gives,
            text,
            gives_also_at,
            others,
            streams,
        )
        self.headers, self.gives_instead = headers, gives_instead
        self.raises, self.error_shape = raises, error_shape
