"""The OpenAPI document has every route, with words and with the schemas of the types in use."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer

ROUTES = {
    ("post", "/generate"), ("get", "/strategy"), ("put", "/strategy"), ("get", "/health"), ("get", "/readyz"), ("get", "/livez"),
    ("get", "/startupz"), ("get", "/metrics"), ("get", "/server_info"), ("get", "/v1/models"), ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"), ("post", "/tokenize"), ("post", "/detokenize"),
    ("post", "/update_weights"), ("get", "/weights"), ("post", "/weights/rollback"), ("post", "/weights/{version}/commit"),
    ("post", "/weights/{version}/abort"), ("post", "/weight_checker"), ("get", "/weight_info"),
    ("get", "/rollouts"), ("get", "/rollouts/{id}"), ("delete", "/rollouts/{id}"),
}


@pytest.fixture
def document(server: LiveServer) -> dict[str, Any]:
    return httpx.get(f"{server.url}/openapi.json").json()


def test_every_route_is_described(document: dict[str, Any]) -> None:
    found = {(method, path): about for path, methods in document["paths"].items() for method, about in methods.items()}
    assert found.keys() >= ROUTES and document["openapi"] == "3.1.0"
    for (method, path), about in found.items():
        assert about["summary"], path
        assert ("requestBody" in about) == (method in ("post", "put")), path
        assert [parameter["name"] for parameter in about.get("parameters", [])] == re.findall(r"{(.*?)}", path)
        assert about["responses"]["200"]["content"] and about["responses"]["default"]["content"]
    assert len({about["operationId"] for about in found.values()}) == len(found)


def test_every_reference_is_defined(document: dict[str, Any]) -> None:
    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*(references(value) for value in node.values()))
        return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()

    prefix = "#/components/schemas/"
    assert {name.removeprefix(prefix) for name in references(document)} <= document["components"]["schemas"].keys()


def test_schemas_are_those_of_the_types_that_validate(document: dict[str, Any], server: LiveServer) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["SamplingFields"]["properties"]["temperature"]["maximum"] == 100
    assert schemas["CompletionRequest"]["properties"]["temperature"]["maximum"] == 100
    body = {"prompt": "a", "max_tokens": 1, "return_token_ids": True, "logprobs": 1}
    reply = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert reply.keys() <= schemas["Completion"]["properties"].keys()
    assert set(schemas["Completion"]["required"]) <= reply.keys()
    assert reply["choices"][0].keys() <= schemas["CompletionChoice"]["properties"].keys()
