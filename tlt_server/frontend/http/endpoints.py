"""A route and its facts, declared by its handler's annotations and a decorator above it.

A handler gets the service, then, by type, its other arguments: the body, its caller, the request,
or a parameter. The annotated types decode its body and encode its reply, and `openapi.document`
describes them. The document's sentences are the handlers' docstrings and the descriptions of fields
and parameters.

A parameter is a value outside the body, declared as `Annotated[KIND, "sentence"]`: in the path if
the path names it, a header if marked `HEADER`, otherwise in the query, where unknown ones are
ignored. It is a word, words, a flag, a count, a time in seconds, or a text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import isclass
from types import MappingProxyType, NoneType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from tlt_server.errors import InvalidRequest, TltError
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.fields import NoFields, sentence_of, shown
from tlt_server.frontend.http.keys import Caller, Needs
from tlt_server.frontend.http.replies import error_reply, json_response

Handler = Callable[..., Awaitable[Any]]  # the first argument is the service
Declared = TypeVar("Declared", bound=Handler)
Body = TypeVar("Body")
Read = Callable[[Any, Any, Request], Awaitable[Any]]  # service, type, request -> body
Shape = Callable[[TltError], Any]  # error -> body of its reply
NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Unread(Generic[Body]):
    """A body that its handler reads later, once the server's state allows it."""

    def __init__(self, read: Callable[[], Awaitable[Body]]) -> None:
        self.read = read


class About(TypedDict, total=False):
    """Facts that a decorator may state. `Endpoint` has a default for each but `needs`."""

    needs: Needs  # the scope that a key must have; `any`: any key; `open`: no key
    link: bool  # whether a key with the scope `link` may use it, too
    takes: Any  # struct, or a union of structs, of a JSON body that no annotation names
    takes_bytes: str  # media type of a body that is not JSON
    optional_body: bool  # by default true for one struct without required fields
    changes: bool  # whether it changes state; if so it is audited
    engine_fails: bool  # whether the engine's failure may be its error
    example: Mapping[str, Any]  # body that the route accepts
    text: str  # media type of a reply that is a text
    gives_also_at: tuple[int, ...]  # further statuses that have the reply; 200 always has it
    others: Mapping[int, Any]  # status -> type of another reply
    headers: Mapping[str, str]  # name -> sentence, of headers that a reply may have
    streams: tuple[tuple[str, Any], ...]  # name and type of the server-sent events
    raises: tuple[type[TltError], ...]  # errors of the handler, beyond `openapi`'s defaults
    error_shape: Shape
    read: Read  # reads the body
    empty: type[Struct]  # the body of a POST or PUT whose handler takes none


async def read_json(service: Any, kind: type[Body], request: Request) -> Body:
    """Return the body; an empty one means an empty object."""
    body: Body = await service.bodies.read(kind, await request.body() or b"{}")
    return body


async def read_given(service: Any, kind: type[Body], request: Request) -> Body:
    """Return the body, which may not be left out."""
    body: Body = await service.bodies.read(kind, await request.body())
    return body


def while_running(read: Read) -> Read:
    """Return a reader of bodies that first checks that an engine is running."""

    async def checked(service: Any, kind: Any, request: Request) -> Any:
        service.engine.check_running()
        return await read(service, kind, request)

    return checked


