"""No field that changes tokens is swallowed: each field that other servers know is done, refused by
name, or changes nothing.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.inspect import BoolType, FloatType, IntType

from tests.frontend.field_tables import PAGES, STRUCTS, entries, pages, spelled, table
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.openai_calls import USER
from tests.frontend.tiny_model import SPECIALS, TEMPLATE, write_model
from tlt_client.fields import SharedSampling
from tlt_server.frontend.dialects.known_fields import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    SGLANG,
    SGLANG_SAMPLING,
    TOKENIZE,
    VLLM,
    VLLM_SAMPLING,
    each,
)
from tlt_server.frontend.http.fields import RefusedField

ROUTES = {
    COMPLETIONS: "/v1/completions",
    CHAT: "/v1/chat/completions",
    TOKENIZE: "/tokenize",
    RESPONSES: "/v1/responses",
    VLLM: "/inference/v1/generate",
    VLLM_SAMPLING: "/inference/v1/generate",
    SGLANG: "/generate",
    SGLANG_SAMPLING: "/generate",
}
SAMPLING = {VLLM_SAMPLING, SGLANG_SAMPLING}
LENGTH = {
    RESPONSES: "max_output_tokens",
    SGLANG: "max_new_tokens",
    SGLANG_SAMPLING: "max_new_tokens",
}
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": USER},
    TOKENIZE: {"messages": USER},
    RESPONSES: {"input": "hi"},
    VLLM: {"token_ids": [104, 105]},
    VLLM_SAMPLING: {"token_ids": [104, 105]},
    SGLANG: {"text": "hi"},
    SGLANG_SAMPLING: {"text": "hi"},
}
REFUSED = [
    (body, name, verdict) for body, name, verdict in each() if isinstance(verdict, RefusedField)
]
IGNORED = [(body, name) for body, name, verdict in each() if not isinstance(verdict, RefusedField)]


TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}
# What the template reads. The answer begins with what was said in the first message.
READS = (
    "{{ messages[0].said }}{{ tools }}{{ reasoning_effort }}{{ verbosity }}{{ enable_thinking }}"
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALLS = [{"role": "user", "said": '<tool_call>{"name": "f"}</tool_call>' * 2}]
THOUGHT = [{"role": "user", "said": "<think>hm</think>so"}]
# Field -> a value that has an effect, and the fields that it needs for that.
DONE: dict[str, tuple[Any, dict[str, Any]]] = {
    "top_k": (7, {}),
    "min_new_tokens": (2, {}),
    "stop": (["q"], {}),
    "stop_token_ids": ([9], {}),
    "logit_bias": ({"5": 1.5}, {}),
    "allowed_token_ids": ([5], {}),
    "bad_words": (["q"], {}),
    "response_format": ({"type": "json_object"}, {}),
    "structured_outputs": ({"regex": "a+"}, {}),
    "guided_decoding": ({"choice": ["a"]}, {}),
    "guided_json": ({}, {}),
    "guided_json_object": (True, {}),
    "guided_regex": ("a", {}),
    "guided_choice": (["a", "b"], {}),
    "guided_grammar": ('root ::= "a"', {}),
    "json_schema": ('{"type": "integer"}', {}),
    "regex": ("a", {}),
    "ebnf": ('root ::= "a"', {}),
    "structural_tag": (TAG, {}),
    "include_stop_str_in_output": (True, {"stop": ["i"]}),
    "truncate_prompt_tokens": (1, {}),
    "n": (2, {}),
    "seed": (9, {}),
    "sampling_seed": (9, {}),
    "max_tokens": (3, {}),
    "max_new_tokens": (3, {}),
    "max_completion_tokens": (3, {}),
    "logprobs": (1, {}),
    "top_logprobs": (1, {"logprobs": True}),
    "prompt_logprobs": (1, {}),
    "return_tokens_as_token_ids": (True, {"logprobs": 1}),
    "return_token_ids": (True, {}),
    "return_weight_versions": (True, {}),
    "return_logprob": (True, {}),
    "logprob_start_len": (0, {"return_logprob": True}),
    "top_logprobs_num": (1, {"return_logprob": True}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "incremental_streaming_output": (True, {"stream": True}),
    "cache_salt": ("v1", {}),
    "priority": (3, {}),
    "train": (False, {}),
    "model": ("none", {}),
    "lora_path": ("none", {}),
    "rid": ("a", {}),
    "request_id": ("a", {}),
    "return_text_in_logprobs": (True, {"return_logprob": True}),
    "echo": (True, {}),
    "prompt": ("ho", {}),
    "text": ("ho", {}),
    "token_ids": ([104], {}),
    "input_ids": ([104], {"text": None}),
    "return_prompt_token_ids": (True, {}),
    "return_meta_info": (True, {}),
    "messages": ([{"role": "user", "content": "ho"}], {}),
    "tools": (TOOLS, {}),
    "tool_choice": ("none", {"tools": TOOLS}),
    "parallel_tool_calls": (False, {"tools": TOOLS, "messages": CALLS, "max_tokens": 99}),
    "include_reasoning": (False, {"messages": THOUGHT, "max_tokens": 30}),
    "separate_reasoning": (False, {"messages": THOUGHT, "max_tokens": 30}),
    "chat_template": ("own {{ messages[0].content }}", {}),
    "chat_template_kwargs": ({"enable_thinking": True}, {}),
    "reasoning_effort": ("low", {}),
    "verbosity": ("low", {}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {}),
    "add_special_tokens": (True, {}),
    "input": ("ho", {}),
    "previous_response_id": (None, {}),
    "instructions": ("ho", {}),
    "store": (False, {}),
    "max_output_tokens": (3, {}),
    "reasoning": ({"effort": "low"}, {}),
    "metadata": ({"a": "b"}, {}),
    "sampling_params": ({"temperature": 0.25}, {}),
    "skip_special_tokens": (False, {"no_stop_trim": True}),
    "no_stop_trim": (True, {"stop": ["i"]}),
    "session_id": ("episode", {}),
}
# Numbers and switches are told by their declaration: a little above the least, and true.
for field in msgspec.inspect.type_info(SharedSampling).fields:  # type: ignore[attr-defined]
    match field.type:
        case IntType(ge=least):
            DONE[field.name] = (least or 0) + 2, {}
        case FloatType(ge=least):
            DONE[field.name] = (least or 0.0) + 0.5, {}
        case BoolType():
            DONE[field.name] = True, {}
OTHERWISE: dict[tuple[str, str], Any] = {
    (COMPLETIONS, "add_special_tokens"): False,
    (RESPONSES, "text"): {"format": {"type": "json_object"}},
}
# What differs in each reply.
OWN = r'"(id|item_id|call_id|created|created_at|request_id|e2e_latency)":("[^"]*"|[0-9.e-]+)'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a template that reads all that it can be given, and a tokenizer that puts a
    token before a text.
    """
    model = write_model(tmp_path_factory.mktemp("model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = READS + TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    _put_before_texts(model)
    parsers: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    with live_server(
        model, served_model_name="tiny", max_prompt_tokens=500, allow_chat_template=True, **parsers
    ) as running:
        yield running


def _put_before_texts(model: Path) -> None:
    path, first = model / "tokenizer.json", SPECIALS[1]
    tokenizer = json.loads(path.read_text())
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": first, "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {first: {"id": first, "ids": [257], "tokens": [first]}},
    }
    path.write_text(json.dumps(tokenizer))


def send(server: LiveServer, body: str, **fields: Any) -> httpx.Response:
    """Send a body with further fields, which for sampling stand in `sampling_params`."""
    length = LENGTH.get(body, "max_tokens")
    sampling: dict[str, Any] = {length: 4, "seed": 7}
    if body in (SGLANG, SGLANG_SAMPLING):
        sampling = {length: 4, "sampling_seed": 7}
    content = dict(BASES[body])
    if body in (COMPLETIONS, CHAT, RESPONSES):
        content |= sampling | fields
    elif body in SAMPLING:
        content["sampling_params"] = sampling | fields
    elif body == TOKENIZE:
        content |= fields
    else:
        content |= {"sampling_params": sampling, **fields}
    return httpx.post(server.url + ROUTES[body], json=content, timeout=20)


def submitted(server: LiveServer, body: str, **fields: Any) -> Any:
    """Return what the engine gets; of a text that is only tokenised, the tokens."""
    response = send(server, body, **fields)
    assert response.status_code == 200, response.text
    if body == TOKENIZE:
        return response.json()["tokens"]
    request = server.engine.submitted[-1]
    return request.sampling, [*request.token_ids], request.seed


@pytest.mark.parametrize(("body", "name", "verdict"), REFUSED, ids=lambda value: str(value)[:40])
def test_an_unsupported_field_is_refused_by_name(
    server: LiveServer, body: str, name: str, verdict: RefusedField
) -> None:
    before = len(server.engine.submitted)
    response = send(server, body, **{name: "other"})
    assert response.status_code == 400 and len(server.engine.submitted) == before
    path = f"sampling_params.{name}" if body in SAMPLING else name
    error = response.json()["error"]
    assert error["message"] == f"{path} is 'other'; {verdict.why}"
    if body in (COMPLETIONS, CHAT, TOKENIZE, RESPONSES):
        assert error["param"] == name and error["type"] == "invalid_request_error"
    base = submitted(server, body)
    for off in (None, *verdict.off):
        assert submitted(server, body, **{name: off}) == base


@pytest.mark.parametrize(("body", "name"), IGNORED)
def test_ignored_field_changes_neither_prompt_nor_sampling(
    server: LiveServer, body: str, name: str
) -> None:
    base = submitted(server, body)
    for value in (True, "other", {"a": [1]}):
        assert submitted(server, body, **{name: value}) == base


def test_unsupported_tool_choice_values_are_refused(server: LiveServer) -> None:
    for value in (0, {"type": "object"}, [[]], ["none"], "x" * 10**5):
        response = send(server, CHAT, tool_choice=value)
        assert response.status_code == 400, value
        assert len(response.json()["error"]["message"]) < 300
    huge = httpx.post(
        server.url + ROUTES[CHAT],
        content=b'{"messages":[{"role":"user","content":"a"}],"tool_choice":' + b"9" * 200 + b"}",
    )
    assert huge.status_code == 400 and "tool_choice is" in huge.text


def observed(server: LiveServer, body: str, **fields: Any) -> Any:
    """Return the status, the reply without what differs each time, and what the engine got."""
    response = send(server, body, **fields)
    reply = response.status_code, re.sub(OWN, "", response.text)
    if body == TOKENIZE:
        return reply
    got = server.engine.submitted[-1]
    group = got.group_id if got.group_id == "episode" else "its own"
    of_request = got.seed, got.salt, got.priority, got.train, group
    return *reply, got.sampling, [*got.token_ids], *of_request


@pytest.mark.parametrize(
    ("body", "name"),
    [(body, name) for body, kind in STRUCTS.items() for name in kind.__struct_fields__],
)
def test_every_effective_field_changes_the_result(server: LiveServer, body: str, name: str) -> None:
    value, needs = DONE[name]
    needs = {other: need for other, need in needs.items() if other not in STRUCTS[body].refused}
    value = OTHERWISE.get((body, name), value)
    if (body, name) == (VLLM, "stream"):
        assert send(server, body, stream=True).status_code == 400  # it names the streaming route
    elif (body, name) == (TOKENIZE, "prompt"):
        assert send(server, body, prompt="ho", messages=None).json()["count"] == 3
    elif name == "previous_response_id":
        first = send(server, body).json()["id"]
        second = submitted(server, body, previous_response_id=first)
        assert len(second[1]) > 2 * len(submitted(server, body)[1])
    elif (body, name) == (RESPONSES, "request_id"):
        assert send(server, body, request_id="a").status_code == 200
    elif name in ("rid", "request_id"):
        assert re.search(r'"(cmpl-|chatcmpl-)?a"', send(server, body, **{name: value}).text)
    else:
        base = observed(server, body, **needs)
        assert observed(server, body, **needs) == base
        found = observed(server, body, **{**needs, name: value})
        assert found != base and found[0] == (404 if name in ("model", "lora_path") else 200)


def test_a_prompt_is_truncated_to_its_last_tokens(server: LiveServer) -> None:
    def tokens(body: str, **fields: Any) -> list[int]:
        return submitted(server, body, **fields)[1]

    whole = tokens(CHAT)
    assert tokens(CHAT, truncate_prompt_tokens=2) == whole[-2:]
    assert tokens(CHAT, truncate_prompt_tokens=10**6) == whole
    assert tokens(CHAT, truncate_prompt_tokens=-1) == whole
    long = {"prompt": "x" * 8000}
    assert send(server, COMPLETIONS, **long).status_code == 400
    assert len(tokens(COMPLETIONS, **long, truncate_prompt_tokens=-1)) == 500
    assert len(tokens(COMPLETIONS, **long, truncate_prompt_tokens=-1, max_tokens=200)) == 312
    echoed = send(server, COMPLETIONS, prompt="abcd", truncate_prompt_tokens=2, echo=True)
    assert echoed.json()["choices"][0]["text"].startswith("cd")
    assert tokens(VLLM_SAMPLING, truncate_prompt_tokens=1) == [105]
    none = send(server, COMPLETIONS, truncate_prompt_tokens=0)
    assert none.status_code == 400 and none.json()["error"]["param"] == "truncate_prompt_tokens"


def test_impossible_bad_words_and_token_ids_are_refused(server: LiveServer) -> None:
    for fields, says in (
        ({"bad_words": [f"{i:0256}" for i in range(9)]}, "bad_words are 4617 tokens of this"),
        ({"bad_words": ["  "]}, "which is not a word"),
        ({"bad_words": [""]}, "at least 1 character"),
        ({"bad_words": ["q"] * 257}, "at most 256 items"),
        ({"allowed_token_ids": []}, "is empty"),
        ({"allowed_token_ids": [300]}, "end at 299"),
        ({"allowed_token_ids": [5] * 4097}, "at most 4096 items"),
        ({"allowed_token_ids": [113], "bad_words": ["q"]}, "has no token that"),
        ({"allowed_token_ids": [110, 113], "bad_words": ["qn", "nq"]}, "has no token that"),
        ({"allowed_token_ids": [256], "min_tokens": 1}, "has no token that"),
    ):
        for body in (COMPLETIONS, CHAT, VLLM_SAMPLING, SGLANG_SAMPLING):
            response = send(server, body, **fields)
            assert response.status_code == 400 and says in response.text, (body, fields)
    fields = {"bad_words": ["q", " z", "no", "nonq"], "allowed_token_ids": [9, 5]}
    sampling = submitted(server, COMPLETIONS, **fields)[0]
    assert sampling.bad_words == ((110, 111), (113,), (122,))
    assert sampling.allowed_token_ids == (5, 9)


def test_a_final_message_is_continued(server: LiveServer) -> None:
    said = [*USER, {"role": "assistant", "content": "<|end|> it "}]
    continued = {"messages": said, "continue_final_message": True}
    head = send(server, TOKENIZE, messages=USER, add_generation_prompt=True).json()["tokens"]
    expected = [*head, 256, *b" it "]
    assert send(server, TOKENIZE, **continued).json()["tokens"] == expected
    assert submitted(server, CHAT, **continued)[1] == expected
    both = send(server, CHAT, **continued, add_generation_prompt=True)
    assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"
    long = [*USER, {"role": "assistant", "content": "y" * 6000}]  # rendered by another process
    fields = {"messages": long, "continue_final_message": True, "truncate_prompt_tokens": 20}
    assert submitted(server, CHAT, **fields)[1] == [*b"y" * 20]


def test_stop_string_stays_in_the_text_on_request(server: LiveServer) -> None:
    for stream in (False, True):
        for stop, kept in (({"stop": ["ih"]}, "ih"), ({"stop_token_ids": [105]}, "i")):
            texts = []
            for keeps in (False, True):
                fields = {"include_stop_str_in_output": keeps, "stream": stream, **stop}
                reply = send(server, COMPLETIONS, add_special_tokens=False, **fields).text
                texts.append("".join(re.findall(r'"text":"([^"]*)"', reply)))
            assert texts == ["h", "h" + kept]


def test_no_field_of_chat_is_swallowed_by_responses() -> None:
    chat, responses = entries(CHAT), entries(RESPONSES)
    assert {*chat} <= {*responses}
    effective = {name for name, verdict in chat.items() if verdict != "ignored"}
    ignored = {name for name in effective if responses[name] == "ignored"}
    assert ignored == {"stream_options"}  # a stream always ends with the usage


@pytest.mark.parametrize("page", PAGES)
def test_every_field_is_either_supported_ignored_or_refused(page: str) -> None:
    for body in PAGES[page]:
        assert len(entries(body)) >= len(STRUCTS[body].__struct_fields__)
        for name, verdict in entries(body).items():
            rows = [row.split(" | ") for row in table(page).splitlines() if spelled(name) in row]
            said = [row[0] for row in rows if {body, "everywhere"} & {*row[1].split(", ")}]
            assert said == [f"| {verdict}"], name


def test_docs_pages_hold_the_generated_field_tables() -> None:
    for path, text in pages():
        assert path.read_text() == text, "run python -m tests.frontend.field_tables"
