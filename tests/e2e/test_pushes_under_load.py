"""Pushes land while clients of both dialects, streaming and not, have batches open, with
speculation on.

Channels and modes for running requests alternate, so that twelve pushes cover every pair. Nothing
is lost or duplicated, every token names its pushed version, in order, and at the end the server
answers like a fresh one with the last weights.
"""

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.e2e.conftest import DRAFTING
from tests.e2e.gloo_trainer import sums
from tests.waiting import until
from tlt_client import Client
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.http import HttpSender
from tlt_client.wire import Choice, Done, ItemResult, Token
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.task import problem
from tlt_server.demo.workload import TARGET

ITEMS, N, TOKENS = 2, 2, 100
IN_FLIGHT = ("continue", "recompute", "abort", "drain")
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    .encode(CHAT.format(problem(i).prompt_text))
    .ids
    for i in range(ITEMS)
]
SAMPLING = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
Place = tuple[str, int, int]  # client, its batch, choice of the batch


class Said(NamedTuple):
    place: Place
    token_ids: list[int]
    spans: list[tuple[str, int, int]]  # version, start, end
    finish_reason: str


def native(place: Place, choice: Choice) -> Said:
    return Said(
        place,
        choice.token_ids,
        [(span.version, span.start, span.end) for span in choice.weight_versions],
        choice.finish_reason,
    )


def items(name: str, batch: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{name}-{batch}-{i}", "token_ids": prompt, "n": N, "seed": 1000 * batch + i}
        for i, prompt in enumerate(PROMPTS)
    ]


def placed(name: str, batch: int, result: ItemResult) -> Iterator[Said]:
    assert result.error is None, result.error
    item = int(result.id.rpartition("-")[2])
    return (native((name, batch, item * N + choice.index), choice) for choice in result.choices)


def by_native(client: Client, name: str, batch: int) -> list[Said]:
    reply = client.generate(items(name, batch), sampling=SAMPLING)
    return [said for result in reply.results for said in placed(name, batch, result)]


def by_native_streamed(client: Client, name: str, batch: int) -> list[Said]:
    found: list[Said] = []
    tokens: dict[int, list[int]] = {}
    events = list(client.stream(items(name, batch), sampling=SAMPLING))
    for event in events:
        if isinstance(event, Token):
            tokens.setdefault(int(event.id.rpartition("-")[2]) * N + event.index, []).extend(
                event.token_ids
            )
        elif isinstance(event, ItemResult):
            found += placed(name, batch, event)
    assert isinstance(events[-1], Done) and sum(isinstance(event, Done) for event in events) == 1
    assert all(tokens.get(said.place[2], []) == said.token_ids for said in found), (
        "a token was streamed twice, or never"
    )
    return found


def completions(batch: int, *, stream: bool) -> dict[str, Any]:
    return {
        "prompt": PROMPTS,
        "n": N,
        "seed": batch,
        "stream": stream,
        "return_token_ids": True,
        "return_weight_versions": True,
        **SAMPLING,
    }


def by_openai(http: httpx.Client, name: str, batch: int) -> list[Said]:
    response = http.post("/v1/completions", json=completions(batch, stream=False))
    assert response.status_code == 200, response.text
    return [
        openai((name, batch, choice["index"]), choice["token_ids"], choice)
        for choice in response.json()["choices"]
    ]


def by_openai_streamed(http: httpx.Client, name: str, batch: int) -> list[Said]:
    found: list[Said] = []
    tokens: dict[int, list[int]] = {}
    with http.stream("POST", "/v1/completions", json=completions(batch, stream=True)) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
        if choice["finish_reason"] is not None:
            found.append(openai((name, batch, choice["index"]), tokens[choice["index"]], choice))
    assert all(tokens[said.place[2]] is said.token_ids for said in found), (
        "a choice went on after its end"
    )
    return found


def openai(place: Place, token_ids: list[int], choice: dict[str, Any]) -> Said:
    return Said(
        place,
        token_ids,
        [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]],
        choice["finish_reason"],
    )


class Load:
    """One thread per kind of client, batch after batch until `stop`; keeps requests and replies."""

    def __init__(self, url: str) -> None:
        self.asked: list[Place] = []
        self.said: list[Said] = []
        self._stop = threading.Event()
        client, http = Client(url, timeout_s=60), httpx.Client(base_url=url, timeout=60)
        kinds: dict[str, Callable[[int], list[Said]]] = {
            "native": lambda batch: by_native(client, "native", batch),
            "native-streamed": lambda batch: by_native_streamed(client, "native-streamed", batch),
            "openai": lambda batch: by_openai(http, "openai", batch),
            "openai-streamed": lambda batch: by_openai_streamed(http, "openai-streamed", batch),
        }
        self._pool = ThreadPoolExecutor(len(kinds))
        self._running = [self._pool.submit(self._run, name, ask) for name, ask in kinds.items()]

    def _run(self, name: str, ask: Callable[[int], list[Said]]) -> None:
        for batch in itertools.count():
            if self._stop.is_set():
                return
            self.asked += [(name, batch, choice) for choice in range(ITEMS * N)]
            self.said += ask(batch)

    def check_running(self) -> None:
        for done in (running for running in self._running if running.done()):
            done.result()
            raise AssertionError("a client has left")

    def stop(self) -> None:
        self._stop.set()
        for running in self._running:
            running.result(60)


