"""Habits of clients of other servers: names for aborts, models by path, outputs longer than the
model, usage in every chunk, seeds with a sign.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import LiveServer
from tests.frontend.openai_calls import COMPLETIONS, chunks, post, server
from tests.waiting import until
from tlt_client.fields import MAX_SEED

__all__ = ["server"]  # a fixture


def abort(server: LiveServer, *names: str) -> dict[str, Any]:
    """Abort by these names once a request is there; return the reply."""
    ended: dict[str, Any] = {}

    def found() -> object:
        ended.update(post(server, "/abort_requests", request_ids=names).json())
        return ended["aborted"]

    until(found)
    return ended


def test_abort_by_several_names_ends_a_request_once(server: LiveServer) -> None:
    server.engine.aborted.clear()
    body = {"prompt": [HANGS], "request_id": "mine"}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(httpx.post, server.url + COMPLETIONS, json=body, timeout=30)
        ended = abort(server, "mine", "cmpl-mine", "mine", "unknown")
    assert ended == {"status": "aborted", "aborted": 1}
    assert waiting.result().json()["choices"][0]["finish_reason"] == "abort"
    assert len({*server.engine.aborted}) == len(server.engine.aborted)


@pytest.mark.parametrize(
    ("path", "body", "headers", "name"),
    [
        (COMPLETIONS, {"prompt": [HANGS], "request_id": "mine"}, {}, "mine"),
        (COMPLETIONS, {"prompt": [HANGS], "request_id": "mine"}, {}, "cmpl-mine"),
        (COMPLETIONS, {"prompt": [HANGS]}, {"x-request-id": "mine"}, "mine"),
        (
            "/inference/v1/generate",
            {"token_ids": [HANGS], "request_id": "mine"},
            {},
            "generate-tokens-mine",
        ),
    ],
)
def test_a_request_is_aborted_by_its_clients_name(
    server: LiveServer, path: str, body: dict[str, Any], headers: dict[str, str], name: str
) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(httpx.post, server.url + path, json=body, headers=headers, timeout=30)
        ended = abort(server, name)
    assert ended == {"status": "aborted", "aborted": 1}
    reply = waiting.result().json()
    assert reply["choices"][0]["finish_reason"] == "abort"
    assert reply.get("id", "cmpl-mine") == "cmpl-mine"
    assert len(server.service.generations.named) == 0


def test_model_is_listed_by_name_and_directory(server: LiveServer, model: Path) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["tiny", str(model)]
    for entry in listed:
        assert (entry["root"], entry["parent"], entry["max_model_len"]) == (str(model), None, 512)
        assert httpx.get(f"{server.url}/v1/models/{entry['id']}").json() == entry
    none = httpx.get(f"{server.url}/v1/models/none")
    assert none.status_code == 404 and none.json()["error"]["type"] == "not_found_error"


def test_output_beyond_max_model_len_ends_by_length(server: LiveServer) -> None:
    reply = post(server, COMPLETIONS, prompt="a", max_tokens=10**6).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 512
    tokens = post(
        server, "/inference/v1/generate", token_ids=[65], sampling_params={"max_tokens": 600}
    ).json()
    assert tokens["choices"][0]["finish_reason"] == "length"


def test_continuous_usage_stats_are_in_each_chunk(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(server, COMPLETIONS, prompt="ab", max_tokens=9, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[-1] == 9 and counts[0] > 0
    assert {chunk["usage"]["prompt_tokens"] for chunk in found} == {2}
    without = chunks(server, COMPLETIONS, prompt="ab", stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in without[:-1]] == [None] * (len(without) - 1)


def test_negative_seeds_are_accepted(server: LiveServer) -> None:
    for seed, keyed in ((-7, MAX_SEED - 6), (-(2**63), 2**63), (2**64 - 1, MAX_SEED), (7, 7)):
        assert post(server, COMPLETIONS, prompt="a", max_tokens=1, seed=seed).status_code == 200
        assert server.engine.submitted[-1].seed == keyed
    assert post(server, COMPLETIONS, prompt="a", max_tokens=1, seed=-1).status_code == 200
    assert server.engine.submitted[-1].seed != MAX_SEED, "no seed"


def test_sglang_replies_have_texts_and_sglangs_field_names(server: LiveServer) -> None:
    def generate(**body: Any) -> httpx.Response:
        return post(server, "/generate", **body)

    meta = generate(
        text="ab",
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        sampling_params={"max_new_tokens": 1},
    ).json()["meta_info"]
    assert [text for _, _, text in meta["input_token_logprobs"]] == ["a", "b"]
    assert meta["output_token_logprobs"][0][2] == meta["output_top_logprobs"][0][0][2] == "a"
    for body, field in (
        ({"sampling_params": {"max_new_tokens": 512}}, "sampling_params.max_new_tokens is 512"),
        (
            {"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}},
            "sampling_params.min_new_tokens is 9",
        ),
        ({"return_logprob": True, "top_logprobs_num": 6}, "top_logprobs_num is 6"),
    ):
        message = generate(text="a", **body).json()["error"]["message"]
        assert message.startswith(field), message
    assert generate(input_ids=[[65], []]).json()["error"]["message"].startswith("input_ids[1] ")
    assert generate(text="").json()["error"]["message"].startswith("text has an empty prompt")
