"""The OpenAPI document of the served routes: paths from the endpoints, sentences from docstrings,
schemas from the types.

Request schemas also show the rules that `parsing` adds to their structs. Every status of a route is
listed: its reply, its own errors, and the errors that middleware raises before any route (keys,
size and time of a body).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import isclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tlt_client.fields import MAX_INT32
from tlt_server import __version__
from tlt_server.errors import (
    Conflict,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    Overloaded,
    QueueFull,
    QueueTimeout,
    RequestTimeout,
    TltError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from tlt_server.frontend.http.endpoints import REQUIRED, Endpoint
from tlt_server.frontend.http.fields import Open, Tolerant, is_union, sentence_of
from tlt_server.wire.packed import PackedIds

IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT32}}
REF = "#/components/schemas/{}"
ABOUT = (
    "Exact, adaptive speculative rollouts. Every refusal is a typed error that names the value, "
    "the limit and the remedy. Schemas tell what is valid on every server; the limits of this "
    "server, and the size of its vocabulary, are at /server_info."
)
# Error -> a header that its reply has, with the header's type and sentence.
HEADERS: dict[type[TltError], tuple[str, str, str]] = {
    Unauthenticated: ("WWW-Authenticate", "string", "Bearer"),
    **dict.fromkeys(
        (QueueFull, Overloaded, QueueTimeout, Unavailable),
        ("Retry-After", "integer", "Seconds to wait."),
    ),
}

REQUEST_ID = (
    "X-Request-Id",
    "string",
    "The request's own, or one that the server made; its log line has it.",
)


def document(dialects: Mapping[str, Iterable[Endpoint]], *, keyed: bool) -> dict[str, Any]:
    """Describe the endpoints of each dialect. `keyed`: whether requests need an API key."""
    endpoints = [(name, endpoint) for name, group in dialects.items() for endpoint in group]
    schemas, components = _schemas([endpoint for _, endpoint in endpoints])
    paths: dict[str, dict[str, Any]] = {}
    for name, endpoint in endpoints:
        operation = _words(endpoint)
        operation |= {
            "tags": [name],
            "operationId": f"{endpoint.method.lower()}{re.sub(r'[/{}.]+', '_', endpoint.path)}",
        }
        if endpoint.parameters:
            operation["parameters"] = list(_parameters(endpoint))
        if endpoint.takes is not None:
            forms = [schemas[form] for form in _forms(endpoint)]
            content = {"schema": forms[0] if len(forms) == 1 else {"anyOf": forms}} | (
                {"example": endpoint.example} if endpoint.example is not None else {}
            )
            operation["requestBody"] = {
                "required": not endpoint.optional_body,
                "content": {"application/json": content},
            }
        if endpoint.takes_bytes:
            schema = {"type": "string", "format": "binary"}
            operation["requestBody"] = {
                "required": True,
                "content": {endpoint.takes_bytes: {"schema": schema}},
            }
        operation["responses"] = _responses(endpoint, schemas, keyed)
        if keyed and endpoint.needs != "any":
            scopes = (endpoint.needs, "link") if endpoint.link else (endpoint.needs,)
            keys = [{"key": [scope]} for scope in scopes]
            operation["security"] = [] if endpoint.needs == "open" else keys
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    about: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "TLT Server", "version": __version__, "description": ABOUT},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }
    if keyed:
        about["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        about["security"] = [{"key": []}]
    return about


def _schemas(endpoints: Sequence[Endpoint]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the schema of each type, and the components to which the schemas refer."""
    takes = [form for endpoint in endpoints for form in _forms(endpoint)]
    gives = [
        type
        for endpoint in endpoints
        for type in (
            endpoint.gives,
            *endpoint.gives_instead,
            *endpoint.others.values(),
            _error_type(endpoint),
            *(event for _, event in endpoint.streams),
        )
    ]
    types = list(dict.fromkeys((*takes, *gives)))
    schemas, components = msgspec.json.schema_components(types, ref_template=REF.format("{name}"))
    for struct in _structs(types) - {PackedIds}:
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            _describe(
                components[struct.__name__]["properties"][field.encode_name], hints[field.name]
            )
    for struct in _structs(takes) - {PackedIds}:
        _adjust(components[struct.__name__], struct)
    del components[PackedIds.__name__]
    return dict(zip(types, _with_ids(schemas), strict=True)), _with_ids(components)


def _forms(endpoint: Endpoint) -> Sequence[Any]:
    """Return the structs that the JSON body of an endpoint may be."""
    if endpoint.takes is None:
        return ()
    return get_args(endpoint.takes) or (endpoint.takes,)


def _structs(types: Iterable[Any]) -> set[type[Struct]]:
    """Return every struct that may occur in values of these types."""
    found: set[type[Struct]] = set()
    left = [*types]
    while left:
        type = left.pop()
        left += get_args(type)
        if isclass(type) and issubclass(type, Struct) and type not in found:
            found.add(type)
            hints = get_type_hints(type, include_extras=True)
            left += [hints[name] for name in type.__struct_fields__]
    return found


def _describe(schema: dict[str, Any], hint: Any) -> None:
    """Add an annotation's sentences to the schema of its type."""
    if sentence := sentence_of(hint):
        schema["description"] = sentence
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if is_union(hint):
        parts = [part for part in get_args(hint) if part is not UnsetType]
        schemas = [schema] if len(parts) == 1 else schema.get("anyOf", ())
        for part, within in zip(parts, schemas, strict=False):
            _describe(within, part)
    elif get_origin(hint) is list and "items" in schema:
        _describe(schema["items"], get_args(hint)[0])


