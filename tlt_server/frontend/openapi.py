"""The OpenAPI document of the routes that are served: paths from the endpoints, words from docstrings, schemas from the types in use.

Requests are pydantic models, replies and errors msgspec structs; each library describes its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

import msgspec
from pydantic.json_schema import models_json_schema

from tlt_server import __version__
from tlt_server.frontend.endpoints import Endpoint

REF = "#/components/schemas/{}"
ABOUT = "Exact, adaptive speculative rollouts. Every refusal is a typed error that names the value, the limit and the remedy."


def document(dialects: Mapping[str, Iterable[Endpoint]], *, keyed: bool) -> dict[str, Any]:
    """`dialects`: name -> its endpoints. `keyed`: whether requests need an API key."""
    endpoints = [(name, endpoint) for name, group in dialects.items() for endpoint in group]
    takes, components = _requests(endpoint for _, endpoint in endpoints)
    gives, replies = _replies(endpoint for _, endpoint in endpoints)
    twice = components.keys() & replies.keys()
    assert not twice, f"a request and a reply share the name {twice}"
    paths: dict[str, dict[str, Any]] = {}
    for name, endpoint in endpoints:
        operation = _words(endpoint)
        operation |= {"tags": [name], "operationId": f"{endpoint.method.lower()}{re.sub(r'[/{}]+', '_', endpoint.path)}"}
        if names := re.findall(r"{(\w+)}", endpoint.path):
            operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        if endpoint.takes is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": takes[endpoint.takes]}}}
        error = gives[_error_type(endpoint)]
        operation["responses"] = {
            "200": {"description": "Done", "content": _content(endpoint, gives)},
            **{str(status): {"description": "Accepted", "content": {"application/json": {"schema": gives[type]}}}
               for status, type in endpoint.others.items()},
            "default": {"description": "A typed error", "content": {"application/json": {"schema": _object(error=error)}}},
        }
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    about: dict[str, Any] = {"openapi": "3.1.0", "info": {"title": "TLT Server", "version": __version__, "description": ABOUT},
                             "paths": paths, "components": {"schemas": components | replies}}
    if keyed:
        about["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        about["security"] = [{"key": []}]
    return about


def _requests(endpoints: Iterable[Endpoint]) -> tuple[dict[Any, Any], dict[str, Any]]:
    models = list(dict.fromkeys(endpoint.takes for endpoint in endpoints if endpoint.takes is not None))
    schemas, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF.format("{model}"))
    return {model: schema for (model, _), schema in schemas.items()}, definitions.get("$defs", {})


def _replies(endpoints: Iterable[Endpoint]) -> tuple[dict[Any, Any], dict[str, Any]]:
    types = list(dict.fromkeys(type for endpoint in endpoints
                               for type in (endpoint.gives, *endpoint.others.values(), _error_type(endpoint))))
    schemas, definitions = msgspec.json.schema_components(types, ref_template=REF.format("{name}"))
    return dict(zip(types, schemas, strict=True)), definitions


def _error_type(endpoint: Endpoint) -> Any:
    return get_type_hints(endpoint.error_shape)["return"]


def _words(endpoint: Endpoint) -> dict[str, Any]:
    summary, _, more = (inspect.getdoc(endpoint.handler) or "").partition("\n\n")
    return {"summary": " ".join(summary.split())} | ({"description": " ".join(more.split())} if more else {})


def _content(endpoint: Endpoint, gives: dict[Any, Any]) -> dict[str, Any]:
    kind = endpoint.text if endpoint.gives is str else "application/json"
    content = {kind: {"schema": gives[endpoint.gives]}}
    return content | ({"text/event-stream": {"schema": {"type": "string"}}} if endpoint.streams else {})


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}
