"""The OpenAPI document has every route, with words and with the schemas of the types in use; a real
validator has no complaint.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator, validate

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_auth import documented
from tlt_server.frontend.dialects import DIALECTS
from tlt_server.frontend.dialects.openai.responses.replies import EVENTS

OPEN = {"/health", "/readyz", "/livez", "/startupz", "/ping", "/"}
SHAPES = {  # dialect -> types of its errors
    "openai": ["Failure"],
    "vllm_rl": ["Faulty"],
    "sglang": ["Refusal", "Outcome", "Failure"],
    "areal": ["ArealOutcome"],
}
PUSHES = {"/update_weights", "/update_weight_version", "/update_weights_from_disk"}
NEVER_ASK = {  # routes for operators and trainers that send the engine no command
    ("get", "/metrics"),
    ("get", "/fleet"),
    ("get", "/fleet/targets"),
    ("post", "/fleet/replicas"),
    ("post", "/fleet/{name}/{order}"),
    ("get", "/strategy"),
    ("get", "/drafter"),
    ("post", "/drafter/train"),
    ("post", "/drafter/pause"),
    ("post", "/drafter/resume"),
    ("get", "/drafter/samples"),
    ("post", "/drafter/samples"),
    ("get", "/drafter/files"),
    ("get", "/drafter/files/{name}"),
    ("post", "/reset_mm_cache"),
    ("post", "/reset_encoder_cache"),
    ("post", "/areal_set_update_weight_meta"),
    ("post", "/update_weights_from_tensor"),
    ("post", "/load_lora_adapter_from_tensors"),
    ("put", "/weights/{version}/{part}"),
    ("get", "/weights/{version}/{part}"),
}
GENERATES = {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"}


@pytest.fixture
def document(server: LiveServer) -> dict[str, Any]:
    return httpx.get(f"{server.url}/openapi.json").json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            yield method, path, about


def test_a_validator_accepts_the_document(document: dict[str, Any], model: Path) -> None:
    validate(document, cls=OpenAPIV31SpecValidator)
    with live_server(model, keys="secret\n") as keyed:
        validate(
            httpx.get(
                f"{keyed.url}/openapi.json", headers={"authorization": "Bearer secret"}
            ).json(),
            cls=OpenAPIV31SpecValidator,
        )


def test_every_route_is_described(document: dict[str, Any]) -> None:
    found = {(method, path): about for method, path, about in operations(document)}
    assert found.keys() == {(method.lower(), path) for method, path in documented()}
    assert document["openapi"] == "3.1.0"
    for (method, path), about in found.items():
        assert about["summary"], path
        assert ("requestBody" in about) == (method in ("post", "put")), path
        in_path = [
            parameter["name"]
            for parameter in about.get("parameters", [])
            if parameter["in"] == "path"
        ]
        assert in_path == re.findall(r"{(.*?)}", path)
        assert all(parameter["description"] for parameter in about.get("parameters", []))
        assert about["responses"]["200"]["content"]
        assert all(response["description"] for response in about["responses"].values())
    assert len({about["operationId"] for about in found.values()}) == len(found)


def fields_below(document: dict[str, Any], bodies: list[dict[str, Any]]) -> dict[str, str]:
    """Field of a component -> its description, for all components that these refer to."""

    def fields(schema: Any) -> Iterator[tuple[str, str]]:
        if isinstance(schema, dict):
            if "$ref" in schema:
                name = schema["$ref"].rpartition("/")[2]
                if name not in seen:
                    seen.add(name)
                    for field, about in (
                        document["components"]["schemas"][name].get("properties", {}).items()
                    ):
                        yield f"{name}.{field}", about.get("description", "")
                    yield from fields(document["components"]["schemas"][name])
            for part in schema.values():
                yield from fields(part)
        elif isinstance(schema, list):
            for part in schema:
                yield from fields(part)

    seen: set[str] = set()
    return dict(fields(bodies))


def test_every_field_of_a_request_is_described(document: dict[str, Any]) -> None:
    found = fields_below(
        document,
        [about["requestBody"] for _, _, about in operations(document) if "requestBody" in about],
    )
    assert {
        "SamplingFields.min_p",
        "ItemFields.salt",
        "Message.name",
        "CompletionRequest.echo",
        "ChatMessage.role",
    } <= found.keys()
    assert [name for name, description in found.items() if not description] == []


def test_every_field_of_a_reply_is_described(document: dict[str, Any]) -> None:
    found = fields_below(document, [about["responses"] for _, _, about in operations(document)])
    assert {
        *("Reply.numerics", "Choice.finish_reason", "SdReport.histogram", "Token.text"),
        *("Completion.usage", "ChatChoice.delta", "EngineInfo.pages"),
        *("StrategyState.in_force", "DrafterState.trainer", "ServedDrafter.resting"),
        *("BufferState.refusals", "PushReply.state", "RolloutSummary.status"),
        *("WireError.code",),
    } <= found.keys()
    bare = [name for name, description in found.items() if not description]
    assert all(name.endswith(".type") for name in bare), "only a struct's tag takes no words"
    schemas = document["components"]["schemas"]
    assert all(name.isalpha() for name in schemas), "no name shows its module"
    assert schemas["Choice"]["properties"]["finish_reason"]["enum"] == ["abort", "length", "stop"]
    assert schemas["RolloutReply"]["properties"]["status"]["enum"] == ["done", "running"]


def test_headers_of_replies_are_listed_and_sent(
    document: dict[str, Any], server: LiveServer
) -> None:
    for _, path, about in operations(document):
        assert all(
            "X-Request-Id" in response["headers"] for response in about["responses"].values()
        ), path
    listed = document["paths"]["/generate"]["post"]["responses"]
    assert "X-Rollout-Id" in listed["200"]["headers"].keys() & listed["202"]["headers"].keys()
    assert "X-Rollout-Id" not in listed["413"]["headers"], "nothing was started"
    body = {"requests": [{"prompt": "a"}], "sampling": {"max_tokens": 1}, "detach": True}
    assert {"x-request-id", "x-rollout-id"} <= httpx.post(
        f"{server.url}/generate", json=body
    ).headers.keys()
    assert "x-request-id" in httpx.get(f"{server.url}/weights/none").headers


def test_every_status_is_listed_with_its_errors(document: dict[str, Any]) -> None:
    for method, path, about in operations(document):
        statuses = about["responses"].keys()
        assert "default" not in statuses and ("403" in statuses) == (path not in OPEN), path
        assert (method in ("get", "delete")) or {"400", "408", "413"} <= statuses, path
        assert path not in GENERATES or {"422", "429", "500", "503", "504"} <= statuses, path
        for status in statuses - {"200", "202"}:
            [schema] = [
                content["schema"] for content in about["responses"][status]["content"].values()
            ]
            expected = [
                {"$ref": f"#/components/schemas/{name}"}
                for name in SHAPES.get(about["tags"][0], ["Refusal"])
            ]
            assert any(one in (schema, *schema.get("anyOf", [])) for one in expected), (
                path,
                status,
            )
    assert (
        "weights_refused: "
        in document["paths"]["/update_weights"]["post"]["responses"]["422"]["description"]
    )
    assert document["paths"]["/v1/completions"]["post"]["responses"]["429"]["headers"][
        "Retry-After"
    ]["schema"] == {"type": "integer"}
    startup = document["paths"]["/startupz"]["get"]["responses"]
    assert startup["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Startup"
    }
    assert (
        startup["200"]["content"]["application/json"]["schema"]
        in startup["503"]["content"]["application/json"]["schema"]["anyOf"]
    )


def test_engine_failed_is_listed_for_routes_using_the_engine(document: dict[str, Any]) -> None:
    listed = {
        (method, path)
        for method, path, about in operations(document)
        if "engine_failed" in about["responses"].get("500", {}).get("description", "")
    }
    tables = {name: DIALECTS.resolve(name) for name in DIALECTS}
    commands = {
        (route.method.lower(), route.path)
        for table in tables.values()
        for route in table
        if route.needs in ("operate", "push-weights")
    }
    assert commands > NEVER_ASK and listed & commands == commands - NEVER_ASK
    assert {path for _, path in listed - commands} == GENERATES | {
        "/inference/v1/generate",
        "/health_generate",
        "/weight_info",
    }


def test_with_keys_all_but_the_probes_may_answer_401(model: Path) -> None:
    with live_server(model, keys="secret\n") as server:
        document = httpx.get(
            f"{server.url}/openapi.json", headers={"authorization": "Bearer secret"}
        ).json()
    assert document["security"] == [{"key": []}]
    for _, path, about in operations(document):
        assert (
            ("401" in about["responses"]) == (path not in OPEN) == (about.get("security") != [])
        ), path
        assert ("403" in about["responses"]) == (path not in OPEN), path
    assert document["paths"]["/strategy"]["put"]["security"] == [{"key": ["operate"]}]


def test_streams_are_described_by_their_events(
    document: dict[str, Any], server: LiveServer
) -> None:
    for path in GENERATES:
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}
        events = {
            event["properties"]["event"]["const"]
            for event in content["text/event-stream"]["schema"]["anyOf"]
        }
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"][
            "example"
        ]
        stream = httpx.post(server.url + path, json=body | {"stream": True}).text
        assert set(re.findall(r"^event: ([\w.]+)$", stream, re.MULTILINE)) <= events
        assert events == {
            "/generate": {"token", "result", "error", "done", "message"},
            "/v1/responses": {*EVENTS},
        }.get(path, {"message"})


def test_documented_examples_are_accepted(document: dict[str, Any], server: LiveServer) -> None:
    examples = {
        path: (method, content["example"])
        for method, path, about in operations(document)
        for content in about.get("requestBody", {}).get("content", {}).values()
        if "example" in content
    }
    assert examples.keys() == GENERATES | PUSHES | {
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
        *("/v1/chat/completions/render", "/areal_update_weights"),
        *("/areal_set_update_weight_meta", "/areal_init_weights_update_group", "/strategy"),
        *("/inference/v1/generate", "/collective_rpc", "/abort_request", "/engine/abort"),
        *("/init_weight_transfer_engine", "/init_broadcaster", "/init_weights_update_group"),
        *("/update_weights_from_distributed", "/get_weights_by_name", "/v1/load_lora_adapter"),
        *("/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"),
    }
    for path, (method, example) in examples.items():
        response = httpx.request(method, server.url + path, json=example)
        assert response.status_code == 200, (path, response.text)


def test_every_reference_is_defined(document: dict[str, Any]) -> None:
    prefix = "#/components/schemas/"
    found = set(re.findall(r'"\$ref": "(.*?)"', json.dumps(document)))
    assert {name.removeprefix(prefix) for name in found} <= document["components"]["schemas"].keys()


def test_schemas_match_the_validating_types(document: dict[str, Any], server: LiveServer) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["SamplingFields"]["properties"]["temperature"]["maximum"] == 100
    assert schemas["CompletionRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 100
    body = {"prompt": "a", "max_tokens": 1, "return_token_ids": True, "logprobs": 1}
    reply = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert reply.keys() <= schemas["Completion"]["properties"].keys()
    assert set(schemas["Completion"]["required"]) <= reply.keys()
    assert reply["choices"][0].keys() <= schemas["CompletionChoice"]["properties"].keys()


def test_schema_allows_null_where_null_means_absent(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"):
        for field, about in schemas[name]["properties"].items():
            assert ({"type": "null"} in about.get("anyOf", [])) == (
                field not in schemas[name].get("required", ())
            ), (name, field)
    assert {"type": "null"} in schemas["ItemFields"]["properties"]["seed"]["anyOf"]
    assert "anyOf" not in schemas["ItemFields"]["properties"]["n"]


def test_types_of_all_bodies_free_their_memory_once() -> None:
    """msgspec 0.22 frees the pattern of a text twice that stands in a union with a list."""
    script = (
        "from tlt_server.frontend.dialects import DIALECTS\n"
        "from tlt_server.frontend.http.openapi import document\n"
        "document({name: DIALECTS.resolve(name) for name in DIALECTS}, keyed=False)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, timeout=120, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