def _adjust(schema: dict[str, Any], struct: type[Struct]) -> None:
    """Add the rules of `parsing` to the schema of a request's struct."""
    fields, required = schema["properties"], schema["required"]
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    defaults = getattr(struct, "absent_means", None)
    for name, field in fields.items():
        value = getattr(defaults, name, UNSET)
        if "default" not in field and value is not UNSET:
            field["default"] = msgspec.to_builtins(value)
    if issubclass(struct, Open):
        del fields["more"]
    if issubclass(struct, Tolerant):
        fields |= {name: _or_null(field) for name, field in fields.items() if name not in required}
    exactly_one = getattr(struct, "exactly_one", ())
    if exactly_one:
        schema["oneOf"] = [
            {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
            for name in exactly_one
        ]


def _with_ids(schema: Any) -> Any:
    """Return the schema with token ids as lists, their form in JSON."""
    if isinstance(schema, list):
        return [_with_ids(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("$ref") == REF.format(PackedIds.__name__):
        others = {key: value for key, value in schema.items() if key != "$ref"}
        return IDS | others
    return {key: _with_ids(value) for key, value in schema.items()}


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    if {"type": "null"} in field.get("anyOf", ()):
        return field
    words = {key: field[key] for key in ("description", "default") if key in field}
    value = {key: field[key] for key in field if key not in words}
    return words | {"anyOf": [*value.get("anyOf", [value]), {"type": "null"}]}


def _error_type(endpoint: Endpoint) -> Any:
    return get_type_hints(endpoint.error_shape)["return"]


def _words(endpoint: Endpoint) -> dict[str, Any]:
    summary, _, more = (inspect.getdoc(endpoint.handler) or "").partition("\n\n")
    return {"summary": " ".join(summary.split())} | (
        {"description": " ".join(more.split())} if more else {}
    )


def _parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    in_path = {parameter.name for parameter in endpoint.parameters if parameter.place == "path"}
    assert in_path == endpoint.param_convertors.keys(), f"{endpoint.path} has others than {in_path}"
    for parameter in endpoint.parameters:
        yield {
            "name": parameter.name,
            "in": parameter.place,
            "required": parameter.default is REQUIRED,
            "description": parameter.sentence,
            "schema": parameter.schema,
        }


def _responses(endpoint: Endpoint, gives: dict[Any, Any], keyed: bool) -> dict[str, Any]:
    """Describe each status: the reply, and the errors with that status."""
    errors: dict[int, list[type[TltError]]] = {}
    for error in dict.fromkeys((*endpoint.raises, *_in_front(endpoint, keyed))):
        errors.setdefault(error.http_status, []).append(error)
    replies = {200, *endpoint.gives_also_at}
    others = {
        str(status): {
            "description": "The reply.",
            "content": {"application/json": {"schema": gives[type]}},
            "headers": _headers(endpoint, [], replies=True),
        }
        for status, type in endpoint.others.items()
    }
    return others | {
        str(status): _response(endpoint, gives, errors.get(status, []), replies=status in replies)
        for status in sorted(replies | errors.keys())
    }


def _in_front(endpoint: Endpoint, keyed: bool) -> Iterator[type[TltError]]:
    """Yield the errors that may be raised before a handler is called, while its body is read, or by
    a command to the engine.
    """
    yield Unavailable  # too many connections
    if endpoint.engine_fails:
        yield EngineFailed
    if endpoint.commands:
        yield Conflict
    if endpoint.needs != "open" and keyed:
        yield Unauthenticated
    if endpoint.needs != "open":
        yield Forbidden
    if any(parameter.schema != {"type": "string"} for parameter in endpoint.parameters):
        yield InvalidRequest
    if endpoint.takes is not None or endpoint.takes_bytes:
        yield from (InvalidRequest, TooLarge, RequestTimeout)


def _response(
    endpoint: Endpoint, gives: dict[Any, Any], errors: list[type[TltError]], *, replies: bool
) -> dict[str, Any]:
    words = [f"{error.code}: {' '.join((inspect.getdoc(error) or '').split())}" for error in errors]
    content: dict[str, Any] = {}
    schemas = [gives[_error_type(endpoint)]] if errors else []
    if replies and endpoint.gives is str:
        content[endpoint.text] = {"schema": gives[str]}
    elif replies:
        schemas += [gives[type] for type in (endpoint.gives, *endpoint.gives_instead)]
    if schemas:
        content["application/json"] = {
            "schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        }
    if replies and endpoint.streams and not errors:
        content["text/event-stream"] = _event_stream(endpoint, gives)
    return {
        "description": " ".join([*(["The reply."] if replies else []), *words]),
        "content": content,
        "headers": _headers(endpoint, errors, replies=replies),
    }


def _headers(endpoint: Endpoint, errors: list[type[TltError]], *, replies: bool) -> dict[str, Any]:
    """Describe the headers of every reply, of the endpoint, and of the errors."""
    own = (
        [(name, "string", sentence) for name, sentence in endpoint.headers.items()]
        if replies
        else []
    )
    return {
        name: {"description": sentence, "schema": {"type": kind}}
        for name, kind, sentence in (
            REQUEST_ID,
            *own,
            *(HEADERS[error] for error in errors if error in HEADERS),
        )
    }


def _event_stream(endpoint: Endpoint, gives: dict[Any, Any]) -> dict[str, Any]:
    """Describe one event, which tools for OpenAPI 3.1 expect; 3.2 would call it `itemSchema`."""
    events = [
        {
            "type": "object",
            "required": ["event", "data"],
            "properties": {"event": {"const": name}, "data": _event_data(gives[type])},
        }
        for name, type in endpoint.streams
    ]
    return {"schema": {"description": "One server-sent event.", "anyOf": events}}


def _event_data(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe the data of an event: a constant is itself, anything else is JSON."""
    return (
        schema
        if "enum" in schema
        else {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    )
