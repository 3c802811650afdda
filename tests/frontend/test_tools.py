"""Calls and reasoning in chat completions: messages, streams, hostile input."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.frontend.live_server import LiveServer, live_server, serving
from tests.frontend.openai_calls import CHAT, USER, chunks, done, post
from tests.frontend.saying import EOS, write_saying
from tests.mostly_long import mostly_long
from tests.tokenizers import FAMILIES
from tlt_server.grammars.compiler import Compiler
from tlt_server.wire.records import Grammar

F = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": F}, {"type": "function", "function": {"name": "g"}}]
TAG = {"type": "regex", "pattern": "yes|no"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "é": "🙂"}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "é": "🙂"}'


@pytest.fixture(scope="module", params=mostly_long(FAMILIES, "qwen3", "special marks"))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    model = write_saying(tmp_path_factory.mktemp("model"), family=FAMILIES[request.param])
    with live_server(
        model,
        served_model_name="tiny",
        engine={"max_model_len": 4096},
        max_prompt_tokens=2048,
        max_model_len=4096,
        reasoning_parser="think",
    ) as running:
        yield running


trusting = serving(served_model_name="tiny", allow_chat_template=True)


def says(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "tools": TOOLS, **fields}


def message(server: LiveServer, text: str, **fields: Any) -> dict[str, Any]:
    [choice] = done(server, CHAT, **says(text, **fields))["choices"]
    return choice["message"] | {"finish_reason": choice["finish_reason"]}


def streamed(server: LiveServer, text: str, **fields: Any) -> dict[str, Any]:
    """Return what a client makes of a stream."""
    found: dict[str, Any] = {"content": None, "role": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks(server, CHAT, **says(text, **fields)):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content", "role"):
                if delta.get(name):
                    found[name] = (found.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", []):
                if call["index"] not in calls:
                    assert call["id"] and call["type"] == "function" and call["function"]["name"]
                    calls[call["index"]] = call
                else:
                    assert not {"id", "type"} & {*call} and "name" not in call["function"]
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            found["finish_reason"] = choice["finish_reason"]
    if calls:
        found["tool_calls"] = [calls[index] for index in range(len(calls))]
    return found


def without_ids(found: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in found.get("tool_calls", [])]
    return {**found, "tool_calls": calls, "content": found["content"] or ""}


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        CALL,
        f"I look. {CALL}\n{CALL}",
        f"<think>\nhm {CALL}\n</think>\n\n{CALL}",
        "<think>hm</think> so",
        CALL.replace("1", "tru"),
        CALL.removesuffix('"🙂"}}\n</tool_call>'),
        CALL.removesuffix("}\n</tool_call>"),
        CALL.replace("1,", "01,"),
        f"{CALL}\n{CALL[:60]}",
        f"<tool_call>{CALL}",
    ],
)
def test_streamed_tool_message_adds_up_to_the_whole(server: LiveServer, text: str) -> None:
    whole = message(server, text)
    assert without_ids(streamed(server, text)) == without_ids(whole)
    assert whole["role"] == "assistant"


def test_tool_calls_are_separated_from_content(server: LiveServer) -> None:
    found = message(server, f"I look. {CALL}\n{CALL}")
    assert found["content"] == "I look." and found["finish_reason"] == "tool_calls"
    assert [call["function"] for call in found["tool_calls"]] == [
        {"name": "f", "arguments": ARGUMENTS}
    ] * 2
    assert len({call["id"] for call in found["tool_calls"]}) == 2
    assert message(server, CALL)["content"] is None
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        plain = message(server, CALL, **fields)
        assert plain["content"] == CALL and "tool_calls" not in plain
        assert plain["finish_reason"] == "stop"
    one = message(server, CALL + CALL, parallel_tool_calls=False)
    assert len(one["tool_calls"]) == 1 and one["content"] == CALL


def test_a_truncated_call_is_content(server: LiveServer) -> None:
    size = len(server.text.encode([CALL], special=False)[0])
    cut, first = CALL[: CALL.index("🙂")], CALL.replace(', "é": "🙂"', "")
    for fields in ({}, {"tool_choice": "required"}):
        found = message(server, CALL, max_tokens=size // 2, **fields)
        assert found["finish_reason"] == "length" and "tool_calls" not in found
        assert CALL.startswith(found["content"]) and '"arguments"' in found["content"]
        assert without_ids(streamed(server, CALL, max_tokens=size // 2, **fields)) == without_ids(
            found
        )
    for text, reason in ((CALL, "stop"), (first + CALL, "tool_calls")):
        found = message(server, text, stop=["🙂"])
        assert (found["content"], found["finish_reason"]) == (cut, reason)
        assert [call["function"]["arguments"] for call in found.get("tool_calls", [])] == (
            ['{"a": 1}'] if reason == "tool_calls" else []
        )
        assert without_ids(streamed(server, text, stop=["🙂"])) == without_ids(found)


def test_logprobs_and_tokens_of_a_choice_match_its_raw_text(server: LiveServer) -> None:
    asked = says(CALL, n=2, logprobs=True, return_token_ids=True)
    reply = done(server, CHAT, **asked)
    for choice in reply["choices"]:
        assert server.text.decode(choice["token_ids"][:-1], special=True) == CALL
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert len(choice["message"]["tool_calls"]) == 1
    found = chunks(server, CHAT, **asked, stream_options={"include_usage": True})
    assert found[-1]["usage"] == reply["usage"] and found[-1]["choices"] == []
    parts = [part for chunk in found for part in chunk["choices"] if part["index"] == 1]
    tokens = [token for part in parts for token in part["token_ids"]]
    assert tokens == reply["choices"][1]["token_ids"]
    assert [
        entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]
    ] == (reply["choices"][1]["logprobs"]["content"])


def test_reasoning_is_separated_on_request(server: LiveServer) -> None:
    text = "<think>\nhm\n</think>\n\nso"
    found = message(server, text)
    assert (found["reasoning_content"], found["reasoning"], found["content"]) == ("hm", "hm", "so")
    left_out = message(server, text, include_reasoning=False)
    assert left_out["content"] == "so" and "reasoning" not in left_out
    assert message(server, text, separate_reasoning=False)["content"] == text


def test_message_history_with_calls_passes_through_the_template(server: LiveServer) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {**message(server, CALL), "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "out"}]},
    ]
    assert done(server, CHAT, messages=messages, tools=TOOLS)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "out",
    }


@pytest.mark.parametrize(
    ("fields", "status", "says_"),
    [
        ({"tools": [TOOLS[0]] * 10_000}, 400, "tools has 10000 items; the limit is 1024"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type is 'web_search'"),
        ({"tools": [TOOLS[0], {"type": "function"}]}, 400, "tools[1].function.name is None"),
        ({"tools": [{"function": {"name": "a\x00b"}}]}, 400, "without control characters"),
        ({"tools": [{"function": {"name": "a" * 300}}]}, 400, "1 to 256 characters"),
        ({"tools": [{"function": {"name": 5}}]}, 400, "tools[0].function.name is 5"),
        ({"tools": [{"function": 5}]}, 400, "tools[0].function.name is None"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"a": "x" * 2**20}}}]},
            400,
            "the limit of this field is 262144",
        ),
        ({"tools": [{"function": {"name": "f", "p": [[[]]] * 70_000}}]}, 400, "members in all"),
        ({"tool_choice": "any"}, 400, "tool_choice is 'any'"),
        ({"tool_choice": {"type": "custom"}}, 400, "tool_choice.type is 'custom'"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, 400, "tool_choice"),
        ({"parallel_tool_calls": 1}, 400, "parallel_tool_calls is 1"),
    ],
)
def test_hostile_tools_are_refused_by_name(
    server: LiveServer, fields: dict[str, Any], status: int, says_: str
) -> None:
    response = post(server, CHAT, **says("a", **fields))
    assert response.status_code == status and says_ in response.text, response.text[:300]
    assert len(response.text) < 600


def test_model_whose_template_lacks_tools_refuses_tools(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = write_saying(tmp_path_factory.mktemp("model"), "{{ messages[-1].content }}" + EOS)
    with live_server(model, served_model_name="tiny") as server:
        response = post(server, CHAT, **says("a"))
        assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
        assert "does not show them" in response.text
        assert done(server, CHAT, **says("a", tool_choice="none"))


def test_tool_calls_of_an_unknown_form_stay_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_saying(tmp_path_factory.mktemp("model"))
    with live_server(model, served_model_name="tiny", tool_call_parser="none") as server:
        assert message(server, CALL)["content"] == CALL


def matcher(server: LiveServer, grammar: Grammar) -> Callable[[str], bool]:
    """Return what tells whether a text is complete under a grammar."""
    compiled = Compiler(server.config.model, 300, [256]).compile(grammar)

    def accepts(text: str) -> bool:
        spelled, [tokens] = [*text.encode()], server.text.encode([text], special=False)
        one, other = (
            (state := compiled.deep_copy()).try_consume_tokens(ids) == len(ids)
            and state.is_accepting()
            for ids in (spelled, tokens)
        )
        assert one == other, "a mark is its token or its bytes"
        return one

    return accepts


REQUIRED = [
    ({"tool_choice": "required"}, ["f", "g"], True),
    ({"tool_choice": "required", "parallel_tool_calls": False}, ["f", "g"], False),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, ["g"], False),
]


@pytest.mark.parametrize(("fields", "names", "several"), REQUIRED)
def test_required_tool_choice_constrains_the_output_to_calls(
    server: LiveServer, fields: dict[str, Any], names: list[str], several: bool
) -> None:
    found = message(server, CALL, **fields)
    assert found["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    grammar = server.engine.submitted[-1].sampling.structured_outputs
    assert grammar is not None and grammar.kind == "lark"
    accepts = matcher(server, grammar)
    thought = "<think>hm</think>\n\n"
    for name in ("f", "g"):
        arguments = '{"a": 5}' if name == "f" else "{}"
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(call) == accepts(thought + call) == (name in names)
        assert not accepts("so " + call) and not accepts(thought)
        assert accepts(f"{call}\n{call}") == (several and name in names)
        assert not accepts(call.replace(arguments, '{"a": "x"}'))
        assert not accepts(call.replace(arguments, arguments.replace("{", "{\n\n")))


def test_output_with_tools_and_schema_is_a_call_or_fits_schema(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    message(server, "a", response_format=format)
    accepts = matcher(server, server.engine.submitted[-1].sampling.structured_outputs)
    for text in (CALL.replace(', "é": "🙂"', ""), '{"b": null}'):
        assert accepts(text) and accepts(f"<think>a</think>{text}")
    assert not accepts("so") and not accepts('{"b": 1}')
    assert not accepts(CALL), "the schema lists no other property"
    message(server, "a", tools=[], guided_choice=["x", "y"], separate_reasoning=False)
    accepts = matcher(server, server.engine.submitted[-1].sampling.structured_outputs)
    assert accepts("x") and not accepts("<think>a</think>x")


def test_forced_tool_call_overrides_the_response_format(server: LiveServer) -> None:
    def held(path: str, **fields: Any) -> Grammar | None:
        assert done(server, path, tool_choice="required", **fields)
        return server.engine.submitted[-1].sampling.structured_outputs

    schema = {"name": "x", "schema": {"type": "object"}}
    format = {"type": "json_schema", **schema}
    tools, asked = [{"type": "function", **TOOLS[0]["function"]}], says("a", tools=TOOLS[:1])
    forced = held(CHAT, **asked)
    assert forced == held(
        CHAT, response_format={"type": "json_schema", "json_schema": schema}, **asked
    )
    assert forced == held("/v1/responses", input="a", tools=tools, text={"format": format})
    both = post(server, CHAT, **says("a", guided_regex="a", tool_choice="required"))
    assert both.status_code == 400 and "give one of them" in both.text


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(yes|no)"},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'root ::= "yes" | "no"'},
        {"ebnf": 'start: "yes" | "no"'},
        {"response_format": {"type": "structural_tag", "format": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}},
    ],
)
def test_structure_applies_only_after_the_reasoning(
    server: LiveServer, fields: dict[str, Any]
) -> None:
    message(server, "a", tools=[], **fields)
    accepts = matcher(server, server.engine.submitted[-1].sampling.structured_outputs)
    assert accepts("<think>I\nsay</think>\n\nno") and accepts("yes")
    assert not accepts("<think>yes") and not accepts("<think>I</think>maybe")
    message(server, "a", tools=[], separate_reasoning=False, **fields)
    accepts = matcher(server, server.engine.submitted[-1].sampling.structured_outputs)
    assert accepts("yes") and not accepts("<think>a</think>no")


@pytest.mark.parametrize(
    ("fields", "says_"),
    [
        ({"tools": [], "tool_choice": "required"}, "but tools is empty: give some"),
        (
            {"tool_choice": {"function": {"name": "h"}}},
            "tool_choice.function.name is 'h', which is not one of the tools",
        ),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"type": "wrong"}}}],
                "tool_choice": "required",
            },
            "tool_choice: ",
        ),
    ],
)
def test_an_unenforceable_tool_choice_is_refused(
    server: LiveServer, fields: dict[str, Any], says_: str
) -> None:
    response = post(server, CHAT, **says("a", **fields))
    assert response.status_code == 400 and says_ in response.text, response.text
    assert response.json()["error"]["param"] == "tool_choice"


def test_half_a_character_in_a_structure_is_refused(server: LiveServer) -> None:
    for fields in (
        {"guided_json": r'{"enum": ["\ud800"]}'},
        {"guided_json": json.dumps({"properties": {"\ud800": {"x": 1}}, "title": "x" * 100_000})},
        {"structured_outputs": {"structural_tag": r'{"format": {"type": "\ud800"}}'}},
    ):
        response = post(server, CHAT, **says("a", **fields))
        assert response.status_code == 400, response.text
        assert "half of a character" in response.json()["error"]["message"]


def test_llama_calls_are_read_with_their_special_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = write_saying(tmp_path_factory.mktemp("model"), family=FAMILIES["llama3"])
    call = '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'
    with live_server(model, served_model_name="tiny", tool_call_parser="llama3_json") as server:
        for fields in ({}, {"tool_choice": "required"}):
            found = message(server, call, **fields)
            assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
            assert found["content"] is None


def test_a_special_token_may_be_a_stop_string(server: LiveServer) -> None:
    text = server.text
    special = next(token for token in reversed(text.specials) if token not in text.tokens.values())
    eos = text.tokens["eos_token"]
    for stop in (special, eos, "</think>"):
        asked = {"prompt": f"ab{stop}cd", "max_tokens": 30, "stop": ["x", stop]}
        sampling = {"max_new_tokens": 30, "stop": ["x", stop]}
        for keeps, expected in ((False, "ab"), (True, f"ab{stop}")):
            fields = asked | {"include_stop_str_in_output": keeps}
            [choice] = done(server, "/v1/completions", **fields)["choices"]
            assert (choice["text"], choice["stop_reason"]) == (expected, stop)
            parts = chunks(server, "/v1/completions", **fields)
            assert "".join(part["choices"][0]["text"] for part in parts) == expected
            for skips in (True, False):
                own = sampling | {"no_stop_trim": keeps, "skip_special_tokens": skips}
                found = done(server, "/generate", text=asked["prompt"], sampling_params=own)
                assert found["text"].removeprefix(text.tokens.get("bos_token", "")) == expected
                assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            chat = says(asked["prompt"], stop=stop, include_stop_str_in_output=keeps)
            [choice] = done(server, CHAT, **chat)["choices"]
            assert choice["message"]["content"] == expected and choice["stop_reason"] == stop
    response = post(server, "/v1/completions", prompt="a", max_tokens=3, stop=f"x{special}")
    assert response.status_code == 400 and "special token" in response.text
    assert f"give its id {text.specials[special]} in stop_token_ids" in response.text


def test_render_route_returns_the_prompt_without_generating(server: LiveServer) -> None:
    before = len(server.engine.submitted)
    found = done(server, f"{CHAT}/render", **says("é"))
    end = server.text.tokens["eos_token"]
    assert found["prompt"].startswith("é" + end) and f'"name": "{F["name"]}"' in found["prompt"]
    assert found["count"] == len(found["token_ids"]) and found["token_ids"][:2] == [*"é".encode()]
    assert len(server.engine.submitted) == before


@pytest.mark.parametrize(
    ("template", "says_"),
    [
        ("{{", "chat_template does not compile"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{% include 'x' %}", "refuses these messages"),
        ("{{ raise_exception('no') }}", "no"),
        ("a" * 70_000, "at most 65536 characters"),
    ],
)
def test_template_in_a_request_is_bounded(trusting: LiveServer, template: str, says_: str) -> None:
    for path in (CHAT, "/tokenize"):
        response = post(trusting, path, messages=USER, chat_template=template)
        assert response.status_code == 400 and says_ in response.text, response.text[:300]


def test_a_request_template_runs_if_allowed(server: LiveServer, trusting: LiveServer) -> None:
    asked = {"messages": USER, "chat_template": "own {{ messages[0].content }}" + EOS}
    assert message(trusting, "", **asked)["content"] == "own hi"
    refused = post(server, CHAT, **asked)
    assert refused.status_code == 400 and "--allow-chat-template" in refused.text
    assert refused.json()["error"]["param"] == "chat_template"
