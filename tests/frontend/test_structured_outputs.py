"""Structured outputs at the frontend: what is refused, in which words, and what the engine gets."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.frontend.live_server import LiveServer
from tests.frontend.saying import write_saying
from tests.mostly_long import mostly_long
from tests.tokenizers import FAMILIES
from tlt_server.errors import InvalidRequest, TooLarge
from tlt_server.frontend.dialects.openai import answers
from tlt_server.frontend.dialects.openai.requests import CHAT, ChatRequest
from tlt_server.frontend.generation import samplings
from tlt_server.frontend.generation.requests import StructuredOutputs
from tlt_server.frontend.generation.text import Text
from tlt_server.grammars.compiler import Compiler
from tlt_server.grammars.forms import check_grammar, grammar_of
from tlt_server.wire.records import Grammar

once = pytest.mark.parametrize("model", ["qwen3"], indirect=True)


@pytest.fixture(scope="module", params=mostly_long(FAMILIES, "qwen3", "special marks"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_saying(tmp_path_factory.mktemp("model"), family=FAMILIES[request.param])


def send(server: LiveServer, structure: Any, **sampling: Any) -> httpx.Response:
    sampling = {"max_tokens": 4, "structured_outputs": structure, **sampling}
    body = {"requests": [{"prompt": "hi"}], "sampling": sampling}
    return httpx.post(f"{server.url}/generate", json=body, timeout=60)


def deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def nested(levels: int) -> str:
    part: Any = {"type": "const_string", "value": "a"}
    for _ in range(levels):
        part = {"type": "sequence", "elements": [part]}
    return json.dumps({"format": part})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "has nothing in it; give exactly one of json_schema, regex"),
    ({"regex": "a", "choice": ["b"]}, "has regex and choice; give exactly one"),
    ({"regexp": "a"}, "did you mean regex?"),
    ({"regex": "a(b"}, "the regex does not compile: unclosed group at character 2"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "a" * 131073}, "has more than 131072 bytes"),
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
    ({"json_schema": {"allOf": [{"multipleOf": 997}, {"multipleOf": 0.13}]}}, "the limit is 10000"),
    ({"json_schema": {"pattern": "a(b"}}, "unclosed group"),
    ({"json_schema": {"$ref": "http://a/b"}}, "does not compile"),
    ({"grammar": 'start: "a" "b"\nb: ('}, "at line 2, column 5: Expected token ')'"),
    ({"grammar": "\n".join(f'r{i}: "x" r{i + 1}' for i in range(3000))}, "has 3000 rules"),
    ({"grammar": 'start: a\na[temperature=0.5]: "x"'}, "'temperature' at character 12"),
    ({"grammar": 'start: %json {"foo": 1}'}, "the keyword 'foo'"),
    ({"grammar": 'root ::= "a" | ('}, "is not GBNF: Expected ')'"),
    ({"structural_tag": nested(250)}, "structural_tag has more than 64 levels"),
    ({"json_schema": r'{"properties": {"\ud800": {"foo": 1}}}'}, "half of a character"),
    ({"grammar": r'start: %json {"properties": {"\ud800": {"foo": 1}}}'}, "half of a character"),
    ({"structural_tag": r'{"format": {"type": "\ud800"}}'}, "half of a character"),
]


@pytest.mark.parametrize(("structure", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_structure_without_a_grammar_is_refused(
    server: LiveServer, structure: Any, says: str
) -> None:
    before = len(server.engine.submitted)
    response = send(server, structure)
    assert response.status_code in (400, 413), response.text
    assert len(server.engine.submitted) == before
    message = response.json()["error"]["message"]
    assert says in message and "sampling.structured_outputs" in message and len(message) < 500


@once
def test_a_chain_of_references_does_not_exhaust_the_stack(server: LiveServer) -> None:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2000)}
    schema = {"$ref": "#/$defs/a0", "$defs": chain | {"a2000": {"type": "string"}}}
    assert send(server, {"json_schema": schema}).status_code == 200


HUGE = json.dumps({"enum": [*range(10**6)]})


@pytest.mark.parametrize("schema", [HUGE, json.loads(HUGE), {"enum": ["x" * 2**20] * 64}])
def test_oversized_schema_is_neither_parsed_nor_serialised(
    schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the whole schema is handled")

    structure = StructuredOutputs(json_schema=schema)
    asked = ChatRequest(messages=[], guided_json=schema)
    monkeypatch.setattr(json, "loads", never)
    monkeypatch.setattr(msgspec.json, "encode", never)
    assert answers.structure(asked, None, True, CHAT)[1] == structure
    with pytest.raises(TooLarge, match="more than 131072 bytes"):
        samplings.written("structured_outputs", structure)


@pytest.mark.parametrize("line", ["[", "a[\n", "%json true ", '%json {"a":'])
def test_grammar_checks_take_linear_time(line: str) -> None:
    text = 'start: "a"\n// ' + line * (131_000 // len(line))
    began = time.thread_time()
    with contextlib.suppress(InvalidRequest):
        check_grammar(Grammar(kind="lark", text=text))
    assert time.thread_time() - began < 4


@once
def test_structural_tag_at_the_depth_limit_is_accepted(server: LiveServer) -> None:
    response = send(server, {"structural_tag": nested(63)})
    assert response.status_code == 200, response.text


def test_equal_structures_reach_the_engine_in_one_form(server: LiveServer) -> None:
    schema = {"type": "object", "additionalProperties": {}, "properties": {"b": {}, "a": {}}}
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
def test_fields_incompatible_with_a_structure_are_refused(
    server: LiveServer, fields: dict[str, Any]
) -> None:
    response = send(server, {"regex": "a"}, **fields)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    name = next(iter(fields))
    assert message.startswith(f"sampling.{name} is given with sampling.structured_outputs, and ")
    fields = fields | {"prompt": "a", "guided_regex": "a"}
    error = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=30).json()["error"]
    assert error["message"].startswith(f"{name} is given with guided_regex, and ")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
JSON = Grammar(kind="json_schema", text=TEXT[:-1] + ',"additionalProperties":false}')
OBJECT = Grammar(kind="json_schema", text='{"type":"object"}')
REGEX = Grammar(kind="regex", text="[0-9]+")
CHOICE = Grammar(kind="lark", text='start: "a" | "b"')
LARK = Grammar(kind="lark", text="start: /a+/")
TAG: dict[str, Any] = {
    "triggers": ["<f"],
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
}
VLLM_FIELDS: list[tuple[str, Any, Grammar | None]] = [
    ("structured_outputs", {"json": SCHEMA, "regex": None}, JSON),
    ("structured_outputs", {"json": TEXT, "disable_any_whitespace": False}, JSON),
    ("structured_outputs", {"json_object": True}, OBJECT),
    ("structured_outputs", {"regex": "[0-9]+"}, REGEX),
    ("structured_outputs", {"choice": ["a", "b"]}, CHOICE),
    ("structured_outputs", {"grammar": "start: /a+/"}, LARK),
    ("structured_outputs", {"structural_tag": json.dumps(TAG)}, None),
    ("guided_decoding", {"regex": "[0-9]+"}, REGEX),
    ("guided_json", SCHEMA, JSON),
    ("guided_json_object", True, OBJECT),
    ("guided_regex", "[0-9]+", REGEX),
    ("guided_choice", ["a", "b"], CHOICE),
    ("guided_grammar", "start: /a+/", LARK),
    ("response_format", {"type": "json_object"}, OBJECT),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, JSON),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
        JSON,
    ),
    ("response_format", {"type": "structural_tag", **TAG}, None),
]
SGLANG_FIELDS: list[tuple[str, Any, Grammar | None]] = [
    ("json_schema", TEXT, JSON),
    ("regex", "[0-9]+", REGEX),
    ("ebnf", "start: /a+/", LARK),
    ("structural_tag", json.dumps(TAG), None),
]
ROUTES: dict[str, tuple[dict[str, Any], str, list[tuple[str, Any, Grammar | None]]]] = {
    "/v1/completions": ({"prompt": "hi"}, "", VLLM_FIELDS + SGLANG_FIELDS[1:3]),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hi"}]},
        "",
        VLLM_FIELDS + SGLANG_FIELDS[1:3],
    ),
    "/inference/v1/generate": ({"token_ids": [104]}, "sampling_params", VLLM_FIELDS),
    "/generate": ({"text": "hi"}, "sampling_params", SGLANG_FIELDS),
}


def post(server: LiveServer, route: str, fields: dict[str, Any]) -> httpx.Response:
    base, where, _ = ROUTES[route]
    length = "max_new_tokens" if route == "/generate" else "max_tokens"
    given = {length: 4} | fields
    return httpx.post(
        server.url + route, json=base | ({where: given} if where else given), timeout=60
    )


@pytest.mark.parametrize("route", ROUTES)
def test_every_spelling_of_every_dialect_is_one_grammar(server: LiveServer, route: str) -> None:
    for field, value, grammar in ROUTES[route][2]:
        response = post(server, route, {field: value})
        assert response.status_code == 200, (field, value, response.text)
        got = server.engine.submitted[-1].sampling.structured_outputs
        assert got is not None and (got == grammar or grammar is None), field
        if grammar is None:
            assert got.kind == "lark" and '%json {"type": "integer"' in got.text


@pytest.mark.parametrize("route", ROUTES)
def test_structure_error_names_the_field_as_the_client_sent_it(
    server: LiveServer, route: str
) -> None:
    where = ROUTES[route][1]
    path = f"{where}.regex" if route == "/generate" else "guided_regex"
    path = f"{where}.guided_regex" if route == "/inference/v1/generate" else path
    response = post(server, route, {path.rpartition(".")[2]: "a("})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(f"{path}: the regex does not compile: unclosed group")
    if route.startswith("/v1/"):
        assert error["param"] == "guided_regex"
    fields = {field: value for field, value, _ in ROUTES[route][2][:: len(ROUTES[route][2]) - 1]}
    both = post(server, route, fields)
    assert both.status_code == 400 and "both ask for a structure" in both.text


def test_empty_format_asks_for_no_structure(server: LiveServer) -> None:
    for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}):
        assert post(server, "/v1/completions", fields).status_code == 200
        assert server.engine.submitted[-1].sampling.structured_outputs is None
    for value, says in (
        ({"type": "json_schema"}, "no json_schema; give it one"),
        ({"type": "xml"}, "'structural_tag'"),
        ({"type": "structural_tag"}, "structures"),
        ({"type": "json_object", "schema": SCHEMA}, "json_schema.schema"),
        ({"type": "text", "regex": "a"}, "structured_outputs has it"),
    ):
        response = post(server, "/v1/completions", {"response_format": value})
        assert response.status_code == 400 and says in response.text
        assert response.json()["error"]["param"] == "response_format"
    for name in ("structured_outputs", "guided_decoding"):
        response = post(server, "/v1/completions", {name: {"json_schema": SCHEMA}})
        assert response.status_code == 400 and "its name is json here" in response.text
        response = post(server, "/v1/completions", {name: {"json": SCHEMA, "regex": "a"}})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message == f"{name} has json and regex; give one of them"


def test_structural_tag_without_a_grammar_is_refused(server: LiveServer) -> None:
    for tag, says in (
        ({"triggers": []}, "structural_tag.structures is null"),
        (TAG | {"triggers": ["<g"]}, "begin with one of the triggers"),
        ({"format": {"type": "sequence", "elements": []}}, "have at least one"),
        ({"format": {"type": "xml"}}, "must be one of const_string"),
    ):
        response = send(server, {"structural_tag": tag})
        assert response.status_code == 400 and says in response.text, tag


BAR = {"type": "const_string", "value": "|"}


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [("a\\\nb", ["a\nb"]), ("a\nb", ["a\nb"]), ("a/\\/b", ["a//b"]), ("", [""])]
    + [("<think>|</tool_call>", ["<think>", "</tool_call>"])]
    + [("a\\\\nb", ["a\\nb"]), ("[/\\\n]+", ["/", "\n/"]), ("a\\\tb", ["a\tb"])],
)
def test_regex_in_a_structural_tag_matches_like_a_plain_regex(
    model: Path, pattern: str, texts: list[str]
) -> None:
    part = {"type": "regex", "pattern": pattern}
    tag = json.dumps({"format": {"type": "sequence", "elements": [part, BAR, part]}})
    compiler, tokenizer = Compiler(model, 300, [256]), Text.load(model)
    for form, content, output in (("structural_tag", tag, "{0}|{0}"), ("regex", pattern, "{0}")):
        start = compiler.compile(grammar_of(form, content, tokenizer.specials))
        for text in texts:
            written = output.format(text)
            for tokens in ([*written.encode()], *tokenizer.encode([written], special=False)):
                state = start.deep_copy()
                assert state.consume_tokens(tokens) and state.is_accepting()


@once
def test_structures_of_one_request_are_bounded(server: LiveServer) -> None:
    def batch(different: int) -> httpx.Response:
        items = [
            {
                "prompt": "hi",
                "sampling": {"structured_outputs": {"regex": f"a{{1,{i % different + 1}}}"}},
            }
            for i in range(samplings.MOST + 4)
        ]
        body = {"requests": items, "sampling": {"max_tokens": 1}}
        return httpx.post(f"{server.url}/generate", json=body, timeout=60)

    response = batch(samplings.MOST + 1)
    assert response.status_code == 413 and "more than 64 items" in response.text
    assert batch(2).status_code == 200


@once
def test_slow_grammar_is_refused_and_remembered(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that compiles it is ended, and the next one serves other requests."""
    assert send(server, {"regex": "[a-b]"}).status_code == 200
    monkeypatch.setattr(samplings, "COMPILE_S", 0.0)
    slow = {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}
    for _ in range(2):
        response = send(server, {"json_schema": slow})
        assert response.status_code == 400 and "more than 0 s of a core" in response.text
    monkeypatch.undo()
    assert send(server, {"regex": "[a-c]+"}).status_code == 200
