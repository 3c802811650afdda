"""A policy's kernels are listed and loaded, and its graphs recorded, in parts between steps of the
policy before. Other processes compile meanwhile. Failures are typed, and nothing waits for a device
that is not quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.waiting import until
from tlt_kernels.gpu.variants import Variant
from tlt_server.engine.gpu.orders import DropKernels, ListKernels, LoadKernels
from tlt_server.engine.gpu.passes import Rehearsed
from tlt_server.engine.gpu.start import preparing
from tlt_server.engine.gpu.start.compiling import Compiled
from tlt_server.engine.gpu.start.preparing import rehearsals
from tlt_server.engine.gpu.start.strategy_kernels import KernelPreparation, StrategyKernels, decided
from tlt_server.engine.gpu.steps.buckets import MIN_DEPTH, Shapes
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey
from tlt_server.engine.ranks.orders import RankOrder
from tlt_server.errors import Unavailable
from tlt_server.speculation.policies.pinned import Pinned
from tlt_server.wire.records import OFF, Pin, Strategy, parse_strategy

CHAIN, TREE = parse_strategy("eagle:4x1x4"), parse_strategy("eagle:4x2x8")


class Gpu:
    """A runner, its passes, graphs and other ranks, the kernels of its start, and a compiler, which
    note what is asked of them in order. Each draft needs two kernels that are not loaded.
    """

    def __init__(self) -> None:
        self.passes = self.graphs = self.ranks = self
        self.shapes, self.quiet = Shapes(2, MIN_DEPTH), True
        self.stream, self.made, self.run_first = None, set[object](), False
        self.recorded: dict[DraftKey | ExtendKey, None] = {}
        self.captures, self.room = True, 1000  # graphs that the pool has memory for
        self.asked: list[str] = []
        self.listed: list[Rehearsed] = []
        self.ended: Compiled | None = None
        self.stopped, self.others_ready, self.others_fail = False, True, False
        self.now_s = 0.0

    @contextmanager
    def listing(self) -> Iterator[dict[Variant, None]]:
        self.lacks: dict[Variant, None] = {}
        yield self.lacks

    def rehearse(self, passes: Gpu, rehearsed: Rehearsed) -> None:
        self.asked.append("list")
        self.listed.append(rehearsed)
        self.now_s += 0.004
        if (draft := rehearsed.draft) is not None:
            names = "grow", "graft"
            self.lacks |= {Variant("kernels", each, str(draft.batch)): None for each in names}

    def __contains__(self, key: object) -> bool:
        return key in self.recorded

    @property
    def spare(self) -> bool:
        return len(self.recorded) < self.room

    def record(self, key: DraftKey | ExtendKey) -> None:
        assert key not in self.recorded
        self.asked.append("record")
        self.recorded[key] = None

    def drop(self, made: set[object]) -> None:
        self.asked.append("drop")

    def begin(self, order: RankOrder) -> None:
        match order:
            case ListKernels(_, first):
                assert first == (not self.listed)
            case LoadKernels(count, last):
                self.asked.append(f"others load {count}{' and the rest' if last else ''}")

    def order(self, order: RankOrder) -> None:
        assert isinstance(order, DropKernels)
        self.asked.append("others drop")

    def done(self) -> bool:
        if self.others_fail:
            raise Unavailable("rank 1: the GPU has no room for the kernels of this policy")
        return self.others_ready

    def finish(self) -> None:
        self.done()

    def compiler(self, variants: Sequence[Variant]) -> Gpu:
        self.asked.append(f"compile {len(variants)}")
        return self

    def end(self, on_progress: Callable[[int, int], None]) -> Compiled:
        on_progress(1, 4)
        until(lambda: self.ended is not None)
        assert self.ended is not None
        return self.ended

    def stop(self) -> None:
        self.stopped = True

    def remember(self, found: Mapping[Variant, str]) -> None:
        self.asked.append("remember")

    def load(self, variant: Variant) -> None:
        self.asked.append("load")
        self.now_s += 0.004


def reaching(*strategies: Strategy) -> Any:
    def reach(requests: range, *, prompts: bool) -> Iterable[Strategy]:
        return OFF, *strategies

    return reach


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(preparing, "listed", gpu.listing)
    monkeypatch.setattr(preparing, "_rehearse", gpu.rehearse)
    monkeypatch.setattr(preparing, "load", gpu.load)
    return gpu


def started(gpu: Gpu, *strategies: Strategy) -> StrategyKernels:
    """Return what a start with these strategies has prepared."""
    keys = gpu.shapes.captured(reaching(*strategies))
    gpu.recorded |= dict.fromkeys(keys)
    return StrategyKernels(gpu, gpu, keys)  # type: ignore[arg-type]


def prepared(gpu: Gpu, kernels: StrategyKernels, *strategies: Strategy) -> KernelPreparation:
    found = kernels(reaching(*strategies))
    assert found is not None
    found._clock = lambda: gpu.now_s
    return found


def preparation_of(gpu: Gpu, *strategies: Strategy) -> KernelPreparation:
    return prepared(gpu, started(gpu), *strategies)


def rehearsed(preparation: KernelPreparation) -> KernelPreparation:
    while "rehearsed" in preparation.stage:
        assert not preparation.advance()
    return preparation


def test_starting_policy_lacks_no_kernel(gpu: Gpu) -> None:
    strategies = started(gpu, CHAIN, TREE)
    assert strategies(reaching(CHAIN)) is strategies(reaching(TREE)) is None
    assert strategies(reaching()) is None and not gpu.asked


def test_kernels_are_compiled_next_to_steps_then_loaded_in_parts(gpu: Gpu) -> None:
    strategies = started(gpu)
    preparation = prepared(gpu, strategies, CHAIN)
    assert preparation.stage.startswith("0 of ")
    assert not preparation.advance() and gpu.asked == ["list"] * 2, "a part takes 5 ms"
    rehearsed(preparation)
    lists, graphs = gpu.asked.count("list"), len(gpu.recorded)
    assert gpu.asked[lists:] == ["compile 4"] and lists > 4
    for _ in range(3):
        assert not preparation.advance(), "steps go on while others compile"
    until(lambda: preparation.stage == "1 of 4 kernels are compiled")
    gpu.ended = Compiled(4, "", 3)
    while not preparation.advance():
        pass
    others = ["others load 2", "others load 2 and the rest"]
    assert gpu.asked[lists + 1 :] == [
        *("load", "load", others[0]),
        *("load", "load", others[1]),
        *["record"] * (len(gpu.recorded) - graphs),
        "remember",
    ]
    assert len(gpu.recorded) - graphs == 9
    assert preparation.taken == "3 kernels were compiled for it, 4 loaded, and 9 graphs recorded"
    assert strategies(reaching(CHAIN)) is None
    wider = strategies(reaching(TREE))
    assert wider is not None, "others are not prepared by it"


def test_graphs_are_recorded_before_a_policy_is_active(gpu: Gpu) -> None:
    strategies = started(gpu)
    preparation = prepared(gpu, strategies, CHAIN)
    gpu.ended, of_start = Compiled(4, ""), {*gpu.recorded}
    until(lambda: preparation.advance() or "record" in gpu.asked)
    assert preparation.stage == "1 graphs are recorded, and 8 are left"
    for recorded in range(2, 10):
        assert not preparation.advance() and gpu.asked.count("record") == recorded
    assert preparation.advance()
    lacked = [key for key in gpu.shapes.captured(reaching(CHAIN)) if key not in of_start]
    assert [*gpu.recorded][len(of_start) :] == lacked, "the largest first, as at start"
    gpu.recorded.clear()
    again = strategies(reaching(CHAIN))
    assert again is not None, "a sleep has given the graphs back"
    lists = gpu.asked.count("list")
    until(again.advance)
    assert gpu.asked.count("list") == lists and {*gpu.recorded} == of_start | {*lacked}
    assert again.taken.startswith("0 kernels were compiled for it, 0 loaded, and ")


def test_graphs_are_recorded_while_the_pool_has_room(gpu: Gpu) -> None:
    preparation = preparation_of(gpu, CHAIN)
    gpu.ended, gpu.room = Compiled(4, ""), len(gpu.recorded) + 3
    until(preparation.advance)
    assert len(gpu.recorded) == gpu.room


@pytest.mark.parametrize(("captures", "run_first"), [(False, False), (True, True)])
def test_no_graph_is_recorded_ahead_if_steps_must_run_first(
    captures: bool, run_first: bool, gpu: Gpu
) -> None:
    gpu.captures, gpu.run_first = captures, run_first
    preparation = preparation_of(gpu, CHAIN)
    gpu.ended = Compiled(4, "")
    until(preparation.advance)
    assert "record" not in gpu.asked


def test_choosing_policy_prepares_graphs_for_its_pins(gpu: Gpu) -> None:
    chooses = reaching(CHAIN, TREE)
    assert not [*decided(chooses, range(1, 3), prompts=False)]
    for pins in ((Pin(2, 2, CHAIN),), (Pin(1, 1, CHAIN), Pin(2, 2, TREE))):
        pinned = Pinned(SimpleNamespace(measures=True, strategies=chooses), pins)  # type: ignore[arg-type]
        found = [*decided(pinned.strategies, range(1, 3), prompts=False)]
        assert found == [pin.strategy for pin in pins]


def test_every_pass_of_a_policy_is_rehearsed_with_its_drafts(gpu: Gpu) -> None:
    rehearsed(preparation_of(gpu, CHAIN, TREE))
    of_start = {*rehearsals(gpu.shapes.captured(reaching()))}
    assert {*gpu.listed} == {*rehearsals(gpu.shapes.captured(reaching(CHAIN, TREE)))} - of_start
    pairs = [passes for passes in gpu.listed if passes.draft]
    assert all(passes.extends for passes in pairs) and len(pairs) == 4


def test_preparation_does_not_wait_for_a_busy_device(gpu: Gpu) -> None:
    preparation = preparation_of(gpu, CHAIN)
    gpu.quiet = False
    assert not preparation.advance() and not gpu.asked
    gpu.quiet = True
    assert not rehearsed(preparation).advance()
    gpu.quiet, gpu.ended = False, Compiled(4, "")
    asked = [*gpu.asked]
    assert not preparation.advance() and gpu.asked == asked


def test_next_kernel_part_waits_for_the_other_ranks(gpu: Gpu) -> None:
    preparation = preparation_of(gpu, CHAIN)
    gpu.ended = Compiled(4, "")
    until(lambda: preparation.advance() or "others load 2" in gpu.asked)
    gpu.others_ready, asked = False, [*gpu.asked]
    assert not preparation.advance() and gpu.asked == asked
    gpu.others_ready = True
    until(preparation.advance)


def test_refusal_by_any_rank_drops_the_kernel_list(gpu: Gpu) -> None:
    preparation = preparation_of(gpu, CHAIN)
    assert not preparation.advance()
    gpu.others_fail = True
    with pytest.raises(Unavailable, match="no room for the kernels of this policy"):
        preparation.advance()
    preparation.stop()
    assert gpu.asked[-2:] == ["others drop", "drop"]


def test_stopping_an_unstarted_preparation_sends_no_order(gpu: Gpu) -> None:
    preparation_of(gpu, CHAIN).stop()
    assert not gpu.asked


def test_uncompilable_kernel_refuses_the_policy(gpu: Gpu) -> None:
    strategies = started(gpu)
    preparation = prepared(gpu, strategies, CHAIN)
    gpu.ended = Compiled(1, "out of registers")
    with pytest.raises(Unavailable, match="3 of 4 kernels .*out of registers"):
        until(preparation.advance)
    assert "load" not in gpu.asked and strategies(reaching(CHAIN)) is not None
    preparation.stop()
    assert gpu.stopped


@pytest.mark.parametrize(
    ("error", "typed", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Unavailable, "no room for the kernels"),
        (ValueError("it has no such name"), Unavailable, "kernel grow .*ValueError: it has no"),
        (RuntimeError("CUDA error: an illegal address"), RuntimeError, "illegal address"),
    ],
)
def test_unloadable_kernel_refuses_the_policy(
    error: Exception,
    typed: type[Exception],
    message: str,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(variant: Variant) -> None:
        raise error

    monkeypatch.setattr(preparing, "load", fails)
    gpu.ended = Compiled(4, "")
    with pytest.raises(typed, match=message):
        until(preparation_of(gpu, CHAIN).advance)
