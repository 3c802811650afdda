"""The OpenAPI document of the routes that are served: paths from the endpoints, sentences from
docstrings, schemas from the types in use.

Requests are pydantic models, replies and errors are msgspec structs, and each library describes its
own. Every status of a route is listed: its reply, its own errors, and the errors that middleware
raises before any route (keys, size and time of a body).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_type_hints

import msgspec
from pydantic import TypeAdapter

from tlt_server import __version__
from tlt_server.errors import (
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
from tlt_server.frontend.http.endpoints import Endpoint

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
    """Describe the endpoints of each dialect. `keyed` tells whether requests need an API key."""
    endpoints = [(name, endpoint) for name, group in dialects.items() for endpoint in group]
    takes, components = _requests(endpoint for _, endpoint in endpoints)
    gives, replies = _replies(endpoint for _, endpoint in endpoints)
    twice = components.keys() & replies.keys()
    assert not twice, f"a request and a reply share the name {twice}"
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
            content = {"schema": takes[endpoint.takes]} | (
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
        operation["responses"] = _responses(endpoint, gives, keyed)
        if keyed and endpoint.needs != "any":
            operation["security"] = [] if endpoint.needs == "open" else [{"key": [endpoint.needs]}]
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    about: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "TLT Server", "version": __version__, "description": ABOUT},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components | replies},
    }
    if keyed:
        about["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        about["security"] = [{"key": []}]
    return about


def _requests(endpoints: Iterable[Endpoint]) -> tuple[dict[Any, Any], dict[str, Any]]:
    models = dict.fromkeys(endpoint.takes for endpoint in endpoints if endpoint.takes is not None)
    adapters = [(model, "validation", TypeAdapter(model)) for model in models]
    schemas, definitions = TypeAdapter.json_schemas(adapters, ref_template=REF.format("{model}"))  # type: ignore[arg-type]
    return {model: schema for (model, _), schema in schemas.items()}, definitions.get("$defs", {})


def _replies(endpoints: Iterable[Endpoint]) -> tuple[dict[Any, Any], dict[str, Any]]:
    types = list(
        dict.fromkeys(
            type
            for endpoint in endpoints
            for type in (
                endpoint.gives,
                *endpoint.gives_instead,
                *endpoint.others.values(),
                _error_type(endpoint),
                *(event for _, event in endpoint.streams),
            )
        )
    )
    schemas, definitions = msgspec.json.schema_components(types, ref_template=REF.format("{name}"))
    return dict(zip(types, schemas, strict=True)), definitions


def _error_type(endpoint: Endpoint) -> Any:
    return get_type_hints(endpoint.error_shape)["return"]


def _words(endpoint: Endpoint) -> dict[str, Any]:
    summary, _, more = (inspect.getdoc(endpoint.handler) or "").partition("\n\n")
    return {"summary": " ".join(summary.split())} | (
        {"description": " ".join(more.split())} if more else {}
    )


def _parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    in_path = {parameter.name for parameter in endpoint.parameters if parameter.place == "path"}
    assert in_path == set(re.findall(r"{(\w+)}", endpoint.path)), (
        f"{endpoint.path} has parameters other than {in_path}"
    )
    for name, place, sentence, schema in endpoint.parameters:
        yield {
            "name": name,
            "in": place,
            "required": place == "path",
            "description": sentence,
            "schema": dict(schema),
        }


def _responses(endpoint: Endpoint, gives: dict[Any, Any], keyed: bool) -> dict[str, Any]:
    """Describe each status: the reply, and the errors that have it."""
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
    """Yield the errors that are raised before a handler is called, or while it reads the body."""
    yield Unavailable  # too many connections
    if endpoint.needs != "open" and keyed:
        yield Unauthenticated
    if endpoint.needs != "open":
        yield Forbidden
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
    """Describe the headers that every reply has, the endpoint's own, and those of the errors."""
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
