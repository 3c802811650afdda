"""The cost of large replies and long streams: bytes, chunks, and how long they hold the loop."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import json_format

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.loop_holds import loop_holds
from tlt_client.rpc.rollout_pb2 import GenerateRequest, ItemResult
from tlt_client.rpc.rollout_pb2_grpc import RolloutServiceStub
from tlt_server.frontend.generation.generation import OUTPUT_BYTES, VALUE_BYTES, Generations
from tlt_server.frontend.generation.items import FinishedItem, TokenEvent
from tlt_server.frontend.generation.requests import ItemFields, NativeRequest, SamplingFields
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.keys import EVERYBODY
from tlt_server.frontend.http.slices import LoopShare
from tlt_server.frontend.rpc.messages import fill
from tlt_server.wire.packed import PackedIds

CHOICES, TOKENS, ALTERNATIVES = 4, 900, 20
HOLD_S = 0.06  # thrice the promise, for a slow core under load
SGLANG = {
    "input_ids": [65, 66, 67],
    "sampling_params": {"n": CHOICES, "max_new_tokens": TOKENS, "ignore_eos": True},
    "return_logprob": True,
    "top_logprobs_num": ALTERNATIVES,
}
NATIVE = {
    "requests": [{"token_ids": [65, 66, 67], "n": CHOICES}],
    "sampling": {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": ALTERNATIVES},
}
OPENAI = {"n": CHOICES, "max_tokens": TOKENS, "ignore_eos": True}
COMPLETION = OPENAI | {"prompt": [65, 66, 67], "logprobs": ALTERNATIVES}
CHAT = OPENAI | {
    "messages": [{"role": "user", "content": "a"}],
    "logprobs": True,
    "top_logprobs": ALTERNATIVES,
}
VLLM = {
    "token_ids": [65, 66, 67],
    "sampling_params": {
        "n": CHOICES,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": ALTERNATIVES,
    },
}
WHOLE = [
    ("/generate", SGLANG),
    ("/generate", NATIVE),
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/inference/v1/generate", VLLM),
]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    engine = {"alternatives": ALTERNATIVES, "max_model_len": 4096, "per_step": 8}
    with live_server(model, engine=engine, max_model_len=4096, grpc_port=0) as running:
        yield running


def chunks(server: LiveServer, body: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Return the chunks of a stream in SGLang's form, and their bytes."""
    reply = httpx.post(f"{server.url}/generate", json=body | {"stream": True}, timeout=60)
    *found, done = reply.content.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    return [json.loads(chunk.removeprefix(b"data: ")) for chunk in found], len(reply.content)


def whole(server: LiveServer, body: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    return reply.json(), len(reply.content)


def tokens_of(generated: dict[str, Any]) -> list[Any]:
    meta = generated["meta_info"]
    return [generated["output_ids"], meta["output_token_logprobs"], meta["output_top_logprobs"]]


def lasting(meta: dict[str, Any]) -> dict[str, Any]:
    """Leave out the id and figures of one run."""
    return {
        name: value
        for name, value in meta.items()
        if name not in ("id", "e2e_latency") and not name.startswith("spec_")
    }


def test_cumulative_chunks_take_at_most_twice_the_bytes(server: LiveServer) -> None:
    expected, own = whole(server, SGLANG)
    found, sent = chunks(server, SGLANG)
    assert sent < 2 * own
    for index, choice in enumerate(expected):
        mine = [chunk for chunk in found if chunk["index"] == index]
        assert len(mine) > 3
        assert len(mine[0]["output_ids"]) == 8  # the first output at once
        assert mine[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": TOKENS}
        assert all(chunk["meta_info"]["finish_reason"] is None for chunk in mine[:-1])
        assert lasting(mine[-1]["meta_info"]) == lasting(choice["meta_info"])
        assert (mine[-1]["text"], tokens_of(mine[-1])) == (choice["text"], tokens_of(choice))
        for before, after in zip(mine, mine[1:], strict=False):
            assert after["text"].startswith(before["text"])
            for short, long in zip(tokens_of(before), tokens_of(after), strict=True):
                assert long[: len(short)] == short
                assert len(short) == before["meta_info"]["completion_tokens"]


def test_a_short_stream_has_a_chunk_for_nearly_each_output(server: LiveServer) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 160}, "stream": True}
    found, _ = chunks(server, body)
    lengths = [len(chunk["output_ids"]) for chunk in found]
    assert lengths[0] == 8 and lengths[-1] == 160
    assert len(lengths) > 10  # there are 20 outputs; some may be joined


