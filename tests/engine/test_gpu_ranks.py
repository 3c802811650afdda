"""A GPU engine over two ranks, which exchange through shared memory in Triton's interpreter: the
bits of one rank, through speculation, structures, pushes, rollbacks and sleeps; one error when a
rank ends or differs.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import bits, choose, joined, request
from tests.engine.halting import done, send
from tests.engine.interpreted_rank import out_of_memory
from tests.engine.pushing import Pushable, perturbed
from tests.engine.ranks_of_tests import run_rank_of_tests
from tests.engine.tiny import Shape, write_alphabet, write_eagle, write_target
from tests.engine.two_ranks import one, ranks_of, shared, two_ranks
from tlt_kernels.gpu import signals
from tlt_server.engine.exchange.gathered import GatheredPeers
from tlt_server.engine.gpu.link import GpuLink
from tlt_server.engine.gpu.orders import RunStep
from tlt_server.engine.gpu.passes import Passes
from tlt_server.engine.gpu.start import preparing
from tlt_server.engine.gpu.steps.drafts import DraftPass
from tlt_server.engine.gpu.steps.drafts.eagle import EagleDrafts
from tlt_server.engine.gpu.steps.extend import Extend, ExtendKey, Reported
from tlt_server.engine.gpu.steps.ring import PinnedBuffer
from tlt_server.engine.gpu.steps.structured import StructureMasks
from tlt_server.engine.ranks.arena import Arena
from tlt_server.engine.ranks.orders import RankOrder
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import EngineFailed, StartupError
from tlt_server.models.gpu.sums import RankSums
from tlt_server.wire.commands import Sleep, WakeUp
from tlt_server.wire.records import Grammar, Sampling, Strategy

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
__all__ = ["one", "shared"]  # fixtures

# Leaves of 128: a head, and half of the MLP. The head has two blocks of tokens.
SHAPE = Shape(1100, hidden=32, layers=2, head_dim=128, mlp=256, features=(1, 0, 1), tied=False)
TREE = Strategy("eagle", 3, 2, 6)
WORDS = Sampling(max_tokens=4, structured_outputs=Grammar(kind="regex", text="(ab|cd){2,9}"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpu ranks")
    write_target(root / "base", shape=SHAPE)
    write_alphabet(root / "base", SHAPE)
    write_eagle(root / "drafter", shape=SHAPE, draft_vocab=40)
    perturbed(root / "base", root / "new", 1, scale=0.05)
    perturbed(root / "drafter", root / "new drafter", 2, scale=0.05)
    return root


@pytest.fixture(scope="module")
def settings(root: Path) -> EngineSettings:
    return EngineSettings(
        model=root / "base",
        drafter=str(root / "drafter"),
        drafter_parallel="shared",
        policy="off",
        device="interpreter",  # type: ignore[arg-type]
        dtype="float32",
        attention="triton",
        pages=24,
        max_model_len=64,
        max_running=3,
        max_rows=32,
        weight_root=root,
    )


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with patched_once(), pytest.MonkeyPatch.context() as patch:
        run_rank_of_tests(patch, "interpreted_rank")
        yield


def passes_of(engine: Pushable) -> Passes:
    return engine.engine.runner.passes  # type: ignore[attr-defined, no-any-return]


def mappings(engine: Pushable) -> list[str]:
    """Return the memory of shards that rank 1 has mapped, as /proc describes it."""
    [process] = ranks_of(engine)._processes
    described = Path(f"/proc/{process.pid}/smaps").read_text().split("VmFlags")
    return [each for each in described if "tlt-shard" in each]


def resident(engine: Pushable) -> int:
    """Return how many KiB of it are in memory."""
    return sum(int(each.split("Rss:")[1].split()[0]) for each in mappings(engine))


def responses(
    engine: Pushable, strategy: Strategy | None, *, structured: bool = False, alone: bool = False
) -> dict[str, tuple[object, ...]]:
    engine.said.clear()
    choose(engine, strategy)
    # The first one's last steps are plain, so the ranks share the head.
    requests = [
        request(0, 5, 5, logprobs=2, raw_logprobs=True, prompt_logprobs=1),
        request(1, 21, 2, repetition_penalty=1.2, top_k=9),
    ]
    if structured:
        requests.append(msgspec.structs.replace(requests[0], id="r2", sampling=WORDS))
    if alone:
        del requests[1:]
    engine.run(*requests)
    kinds = "raw_logprobs", "top_logprobs", "prompt_logprobs"
    reported = tuple(joined(engine.said["r0"], kind) for kind in kinds)
    assert all(reported)
    return bits(engine, [each.id for each in requests]) | {"reported": reported}


def test_two_ranks_have_the_bits_of_one_rank(
    one: Pushable, shared: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one.info.fingerprint == shared.info.fingerprint and one.info.fingerprint.leaves == 2
    passes = passes_of(one)
    assert "masks" not in vars(passes.state)
    passes.extend(ExtendKey(1, 1, structured=True))
    assert "masks" in vars(passes.state), "a capture of the pass would make them"
    assert shared.info.tensor_parallel == 2
    drafter = shared.engine.pushes.transaction.versions.live.drafter
    assert drafter is not None and drafter.network.part.split.of == 2  # type: ignore[attr-defined]
    expected = responses(one, None, structured=True)
    # Idle time may find no memory for a graph, on any rank.
    monkeypatch.setattr(preparing, "_capture_later", out_of_memory)
    runner: Any = shared.engine.runner
    assert runner.graphs._drain == runner._waits.drain
    runner.record(ExtendKey(1, 1))
    looked: list[Tensor] = []  # buffers that were waited for with a bound

    def arrived(buffer: PinnedBuffer) -> bool:
        looked.append(buffer.tensor)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(PinnedBuffer, "arrived", property(arrived))
        assert responses(shared, None, structured=True) == expected
    waited = [any(each is tree for each in looked) for tree in runner._masks._trees._tensors]
    assert any(waited), "trees, for masks"
    alone = responses(shared, None, alone=True)
    assert alone == {name: expected[name] for name in alone}
    assert responses(shared, TREE, structured=True) == expected
    extends = passes_of(shared).extends.values()
    assert {extend._head is None for extend in extends} == {False, True}, "both ways of the head"
    drafts = [output for outputs in shared.said.values() for output in outputs]
    assert sum(output.accepted for output in drafts) > 0


def tokens_of_masks(patch: pytest.MonkeyPatch) -> list[dict[Any, list[int]]]:
    """Return the newest tokens that masks are filled after, one mapping for each step."""
    found: list[dict[Any, list[int]]] = []
    upload = StructureMasks.upload

    def seen(masks: StructureMasks, extend: Extend, trees: Any, entries: Any, newest: Any) -> Any:
        found.append(dict(newest))
        return upload(masks, extend, trees, entries, newest)

    patch.setattr(StructureMasks, "upload", seen)
    return found


@pytest.mark.long
def test_gathering_ranks_have_the_bits_of_one_rank(
    one: Pushable, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo stands for NCCL."""
    expected = responses(one, None)
    engine = Pushable(replace(settings, tensor_parallel=2, exchange="nccl"))
    ranks = ranks_of(engine)
    assert isinstance(ranks.link, GpuLink) and isinstance(ranks.link.peers, GatheredPeers)
    assert not ranks.link.peers.muted
    assert responses(engine, TREE) == expected
    target = engine.engine.pushes.transaction.versions.live.target.network
    target.peers[0].final_norm_H[3] += 2**-10  # type: ignore[union-attr]
    known = tokens_of_masks(monkeypatch)
    with pytest.raises(EngineFailed, match=r"ranks differ after order \d+: the states of rank 1 "):
        engine.run(msgspec.structs.replace(request(0, 3, 4), sampling=WORDS))
    assert known == [{}], "masks were filled after tokens of ranks that differ"
    ranks.close()


