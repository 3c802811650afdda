"""A target over two GPUs: the bits of one, from captured graphs, through speculation and pushes;
one error within its bound when a rank is stopped or killed.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_fields

from tests.engine.gpu_engine import bits, choose, joined
from tests.engine.halting import done
from tests.engine.pushing import Pushable, perturbed
from tests.engine.two_ranks import one, ranks_of, shared, two_ranks
from tlt_server.bench.pad import write
from tlt_server.bench.padding.recipe import pad
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.devices.sizing import MIB
from tlt_server.engine.exchange import windows
from tlt_server.engine.exchange.gathered import GatheredPeers
from tlt_server.engine.gpu import link
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import EngineFailed
from tlt_server.wire.commands import Sleep, WakeUp
from tlt_server.wire.records import GenerateRequest, Grammar, Strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

__all__ = ["one", "shared"]  # fixtures
REPORTS = "raw_logprobs", "top_logprobs", "prompt_logprobs"
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"raw_logprobs": True, "logprobs": 3},
    {"prompt_logprobs": 2, "repetition_penalty": 1.1, "raw_logprobs": True},
)
WORDS = Grammar(kind="regex", text="([a-z]{2,8}[ ,.]){60}")
ARMS = (None, Strategy("eagle", 7, 4, 32), Strategy("history", 12, 2, 16))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """A pair whose heads have several blocks of tokens."""
    root = tmp_path_factory.mktemp("two gpus")
    write(pad(TARGET, DRAFTER, SHAPES["mid"], torch.bfloat16), root)
    perturbed(root / "target", root / "new", 1, scale=0.002)
    return EngineSettings(
        model=root / "target",
        drafter=str(root / "drafter"),
        drafter_parallel="shared",
        policy="off",
        device="cuda",
        kv_memory_mb=256,
        max_model_len=512,
        max_running=16,
        max_rows=256,
        weight_root=root,
    )


@pytest.fixture(params=["nvlink", "nccl"])
def doomed(
    request: pytest.FixtureRequest, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Pushable, Ranks[Any]]]:
    """An engine for one fault, whose first rank waits for two seconds, or three by NCCL."""
    monkeypatch.setattr(windows, "WAIT_S", 2.0)
    monkeypatch.setattr(link, "STEP_S", 3.0)
    with two_ranks(settings, drafter="none", exchange=request.param) as engine:
        yield engine, ranks_of(engine)
    gc.collect()


def free_bytes() -> list[int]:
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]


def responses(engine: Pushable, strategy: Strategy | None) -> dict[str, tuple[object, ...]]:
    engine.said.clear()
    choose(engine, strategy)
    problems = problems_as_requests(TARGET, 24, group=4, seed=0, max_tokens=96)
    requests = [asking(request, KINDS[i % len(KINDS)]) for i, request in enumerate(problems)]
    engine.run(*requests)
    said = bits(engine, [request.id for request in requests])
    return {
        id: (*of_one, *(joined(engine.said[id], kind) for kind in REPORTS))
        for id, of_one in said.items()
    }


def asking(request: GenerateRequest, kind: dict[str, Any]) -> GenerateRequest:
    return replace_fields(request, sampling=replace_fields(request.sampling, **kind))


def test_two_gpus_have_the_bits_of_one_gpu(one: Pushable, shared: Pushable) -> None:
    assert one.info.fingerprint == shared.info.fingerprint
    assert shared.engine.runner.graphs.bytes, "nothing was captured"  # type: ignore[attr-defined]
    expected = responses(one, None)
    for strategy in ARMS:
        assert responses(shared, strategy) == expected, strategy


def test_gathering_gpus_have_the_bits_of_one_gpu(one: Pushable, settings: EngineSettings) -> None:
    engine = Pushable(replace(settings, tensor_parallel=2, exchange="nccl"))
    group = ranks_of(engine)
    assert isinstance(group.link, link.GpuLink) and isinstance(group.link.peers, GatheredPeers)
    expected = responses(one, None)
    for strategy in ARMS[:2]:
        assert responses(engine, strategy) == expected, strategy
    group.close()


def test_push_changes_both_gpus(one: Pushable, shared: Pushable, settings: EngineSettings) -> None:
    for engine in (one, shared):
        assert engine.push(Path(str(settings.weight_root)) / "new", "v1").result == "committed"
    assert one.checksums() == shared.checksums()
    expected = responses(one, None)
    assert responses(shared, ARMS[1]) == expected
    for engine in (one, shared):
        assert engine.roll_back("initial").result == "rolled_back"
    assert one.checksums() == shared.checksums()
    assert responses(shared, None) == responses(one, None) != expected


def test_weights_sleep_and_wake_on_both_gpus(shared: Pushable) -> None:
    expected, sums = responses(shared, None), shared.checksums()
    everything, before = ("weights", "kv_cache"), free_bytes()
    done(shared, Sleep("s", everything))
    given_back = [after - was for was, after in zip(before, free_bytes(), strict=True)]
    assert all(each > 40 * MIB for each in given_back), f"36 MiB of KV, weights: {given_back}"
    done(shared, WakeUp("w", everything))
    assert shared.checksums() == sums
    assert responses(shared, ARMS[1]) == expected


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (signal.SIGSTOP, "waited (2 s for rank 1|3 s for order)"),
        (signal.SIGKILL, r"rank 1 \(process \d+\) was ended by SIGKILL"),
    ],
)
@pytest.mark.parametrize("kind", [{}, {"structured_outputs": WORDS}])
def test_stopped_or_dead_rank_is_reported_as_one_error(
    sent: signal.Signals, why: str, kind: dict[str, Any], doomed: tuple[Pushable, Ranks[Any]]
) -> None:
    engine, group = doomed
    [process] = group._processes
    problems = problems_as_requests(TARGET, 8, group=1, seed=0, max_tokens=200)
    engine.submit(*(asking(request, kind) for request in problems))
    engine.until(lambda: engine.engine.runner.in_flight > 0, "step: grammars are compiled first")
    engine.step(5)
    os.kill(process.pid, sent)
    began_s = time.monotonic()
    with pytest.raises(EngineFailed, match=why):
        engine.finish()
    group.close()
    assert time.monotonic() - began_s < 10, "NCCL is aborted, not waited for"