@pytest.mark.parametrize("special", [False, True])
def test_streamed_increments_add_up_to_the_whole(server: LiveServer, special: bool) -> None:
    params = SGLANG["sampling_params"] | {"skip_special_tokens": not special}
    body = SGLANG | {"sampling_params": params, "incremental_streaming_output": True}
    expected, own = whole(server, body)
    found, sent = chunks(server, body)
    assert sent < 2 * own
    for index, choice in enumerate(expected):
        mine = [chunk for chunk in found if chunk["index"] == index]
        assert len(mine) > 20
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        lists = zip(*map(tokens_of, mine), strict=True)
        assert [sum(parts, []) for parts in lists] == tokens_of(choice)
        assert mine[-1]["meta_info"]["completion_tokens"] == TOKENS


@pytest.mark.parametrize(("path", "body"), WHOLE)
def test_large_reply_does_not_block_the_loop(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    with loop_holds(server) as holds:
        reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200
    assert len(reply.content) > CHOICES * TOKENS * ALTERNATIVES * 10
    assert holds.longest_s < HOLD_S


@pytest.mark.parametrize(("path", "body"), WHOLE[:-1])
def test_stream_does_not_block_the_loop(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    with loop_holds(server) as holds:
        reply = httpx.post(server.url + path, json=body | {"stream": True}, timeout=60)
    assert len(reply.content) > CHOICES * TOKENS * ALTERNATIVES * 10
    assert holds.longest_s < HOLD_S


def native(*, stream: bool = False) -> NativeRequest:
    return NativeRequest(
        requests=[ItemFields(token_ids=PackedIds.of([65, 66, 67]), n=CHOICES)],
        sampling=SamplingFields(max_tokens=TOKENS, ignore_eos=True, logprobs=ALTERNATIVES),
        stream=stream,
    )


def test_outputs_for_a_slow_reader_become_one_event(server: LiveServer) -> None:
    async def read() -> list[Any]:
        service = server.service
        assert service.engine.info is not None
        asked = native(stream=True)
        batch = await service.validator.batch(asked, service.engine.info, EVERYBODY)
        generation = await service.generations.start(batch, "")
        found = []
        async for event in generation.events():
            found.append(event)
            while len(service.engine):  # noqa: ASYNC110 (reads on once all has come)
                await asyncio.sleep(0.001)
        generation.close()
        return found

    found = server.run(read())
    assert isinstance(found[-1], FinishedItem)
    growing = [event for event in found if isinstance(event, TokenEvent)]
    for index, choice in enumerate(found[-1].choices):
        mine = [event.delta for event in growing if event.delta.index == index]
        assert len(mine) < TOKENS / 8 / 4
        assert [token for delta in mine for token in delta.token_ids] == choice.token_ids
        assert [best for delta in mine for best in delta.top_logprobs] == choice.top_logprobs
        assert "".join(delta.text or "" for delta in mine) == choice.text


def test_resumable_stream_loses_no_token_when_the_engine_dies(server: LiveServer) -> None:
    """The engine dies while outputs wait for a turn; the next one goes on after them."""

    class Slow(LoopShare):
        async def turn(self, owner: str, size: int) -> None:
            if died.is_set():
                return
            server.engine.dies = True
            await died.wait()

    async def read() -> list[Any]:
        service, kept = server.service, list[Any]()
        assert service.engine.info is not None
        asked = native()
        batch = await service.validator.batch(asked, service.engine.info, EVERYBODY)
        shared = Generations(service.engine, service.text, service.metrics, share=Slow())
        generation = shared.submit(shared.items(batch), batch.deadline_s, "", kept.extend)
        epoch = server.engine

        async def watch() -> None:
            while server.engine is epoch:  # noqa: ASYNC110 (the fake engine does not tell)
                await asyncio.sleep(0.01)
            died.set()

        watching = asyncio.create_task(watch())
        found = [event async for event in generation.events()]
        generation.close()
        await watching
        assert sum(len(output.token_ids) for output in kept) == CHOICES * TOKENS
        return found

    died = asyncio.Event()
    [ended] = server.run(read())
    whole = [65 + i % 3 for i in range(TOKENS)]
    assert [choice.token_ids for choice in ended.choices] == [whole] * CHOICES


@pytest.fixture(scope="module")
def rollouts(server: LiveServer) -> Iterator[RolloutServiceStub]:
    unbounded = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc_address, options=unbounded) as channel:
        yield RolloutServiceStub(channel)


def asked_over_grpc() -> GenerateRequest:
    """Return the native request, with the prompt's log-probs, as a message."""
    [item] = NATIVE["requests"]
    sampling = NATIVE["sampling"] | {"prompt_logprobs": 1}
    return json_format.ParseDict(
        {"requests": [item | {"seed": 7}], "sampling": sampling}, GenerateRequest()
    )


def result_over_http(server: LiveServer) -> dict[str, Any]:
    asked = json_format.MessageToDict(asked_over_grpc(), preserving_proto_field_name=True)
    for item in asked["requests"]:
        item["seed"] = int(item["seed"])
    reply = httpx.post(f"{server.url}/generate", json=asked, timeout=60)
    [result] = reply.json()["results"]
    return result


def as_message(result: dict[str, Any]) -> ItemResult:
    message = ItemResult()
    fill(message, result)
    return message


def test_a_large_reply_over_grpc_equals_http(
    server: LiveServer, rollouts: RolloutServiceStub
) -> None:
    with loop_holds(server) as holds:
        reply = rollouts.GenerateBatch(asked_over_grpc())
    assert reply.ByteSize() > CHOICES * TOKENS * ALTERNATIVES * 8
    [result] = reply.results
    assert result == as_message(result_over_http(server) | {"id": result.id})
    assert reply.usage.completion_tokens == CHOICES * TOKENS
    assert holds.longest_s < HOLD_S


def test_a_large_event_over_grpc_is_the_result_over_http(
    server: LiveServer, rollouts: RolloutServiceStub
) -> None:
    with loop_holds(server) as holds:
        *growing, ended, done = rollouts.Generate(asked_over_grpc())
    assert ended.result == as_message(result_over_http(server) | {"id": ended.result.id})
    assert done.done.usage.completion_tokens == CHOICES * TOKENS
    assert sum(len(event.token.token_ids) for event in growing) == CHOICES * TOKENS
    assert holds.longest_s < HOLD_S


def test_text_of_every_ended_choice_is_charged_to_its_tenant(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []

    async def turn(share: LoopShare, owner: str, size: int) -> None:
        charged.append(size)

    monkeypatch.setattr(LoopShare, "turn", turn)
    asked = {"token_ids": [65, 66, 67], "n": 8}
    sampling = {"max_tokens": TOKENS, "ignore_eos": True}
    body = {"requests": [asked], "sampling": sampling}
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert reply.status_code == 200
    steps = 8 * (TOKENS // 8 + 1)
    own = steps * OUTPUT_BYTES + 8 * TOKENS * 2 * VALUE_BYTES
    assert sum(charged) - len(reply.content) > own + 8 * (TOKENS - 8) * VALUE_BYTES


LONG = {"max_tokens": 8 * 64}
PATIENT: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/generate", {"requests": [{"token_ids": [65, 66]}], "sampling": LONG}),
    "completion": ("/v1/completions", {"prompt": [65, 66], **LONG}),
    "chat": ("/v1/chat/completions", {"messages": CHAT["messages"], **LONG}),
    "response": ("/v1/responses", {"input": "a", "max_output_tokens": 8 * 64}),
    "sglang": (
        "/generate",
        {"input_ids": [65], "sampling_params": {"max_new_tokens": 8 * 64}, "return_logprob": True},
    ),
    "vllm": ("/inference/v1/generate", {"token_ids": [65, 66], "sampling_params": LONG}),
}


@pytest.mark.parametrize("name", PATIENT)
def test_a_whole_reply_takes_its_tokens_in_chunks(server: LiveServer, name: str) -> None:
    """The engine gathers them, see `tests/unit/test_chunks.py`."""
    path, body = PATIENT[name]
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert server.engine.submitted[-1].patient


@pytest.mark.parametrize("how", [{"stream": True}, {"stop": ["no such text"]}])
def test_urgent_outputs_are_taken_at_once(server: LiveServer, how: dict[str, Any]) -> None:
    path, body = PATIENT["completion"]
    reply = httpx.post(f"{server.url}{path}", json=body | how, timeout=60)
    assert reply.status_code == 200, reply.text
    assert not server.engine.submitted[-1].patient


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [65], "sampling_params": {"skip_special_tokens": False}}),
        ("/v1/completions", {"prompt": [65]}),
    ],
)
def test_few_choices_are_decoded_in_one_turn(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    decoded = [0]  # tokens, in each turn
    decode = Text.decode

    async def turn(share: LoopShare, owner: str, size: int) -> None:
        decoded.append(0)

    def counted(text: Text, token_ids: Sequence[int], *, special: bool = False) -> str:
        decoded[-1] += len(token_ids)
        return decode(text, token_ids, special=special)

    monkeypatch.setattr(LoopShare, "turn", turn)
    monkeypatch.setattr(Text, "decode", counted)
    asked = {"n": 16, "max_tokens": TOKENS, "max_new_tokens": TOKENS, "ignore_eos": True}
    params = body.get("sampling_params", {}) | asked
    reply = httpx.post(
        server.url + path, json=body | asked | {"sampling_params": params}, timeout=60
    )
    assert reply.status_code == 200
    assert sum(decoded) >= 16 * TOKENS and max(decoded) <= 4 * TOKENS