def test_pushes_rollbacks_and_sleeps_change_both_ranks(
    one: Pushable, shared: Pushable, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = responses(one, None)
    for engine in (one, shared):
        assert engine.push(root / "new", "v1").result == "committed"
        assert engine.push(root / "new drafter", "d1", role="drafter").result == "committed"
    assert one.checksums() == shared.checksums()
    expected = responses(one, None)
    everything, mapped = ("weights", "kv_cache"), len(mappings(shared))
    assert resident(shared) > 0
    done(shared, Sleep("s", everything))
    assert not resident(shared), "a shard did not sleep"
    with monkeypatch.context() as full:
        full.setattr(Arena, "shared", out_of_memory)
        report = send(shared, WakeUp("w", everything))
        assert report is not None and report.error is not None and "stays asleep" in report.error[1]
    done(shared, WakeUp("again", everything))
    assert one.checksums() == shared.checksums()
    assert responses(shared, TREE) == expected != first
    assert len(mappings(shared)) == mapped, "the memory before is mapped, too"
    assert shared.roll_back("initial").result == "rolled_back"
    assert responses(shared, TREE) == first


def test_differing_ranks_end_epoch_naming_step_and_rank(settings: EngineSettings) -> None:
    """A norm of rank 1 alone is off, so its states are. Then the rank is killed."""
    with two_ranks(settings, drafter="none") as engine:
        target = engine.engine.pushes.transaction.versions.live.target.network
        target.peers[0].final_norm_H[3] += 2**-10  # type: ignore[union-attr]
        differ = r"ranks differ after order \d+: the states of rank 1 "
        with pytest.raises(EngineFailed, match=differ):
            responses(engine, None)
        [process] = ranks_of(engine)._processes
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        with pytest.raises(EngineFailed, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
            engine.engine.runner.collect(busy=False)


def test_late_rank_ends_epoch_naming_the_step(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 does not come to the exchanges of the second step's reports."""
    send, steps, clock = Ranks.order, list[int](), time.monotonic_ns

    def withheld(ranks: Ranks[Any], order: RankOrder, *, wait: bool = False) -> None:
        if isinstance(order, RunStep):
            if len(steps) == 1:
                order = msgspec.structs.replace(order, reported=Reported())
                fast = SimpleNamespace(monotonic_ns=lambda: 20 * clock())
                monkeypatch.setattr(signals, "time", fast)
            steps.append(ranks.sent)
        send(ranks, order, wait=wait)

    with two_ranks(settings, drafter="none") as engine:
        choose(engine, None)
        monkeypatch.setattr(Ranks, "order", withheld)
        late = r"rank 0 waited 10 s for rank 1 in exchange \d+, in order (\d+) or before"
        with pytest.raises(EngineFailed, match=late) as raised:
            engine.run(request(0, 5, 5, logprobs=2, raw_logprobs=True))
        assert len(engine.said["r0"]) == 1, "a report of the step was told"
        [order] = re.findall(r"order (\d+)", str(raised.value))
        assert steps[1] < int(order) <= steps[2]


@pytest.mark.parametrize("length", [1, 33])
def test_both_ranks_read_a_prompt_whose_last_chunk_is_unscored(
    shared: Pushable, length: int
) -> None:
    choose(shared, None)
    shared.run(request(0, length, 2, prompt_logprobs=1))
    assert len(joined(shared.said["r0"], "prompt_logprobs")) == length


def flip_residual(engine: Pushable, patch: pytest.MonkeyPatch) -> None:
    add = RankSums.add_rms_norm

    def flipped(
        sums: RankSums, part: Tensor, residual_RH: Tensor, *rest: Any, **out: Any
    ) -> Tensor:
        normed_RH = add(sums, part, residual_RH, *rest, **out)
        residual_RH.view(torch.int32)[0, 3] ^= 1 << 12
        return normed_RH

    patch.setattr(RankSums, "add_rms_norm", flipped)


def flip_tree(engine: Pushable, patch: pytest.MonkeyPatch) -> None:
    passes = passes_of(engine)
    select = passes.select

    def flipped(extend: Extend, drafted: DraftPass | None) -> None:
        if drafted is not None:
            drafted.nodes.token_BC[0, 0] ^= 1
        select(extend, drafted)

    patch.setattr(passes, "select", flipped)


def flip_calibration(engine: Pushable, patch: pytest.MonkeyPatch) -> None:
    drafts = passes_of(engine).drafters["eagle"]
    assert isinstance(drafts, EagleDrafts)
    drafts.in_force.acceptance_Z.view(torch.int32)[::2] ^= 1 << 26


@pytest.mark.long
@pytest.mark.parametrize("flip", [flip_residual, flip_tree, flip_calibration])
def test_flipped_bit_in_one_rank_ends_the_epoch(
    settings: EngineSettings,
    flip: Callable[[Pushable, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with two_ranks(settings) as engine:
        choose(engine, TREE)
        engine.run(request(0, 5, 2))
        flip(engine, monkeypatch)
        with pytest.raises(EngineFailed, match=r"ranks differ after order \d+: .* rank 1 are not"):
            engine.run(request(1, 7, 9))


def test_split_through_a_leaf_is_refused(settings: EngineSettings, root: Path) -> None:
    write_target(root / "small", shape=replace(SHAPE, head_dim=64))
    small = replace(settings, model=root / "small", drafter="none", tensor_parallel=2)
    with pytest.raises(StartupError, match="a multiple of 128 inputs .*; use 1"):
        Pushable(small)