class Endpoint(Route):
    """A route of the router, with the facts that authentication and the document need.

    `changes` defaults to True for the scopes push-weights and operate, for every method but GET. So
    does `engine_fails`, as such a route sends a command to the engine. A route that has both is
    refused while a gateway commands the engine.
    """

    def __init__(self, method: str, path: str, handler: Handler, **about: Unpack[About]) -> None:
        super().__init__(path, self._serve, methods=[method])
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")
        self.path = self.path_format  # as clients read it, without the names of patterns
        self._slashed = ":path}" in path  # a name may have slashes
        self.method, self.handler, self.needs = method, handler, about["needs"]
        self.link = about.get("link", False)
        hints = get_type_hints(handler, include_extras=True)
        self.gives, *self.gives_instead = _replies(hints.pop("return"))
        del hints["service"]
        self._arguments = _arguments(handler, hints, self.param_convertors)
        self.parameters = [*_parameters(self._arguments.values(), method)]
        self.takes_bytes = about.get("takes_bytes", "")
        self._read = about.get("read", read_json)
        self.takes = self._ignored = None  # types of its body, and of one that no handler gets
        if method in ("POST", "PUT") and not self.takes_bytes:
            annotated = next(filter(None, map(_body, self._arguments.values())), None)
            self.takes = annotated or about.get("takes")
            if self.takes is None:
                self.takes = self._ignored = about.get("empty", NoFields)
        self.optional_body = about.get("optional_body", _is_optional(self.takes))
        admin = self.needs in ("push-weights", "operate")
        self.changes = about.get("changes", admin and method != "GET")
        self.engine_fails = about.get("engine_fails", admin)
        self.commands = self.changes and self.engine_fails
        self.example = about.get("example")
        self.text = about.get("text", "text/plain")
        self.gives_also_at = about.get("gives_also_at", ())
        self.others: Mapping[int, Any] = about.get("others", NOTHING)
        self.headers: Mapping[str, str] = about.get("headers", NOTHING)
        self.streams = about.get("streams", ())
        self.raises = about.get("raises", ())
        self.error_shape = about.get("error_shape", error_reply)

    async def _serve(self, request: Request) -> Response:
        service = request.app.state.service
        if self.commands:
            service.engine.check_free()
        if self._ignored is not None:
            await self._read(service, self._ignored, request)
        given = {
            name: await self._argument(hint, service, request)
            for name, hint in self._arguments.items()
        }
        reply = await self.handler(service, **given)
        if isinstance(reply, Response):
            return reply
        if isinstance(reply, str):
            return Response(reply, media_type=self.text)
        return json_response(reply)

    async def _argument(self, hint: Any, service: Any, request: Request) -> Any:
        if isinstance(hint, Parameter):
            return hint.read(request)
        if hint is Request:
            return request
        if hint is Caller:
            return caller_of(request)
        if get_origin(hint) is Unread:
            return Unread(lambda: self._read(service, _body(hint), request))
        return await self._read(service, hint, request)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match as routes do, except that an escaped slash never separates segments: it belongs to
        a name.
        """
        if not self._slashed and b"%2f" in scope["raw_path"].lower():
            return Match.NONE, {}
        return super().matches(scope)


def _arguments(handler: Handler, hints: Mapping[str, Any], path: Collection[str]) -> dict[str, Any]:
    """Return the source of each argument: a parameter, or the hint."""
    taken = inspect.signature(handler).parameters
    return {
        name: Parameter.of(name, hint, taken[name].default, path) or hint
        for name, hint in hints.items()
    }


def _parameters(arguments: Iterable[Any], method: str) -> Iterator[Parameter]:
    """Yield the parameters among the arguments, and those of a GET's query read as a body, in which
    lists are not possible.
    """
    for argument in arguments:
        if isinstance(argument, Parameter):
            yield argument
        elif method == "GET" and _body(argument) is not None:
            hints = get_type_hints(argument, include_extras=True)
            for field in msgspec.structs.fields(argument):
                default = REQUIRED if field.required else field.default
                found = Parameter.of(field.encode_name, hints[field.name], default, ())
                if found is not None and get_origin(found.kind) is not list:
                    yield found


def _body(hint: Any) -> Any:
    """Return the type of an argument's body, or None."""
    if get_origin(hint) is Unread:
        return get_args(hint)[0]
    return hint if isclass(hint) and issubclass(hint, Struct) else None


