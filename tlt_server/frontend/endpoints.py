"""A route that also says what it takes, what it gives and in which shape it tells its errors.

Handlers parse with `takes` and encode `gives`, so the OpenAPI document (`openapi.document`) is made of the types that are in use; its
words are the handlers' docstrings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tlt_server.errors import TltError
from tlt_server.frontend.replies import error_body

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint(Route):
    def __init__(self, method: str, path: str, handler: Handler, *, takes: type[BaseModel] | None = None, gives: Any = str,
                 text: str = "text/plain", others: Mapping[int, Any] = MappingProxyType({}), streams: bool = False,
                 error_shape: Callable[[TltError], Any] = error_body) -> None:
        """`gives` is a msgspec type, or `str` for the media type `text`; `others`: what it gives with a status other than 200 that is
        no error; `streams`: server-sent events instead, where the request asks for them."""
        super().__init__(path, handler, methods=[method])
        self.method, self.handler, self.takes, self.gives, self.streams = method, handler, takes, gives, streams
        self.text, self.others, self.error_shape = text, others, error_shape
