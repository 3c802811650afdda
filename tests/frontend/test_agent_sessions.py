"""Chats of trainers that keep an agent's tokens: prompts as tokens, and the figures that they read
of each choice.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.openai_calls import CHAT, chunks, done, post
from tests.frontend.saying import EOS, write_saying

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
KEPT = {
    "logprobs": True,
    "return_prompt_token_ids": True,
    "return_meta_info": True,
    "no_stop_trim": False,
    "max_tokens": 99,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_saying(tmp_path_factory.mktemp("model"))
    with live_server(model, served_model_name="tiny", reasoning_parser="think") as running:
        yield running


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **KEPT, **fields}


def test_choice_reports_its_tokens_in_sglangs_form(server: LiveServer) -> None:
    [choice] = done(server, CHAT, **said("so"))["choices"]
    meta = choice["meta_info"]
    assert choice["prompt_token_ids"][:2] == [*b"so"]
    assert meta["prompt_tokens"] == len(choice["prompt_token_ids"])
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 3
    assert [token for _, token, _ in meta["output_token_logprobs"]] == [*b"so", 256]
    content = choice["logprobs"]["content"]
    assert [value for value, _, _ in meta["output_token_logprobs"]] == [
        token["logprob"] for token in content
    ]
    assert [text for *_, text in meta["output_token_logprobs"]] == [
        token["token"] for token in content
    ]
    assert meta["finish_reason"] == {"type": "stop", "matched": 256}
    assert meta["weight_version"] == meta["weight_versions"][-1]["version"] == "v0"
    assert meta["cached_tokens"] == 0 and meta["e2e_latency"] > 0 and meta["id"]


def test_tool_call_messages_have_empty_content_instead_of_null(server: LiveServer) -> None:
    for text in (CALL, "<think>hm</think>", f"<think>hm</think>{CALL}"):
        [choice] = done(server, CHAT, **said(text, tools=TOOLS))["choices"]
        assert choice["message"]["content"] == "", text
        [plain] = done(server, CHAT, **said(text, tools=TOOLS, return_meta_info=False))["choices"]
        assert plain["message"]["content"] is None and "meta_info" not in plain


def test_token_prompt_replaces_the_chat_template(server: LiveServer) -> None:
    [first] = done(server, CHAT, **said("so"))["choices"]
    spoken = [token for _, token, _ in first["meta_info"]["output_token_logprobs"]]
    ids = [*first["prompt_token_ids"], *spoken, *b"next", 256]
    [second] = done(server, CHAT, **said("other", input_ids=ids))["choices"]
    assert second["prompt_token_ids"] == [*server.engine.submitted[-1].token_ids] == ids
    rendered = done(server, f"{CHAT}/render", **said("other", input_ids=ids))
    assert rendered["token_ids"] == ids and rendered["prompt"].endswith("next" + EOS)
    # What the prompt's end opens is read as after the template.
    opened = [*b"hm</think>so", 256, *b"<think>\n"]
    [third] = done(server, CHAT, **said("other", input_ids=opened))["choices"]
    assert third["message"]["reasoning"] == "hm" and third["message"]["content"] == "so"


@pytest.mark.parametrize(
    ("ids", "says"),
    [([], "input_ids"), ([300], "input_ids has the token id 300"), ([-1], "input_ids")],
)
def test_token_prompt_is_validated(server: LiveServer, ids: list[int], says: str) -> None:
    response = post(server, CHAT, **said("so", input_ids=ids))
    assert response.status_code == 400 and says in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "input_ids"


def test_stream_reports_its_figures_at_the_end(server: LiveServer) -> None:
    parts = [
        choice for chunk in chunks(server, CHAT, **said("so", n=2)) for choice in chunk["choices"]
    ]
    for index in range(2):
        own = [part for part in parts if part["index"] == index]
        assert "prompt_token_ids" in own[0]
        assert [part for part in own if "meta_info" in part] == own[-1:]
        assert own[-1]["meta_info"]["completion_tokens"] == 3
        assert own[-1]["meta_info"]["id"].endswith(f"_{index}")


def test_generate_reports_the_last_prompt_token_by_default(server: LiveServer) -> None:
    def meta(**fields: Any) -> dict[str, Any]:
        body = {"input_ids": [65, 66], "sampling_params": {"max_new_tokens": 1}, **fields}
        found: dict[str, Any] = done(server, "/generate", **body)["meta_info"]
        return found

    assert meta(return_logprob=True)["input_token_logprobs"] == [[None, 66, None]]
    texts = meta(return_logprob=True, return_text_in_logprobs=True, logprob_start_len=-1)
    assert texts["input_token_logprobs"] == [[None, 66, "B"]]
    assert "input_token_logprobs" not in meta()
    assert len(meta(return_logprob=True, logprob_start_len=0)["input_token_logprobs"]) == 2
