"""Structured outputs at the frontend: what is refused, in which words, and what the engine gets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer
from tlt_server.records import Grammar


def send(server: LiveServer, structure: Any, **sampling: Any) -> httpx.Response:
    sampling = {"max_tokens": 4, "structured_outputs": structure, **sampling}
    body = {"requests": [{"prompt": "hi"}], "sampling": sampling}
    return httpx.post(f"{server.url}/generate", json=body, timeout=60)


def deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "has nothing in it; give exactly one of json_schema, regex"),
    ({"regex": "a", "choice": ["b"]}, "has regex and choice; give exactly one"),
    ({"regexp": "a"}, "did you mean regex?"),
    ({"regex": "a(b"}, "the regex does not compile: unclosed group at character 2"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "a" * 131073}, "has 131073 bytes; the limit is 131072"),
    ({"choice": []}, "at least 1 item"),
    ({"choice": ["a"] * 1025}, "at most 1024 items"),
    ({"json_schema": "{'a': 1}"}, "is not JSON: Expecting property name"),
    ({"json_schema": '{"a":' * 70 + "1" + "}" * 70}, "which would be ignored"),
    ({"json_schema": "[" * 10**5}, "too many levels"),
    ({"json_schema": deep(70)}, "levels"),
    ({"json_schema": {"properties": {"a": {"not": {}}}}}, "'not' at .properties.a, which would be"),
    ({"json_schema": {"requird": []}}, "did you mean required?"),
    ({"json_schema": {"$ref": "#"}}, "the JSON schema does not compile: it allows no text"),
    ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
    ({"json_schema": {"multipleOf": 10**6}}, "the limit is 10000"),
    ({"json_schema": {"pattern": "a(b"}}, "unclosed group"),
    ({"json_schema": {"$ref": "http://a/b"}}, "does not compile"),
    ({"grammar": 'start: "a" "b"\nb: ('}, "at line 2, column 5: Expected token ')'"),
    ({"grammar": "\n".join(f'r{i}: "x" r{i + 1}' for i in range(3000))}, "has 3000 rules"),
    ({"grammar": 'start: a\na[temperature=0.5]: "x"'}, "'temperature' at character 12"),
    ({"grammar": 'start: %json {"foo": 1}'}, "the keyword 'foo'"),
    ({"grammar": 'root ::= "a" | ('}, "is not GBNF: Expected ')'"),
]


@pytest.mark.parametrize(("structure", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_a_structure_that_cannot_be_kept_is_refused(
    server: LiveServer, structure: Any, says: str
) -> None:
    before = len(server.engine.submitted)
    response = send(server, structure)
    assert response.status_code in (400, 413), response.text
    assert len(server.engine.submitted) == before
    message = response.json()["error"]["message"]
    assert says in message and "sampling.structured_outputs" in message and len(message) < 500


def test_a_chain_of_references_does_not_exhaust_the_stack(server: LiveServer) -> None:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2000)}
    schema = {"$ref": "#/$defs/a0", "$defs": chain | {"a2000": {"type": "string"}}}
    assert send(server, {"json_schema": schema}).status_code == 200


def test_the_engine_gets_one_form(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
    for structure, grammar in (
        ({"json_schema": schema}, ("json_schema", json.dumps(schema, separators=(",", ":")))),
        ({"json_schema": json.dumps(schema)}, ("json_schema", json.dumps(schema))),
        ({"regex": "[0-9]+"}, ("regex", "[0-9]+")),
        ({"choice": ["yes", 'n"o', "yes"]}, ("lark", 'start: "yes" | "n\\"o"')),
        ({"grammar": "start: /a/"}, ("lark", "start: /a/")),
    ):
        for _ in range(2):
            assert send(server, structure).status_code == 200
            kind, text = grammar
            got = server.engine.submitted[-1].sampling.structured_outputs
            assert got == Grammar(kind=kind, text=text)  # type: ignore[arg-type]
    assert send(server, {"grammar": 'root ::= "a"+'}).status_code == 200
    assert server.engine.submitted[-1].sampling.structured_outputs.text.startswith("%llguidance")


@pytest.mark.parametrize(
    "fields",
    [{"ignore_eos": True}, {"min_tokens": 1}, {"allowed_token_ids": [5]}, {"bad_words": ["q"]}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_contradicts_a_structure_is_refused(
    server: LiveServer, fields: dict[str, Any]
) -> None:
    response = send(server, {"regex": "a"}, **fields)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"sampling.{next(iter(fields))} is given with structured_outputs")
