"""Plays a rollout on an engine under one policy, and records what every step verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tlt_server.bench.engines import adopt
from tlt_server.bench.replaying.names import policy_name
from tlt_server.engine.loop import Engine
from tlt_server.engine.runner import Finished, Runner
from tlt_server.engine.schedule.batch import Batch
from tlt_server.speculation.knowledge import KnowledgeRecord
from tlt_server.wire.commands import SetPolicy, Submit
from tlt_server.wire.records import Cycle, GenerateRequest, Strategy


class Verified(NamedTuple):
    """One request in one cycle."""

    request: int
    root: int
    rows: int
    own_rows: int  # 0: not known
    accepted: int
    own_accepted: int


class TimedCycle(NamedTuple):
    cycle: Cycle
    verified: list[Verified]


class Played(NamedTuple):
    seconds: float
    known: KnowledgeRecord | None
    cycles: list[TimedCycle]
    outputs: list[list[int]]
    ends: list[str]


class WatchedRunner:
    """An engine's runner that also keeps the newest result for the bench."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.finished: Finished | None = None
        self.root_W: list[int] = []  # position of each chunk's root; -1 if the outcome is void

    @property
    def learns(self) -> bool:
        return self._runner.learns

    @learns.setter
    def learns(self, learns: bool) -> None:
        self._runner.learns = learns

    @property
    def in_flight(self) -> int:
        return self._runner.in_flight

    def launch(self, batch: Batch, strategy: Strategy) -> None:
        self._runner.launch(batch, strategy)

    def collect(self, *, busy: bool) -> Finished | None:
        self.finished = self._runner.collect(busy=busy)
        if self.finished is not None:  # what came before has been committed, this has not
            self.root_W = [
                -1 if chunk.void or not chunk.decodes else chunk.sequence.length - 1
                for chunk in self.finished.batch.chunks
            ]
        return self.finished

    def gauges(self) -> Mapping[str, float]:
        return self._runner.gauges()


def play(
    engine: Engine,
    watched: WatchedRunner,
    requests: list[GenerateRequest],
    command: SetPolicy,
    on_end: Callable[[str], None],
) -> Played:
    """Run the rollout under one policy."""
    index = {request.id: n for n, request in enumerate(requests)}
    outputs: list[list[int]] = [[] for _ in requests]
    ends = [""] * len(requests)
    cycles: list[TimedCycle] = []
    adopt(engine, command)
    known = engine.choice.knowledge.record() if engine.choice.knowledge.cost.trained else None
    started = time.perf_counter()
    engine.send(Submit(requests))
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, f"{output.id}: {output.error}"
            outputs[index[output.id]] += output.token_ids
            if output.finish_reason:
                ends[index[output.id]] = output.finish_reason
                on_end(policy_name(command))
        if engine.last_cycle is not None and watched.finished is not None:
            verified = _verified(watched.finished, watched.root_W, index)
            cycles.append(TimedCycle(engine.last_cycle, verified))
    return Played(time.perf_counter() - started, known, cycles, outputs, ends)


def _verified(finished: Finished, root_W: list[int], index: Mapping[str, int]) -> list[Verified]:
    """Return the verified rows of each decoding request in a step."""
    return [
        Verified(
            index[chunk.sequence.id],
            root,
            1 + emission.drafted,
            0 if emission.own_drafted is None else 1 + emission.own_drafted,
            *emission.followed,
        )
        for chunk, emission, root in zip(
            finished.batch.chunks, finished.emissions, root_W, strict=True
        )
        if root >= 0
    ]
