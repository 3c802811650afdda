"""JSON schemas that list properties: which further ones they leave open."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tokenizers import FAMILIES
from tlt_server.errors import InvalidRequest
from tlt_server.grammars.closing import closed
from tlt_server.grammars.compiler import Compiler
from tlt_server.grammars.forms import grammar_of

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
SELF = {"properties": {"a": {"type": "integer"}, "next": {"$ref": "#"}}}
BASE = {"$defs": {"A": A, "B": {"type": "object", **B}}}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
# Each schema, values that it takes, and values that it does not.
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ({"type": "object"}, [{}, {"b": 1}], []),
    ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
    (A | {"additionalProperties": True}, [{"a": 1, "b": 1}], []),
    (A | {"additionalProperties": {"type": "null"}}, [{"b": None}], [{"b": 1}]),
    (A | {"patternProperties": {"^x": {}}}, [{"x1": 1}], []),
    (A | {"required": ["b"]}, [{"b": 1}, {"a": 1, "b": 1}], [{}, {"b": 1, "c": 1}]),
    (A | {"required": ["a"], "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ({"properties": {"x": {"items": A}}}, [{"x": [{"a": 1}]}], [{"x": [{"b": 1}]}]),
    ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"c": 1}, {"a": "x"}, {"b": "x"}]),
    ({"allOf": [A], **B}, [{"a": 1, "b": 1}], [{"c": 1}]),
    ({"allOf": [A, B | {"additionalProperties": True}]}, [{"c": 1}], []),
    ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"c": 1}]),
    (A | {"anyOf": [B, {"required": ["a"]}]}, [{"a": 1, "b": 1}, {"a": 1}], [{"c": 1}]),
    (SELF, [{"a": 1, "next": {"a": 1, "next": {}}}], [{"next": {"b": 1}}]),
    (BASE | REF_A, [{"a": 1}], [{"b": 1}]),
    (BASE | {"allOf": [REF_A], "description": "x"}, [{"a": 1}], [{"b": 1}]),
    (BASE | {"allOf": [REF_A, REF_B]}, [{"a": 1, "b": 1}], [{"c": 1}]),
    (BASE | REF_A | B, [{"a": 1, "b": 1}], [{"c": 1}, {"a": "x"}]),
    (BASE | {"properties": {"x": {"anyOf": [REF_A, {"type": "null"}]}}}, [{"x": None}], [{"b": 1}]),
    (BASE | {"items": {"allOf": [REF_A, {"required": ["a"]}]}}, [[{"a": 1}]], [[{"b": 1, "a": 1}]]),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    model = FAMILIES["no marks"].write(tmp_path_factory.mktemp("model"))
    return Compiler(model, 300, [256])


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=lambda case: str(case)[:60])
def test_objects_that_list_properties_are_closed(
    compiler: Compiler, schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": schema}})
    for form, text in (("json_schema", json.dumps(schema)), ("structural_tag", tag)):
        start = compiler.compile(grammar_of(form, text))
        for value in (*right, *wrong):
            state = start.deep_copy()
            taken = state.consume_tokens([*json.dumps(value).encode()]) and state.is_accepting()
            assert taken == (value in right), (form, value)
    assert closed(closed(schema)) == closed(schema)


@pytest.mark.parametrize("width", [1, 2])
def test_joined_references_are_bounded(width: int) -> None:
    parts = {f"p{i}": {"allOf": [{"$ref": f"#/$defs/p{i + 1}"}] * width, **A} for i in range(200)}
    schema = {"$defs": parts | {"p200": B}, "allOf": [{"$ref": "#/$defs/p0"}, B]}
    with pytest.raises(InvalidRequest, match="where the references of its allOf are followed"):
        closed(schema)


def test_a_reference_to_itself_leaves_its_object_open() -> None:
    schema = {"$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}, B]}}, **REF_A}
    assert "additionalProperties" not in json.dumps(closed(schema))