def _replies(hint: Any) -> tuple[Any, ...]:
    """Return the reply types in the annotation of a whole response."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[1:]
    return (str if hint is Response else hint,)


def _is_optional(takes: Any) -> bool:
    if not (isclass(takes) and issubclass(takes, Struct)):
        return False
    required = any(field.required for field in msgspec.structs.fields(takes))
    one_of: Any = getattr(takes, "exactly_one", None)
    return not required and not one_of


class Routes(list[Endpoint]):
    """The routes of one dialect, in the order of their handlers.

    The decorators return the handler unchanged, so one handler may have several routes.
    """

    def __init__(self, **about: Unpack[About]) -> None:
        """`about`: facts of all routes that do not state their own."""
        super().__init__()
        self._about = about

    def get(self, path: str, **about: Unpack[About]) -> Callable[[Declared], Declared]:
        return self._declare("GET", path, about)

    def post(self, path: str, **about: Unpack[About]) -> Callable[[Declared], Declared]:
        return self._declare("POST", path, about)

    def put(self, path: str, **about: Unpack[About]) -> Callable[[Declared], Declared]:
        return self._declare("PUT", path, about)

    def delete(self, path: str, **about: Unpack[About]) -> Callable[[Declared], Declared]:
        return self._declare("DELETE", path, about)

    def _declare(self, method: str, path: str, about: About) -> Callable[[Declared], Declared]:
        facts: About = {**self._about, **about}

        def declare(handler: Declared) -> Declared:
            self.append(Endpoint(method, path, handler, **facts))
            return handler

        return declare


HEADER = object()  # mark of an argument that is a header
REQUIRED = inspect.Parameter.empty
Place = Literal["path", "query", "header"]
# In any case, since trainers send `True` of Python as well as `true` of JSON.
FLAGS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off"), False
)


class Parameter(NamedTuple):
    name: str
    place: Place
    kind: Any
    sentence: str
    bounds: Meta
    default: Any

    @classmethod
    def of(cls, name: str, hint: Any, default: Any, path: Collection[str]) -> Parameter | None:
        """Return the parameter for an argument, or None. `path`: names in the path."""
        sentence = sentence_of(hint)
        if not sentence:
            return None
        kind, *marks = get_args(hint)
        if NoneType in get_args(kind):
            kind = get_args(kind)[0]
        bounds = next((mark for mark in marks if isinstance(mark, Meta)), Meta())
        if HEADER in marks:
            return cls(name.replace("_", "-").title(), "header", kind, sentence, bounds, default)
        place: Place = "path" if name in path else "query"
        return cls(name, place, kind, sentence, bounds, default)

    @property
    def _is_list(self) -> bool:
        return get_origin(self.kind) is Sequence

    @property
    def _known(self) -> tuple[str, ...]:
        """The allowed words; empty if any are."""
        return get_args(get_args(self.kind)[0] if self._is_list else self.kind)

    @property
    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string", "enum": [*self._known]}
        if self._is_list:
            return {"type": "array", "items": schema}
        if not self._known:
            schema = msgspec.json.schema(Annotated[self.kind, self.bounds])
        has_default = self.default not in (REQUIRED, None, "")
        return schema | {"default": self.default} if has_default else schema

    def read(self, request: Request) -> Any:
        if self.place == "path":
            return request.path_params[self.name]
        if self._is_list:  # in one parameter with commas, or in several
            texts = request.query_params.getlist(self.name)
            return [self._value(word, "has") for text in texts for word in text.split(",")]
        values = request.headers if self.place == "header" else request.query_params
        text = values.get(self.name)
        return self.default if text is None else self._value(text, "is")

    def _value(self, text: str, has: str) -> Any:
        value: Any = text
        least: Any = self.bounds.ge
        most: Any = self.bounds.le
        requirement = f"one of {', '.join(self._known or FLAGS)}"
        if self._known:
            value = text if text in self._known else None
        elif self.kind is bool:
            value = FLAGS.get(text.lower())
        elif self.kind is int:
            requirement = f"a whole number from {least} to {most}"
            digits = text.isascii() and text.isdigit() and len(text) <= len(str(most))
            value = int(text) if digits and least <= int(text) <= most else None
        elif self.kind is float:
            requirement = f"a number of seconds from 0 to {most:g}: wait again for more"
            value = _seconds(text, most)
        if value is None:
            raise InvalidRequest(f"{self.name} {has} {shown(text)}; it must be {requirement}")
        return value


def _seconds(text: str, most: float) -> float | None:
    try:
        return value if 0 <= (value := float(text)) <= most else None
    except ValueError:
        return None