def perturbed(base: dict[str, Tensor], seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (name, tensor * (1 + 0.01 * torch.randn(tensor.shape, generator=generator)))
        for name, tensor in base.items()
    ]


def scored(client: Client) -> list[tuple[list[int], list[float]]]:
    asked = [{"token_ids": prompt, "n": N, "seed": i} for i, prompt in enumerate(PROMPTS)]
    choices = [
        choice
        for result in client.generate(asked, sampling=SAMPLING).results
        for choice in result.choices
    ]
    assert sum(choice.sd.accepted for choice in choices) > 0
    return [(choice.token_ids, choice.logprobs) for choice in choices]


def check_versions(said: list[Said], versions: list[str], modes: list[str]) -> None:
    """`modes[i]` is how running requests were met when `versions[i]` became live."""
    crossings: set[str] = set()
    for one in said:
        starts, ends = [start for _, start, _ in one.spans], [end for _, _, end in one.spans]
        assert [*starts, len(one.token_ids)] == [0, *ends] and all(
            start < end for _, start, end in one.spans
        ), one
        places = [versions.index(version) for version, _, _ in one.spans]
        assert places == sorted(set(places)), one
        passed = {
            modes[place]
            for first, last in itertools.pairwise(places)
            for place in range(first + 1, last + 1)
        }
        assert passed <= {"continue", "recompute"}, (
            f"it went on over a push that ends what runs or waits for its end: {one}"
        )
        crossings |= passed
        if one.finish_reason == "abort":
            assert len(one.token_ids) < TOKENS, one
            later = modes[places[-1] + 1 :] if places else ["abort"]
            assert (
                next(mode for mode in later if mode not in ("continue", "recompute")) == "abort"
            ), one
        else:
            assert (one.finish_reason, len(one.token_ids)) == ("length", TOKENS), one
    assert crossings == {"continue", "recompute"} and any(
        one.finish_reason == "abort" for one in said
    ), "else nothing ran meanwhile"
    assert {version for one in said for version, _, _ in one.spans} <= set(versions)


@pytest.mark.fleet
@pytest.mark.parametrize("pushes", [4, pytest.param(12, marks=pytest.mark.long)])
def test_pushes_land_while_batches_run(
    pushes: int,
    pushable: ServerProcess,
    of_width: tuple[str, ...],
    weight_root: Path,
    tmp_path: Path,
) -> None:
    """Twelve are every way in flight by every channel."""
    base = load_file(TARGET / "model.safetensors")
    with Client(pushable.url, timeout_s=60) as trainer:
        versions, modes = [str(trainer.weights()["target"])], [""]
        senders = [
            DiskSender(trainer, weight_root),
            HttpSender(trainer),
            BroadcastSender(trainer, bucket_bytes=2**20),
        ]
        load = Load(pushable.url)
        for push, sender, in_flight in zip(
            range(pushes), itertools.cycle(senders), itertools.cycle(IN_FLIGHT), strict=False
        ):
            until(lambda: look(trainer).running >= 2 * ITEMS * N)  # two clients' batches, or more
            versions.append(f"step-{push}-of-{pushes}")
            modes.append(in_flight)
            sent = perturbed(base, push)
            reply = sender.push(iter(sent), versions[-1], in_flight=in_flight)
            assert (reply["state"], reply["weight_version"]) == ("committed", versions[-1])
            live, mine = trainer.weight_checksums(), sums(sent)
            assert (
                {name: reply["checksums"][name] for name in mine}
                == mine
                == {name: live[name] for name in mine}
            )
            load.check_running()
        load.stop()
        last = scored(trainer)
        for sender in senders:
            sender.close()
    assert sorted(one.place for one in load.said) == sorted(load.asked), (
        "every response comes, and comes once"
    )
    check_versions(load.said, versions, modes)

    fresh = tmp_path / "fresh"
    shutil.copytree(TARGET, fresh)
    save_file(dict(sent), fresh / "model.safetensors")
    with (
        ServerProcess("--model", str(fresh), *DRAFTING[2:], *of_width) as server,
        Client(server.url, timeout_s=60) as client,
    ):
        assert scored(client) == last, "the same tokens, and the same bits of their log-probs"
