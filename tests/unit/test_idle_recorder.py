"""Idle time records what a request may bring and the start left out: each once, one at a time, the
likelier first, within half of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tlt_server.engine.gpu.equipment import IdleRecorder
from tlt_server.engine.gpu.memory.graphs import GraphPool
from tlt_server.engine.gpu.start.recordings import GraphRecordings
from tlt_server.engine.gpu.steps.buckets import MIN_DEPTH, Shapes
from tlt_server.engine.gpu.steps.extend import ExtendKey, SecondHalf, graphs_of
from tlt_server.wire.records import OFF, Strategy, parse_strategy

LONGER, WIDER = parse_strategy("eagle:4x1x4"), parse_strategy("eagle:4x2x8")


def short(requests: range, *, prompts: bool) -> Iterable[Strategy]:
    return OFF, LONGER


def wide(requests: range, *, prompts: bool) -> Iterable[Strategy]:
    return OFF, LONGER, WIDER


class Recording:
    """A runner that records nothing but the names of the graphs."""

    def __init__(self) -> None:
        self.shapes, self.graphs, self.recorded = Shapes(4, MIN_DEPTH), GraphPool(None), []
        self.quiet, self.full = True, False
        self.graphs._quiet = lambda: self.quiet
        self.recordings = GraphRecordings(self.shapes)
        self.recordings.follow(self.graphs)
        self.clear()

    def clear(self) -> None:
        self.graphs._stream = None
        self.graphs.clear()
        self.graphs._stream = object()  # type: ignore[assignment]

    def record(self, key: Any) -> None:
        names = graphs_of(key)
        assert not all(name in self.graphs for name in names)
        self.recorded.append(key)
        if self.full:
            self.graphs.end("the GPU has no room to record it", "end others")
            return
        for name in names:
            self.graphs._graphs[name], self.graphs.bytes[name] = name, 1  # type: ignore[assignment]

    def started(self, reach: Any) -> Recording:
        for key in self.shapes.captured(reach):
            self.record(key)
        self.recorded.clear()
        return self


def started() -> tuple[Recording, IdleRecorder]:
    """Return a runner after its start with `short`, and what records in its idle time."""
    runner = Recording().started(short)
    return runner, IdleRecorder(runner, runner.recordings)  # type: ignore[arg-type]


def drain(record: IdleRecorder, reach: Any = short) -> None:
    while record(reach):
        pass


ALONE = (["filtered"], ["edited"], ["structured"])
OTHERS = (*ALONE, ["filtered", "edited"], ["filtered", "structured"])


def test_graph_variants_are_recorded_largest_first_after_a_start() -> None:
    runner, record = started()
    extends = [key for key in runner.shapes.captured(short) if isinstance(key, ExtendKey)]
    for number in range(1, len(OTHERS) * len(extends) + 1):
        assert record(short) and len(runner.recorded) == number
    assert not record(short)
    assert runner.recorded == [
        key._replace(**dict.fromkeys(flags, True)) for flags in OTHERS for key in extends
    ]
    rows = [key.decode_rows + key.prompt_rows for key in extends]
    assert rows == sorted(rows, reverse=True) and len(extends) > 5


def test_partly_recorded_pass_is_recorded_again() -> None:
    runner, record = started()
    drain(record)
    halves = [key for key in runner.recorded if key.structured]
    runner.clear()
    runner.started(short)
    for key in halves:
        runner.graphs._graphs[key] = key  # type: ignore[assignment]
    drain(record)
    assert halves and {SecondHalf(key) for key in halves} <= {*runner.graphs._graphs}


def test_new_policys_own_graphs_are_recorded_first() -> None:
    runner, record = started()
    assert record(short) and runner.recorded.pop().filtered
    drain(record, wide)
    known, plain = {*runner.shapes.captured(short)}, runner.shapes.captured(wide)
    first = [key for key in plain if key not in known]
    assert first and runner.recorded[: len(first)] == first
    assert {*plain} <= {*runner.graphs._graphs} and not record(short)


def test_description_of_a_policy_counts_passes_with_graphs() -> None:
    runner, record = started()
    own, every = len(runner.shapes.captured(short)), len(runner.shapes.captured(wide))
    assert record.prepared(short).startswith(f"{own} of {own} passes")
    assert own < every and record.prepared(wide).startswith(f"{own} of {every} passes")
    drain(record, wide)
    assert record.prepared(wide).startswith(f"{every} of {every} passes")


def test_all_graphs_are_recorded_again_after_a_sleep() -> None:
    runner, record = started()
    drain(record)
    everything = {*runner.graphs._graphs}
    runner.clear()
    drain(record)
    assert {*runner.graphs._graphs} == everything


def test_graph_recording_needs_idle_time_and_half_of_the_memory() -> None:
    runner, record = started()
    runner.quiet = False
    assert not record(short) and not runner.recorded
    runner.quiet = True
    runner.graphs._most_bytes = 2 * (runner.graphs.total_bytes + 3)
    drain(record)
    assert len(runner.recorded) == 3
    runner.graphs._most_bytes *= 100
    assert record(short)


def test_memory_shortage_ends_recording_but_not_the_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner, record = started()
    runner.full = True
    assert record(short)
    assert "no room to record" in capsys.readouterr().err
    assert not record(short) and len(runner.recorded) == 1, "it is not tried all the time"
    runner.clear()
    runner.full = False
    assert record(short), "a sleep has given memory back"
