"""One hostile key at full rate and the small requests of others, through the scheduler in simulated
time: the neighbours of `python -m tests.hostile` without a server.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from tests.unit.fake_kv import PAGE, VOCAB, make
from tests.unit.test_admission import Clock
from tlt_server.bench.goodput import percentile
from tlt_server.engine.sampling.sampler import SamplingState
from tlt_server.engine.schedule.sequence import Emission, Sequence
from tlt_server.wire.records import GenerateRequest, Sampling

SECONDS, PAUSE_S = 6.0, 0.02


class Machine(NamedTuple):
    """The milliseconds of a step, and its bounds."""

    fixed: float
    per_row: float
    max_running: int
    max_rows: int


# The shipped pair on one core, and a model of 7B parameters on a GPU.
CPU, GPU = Machine(2.8, 0.18, 64, 512), Machine(3.85, 0.02, 256, 4096)


class Ask(NamedTuple):
    """The request of a client, which it sends again and again with a pause between."""

    owner: str
    sequences: int
    prompt: int
    tokens: int
    pause_s: float = 0.0


SMALL = Ask("small", 1, 4, 4, PAUSE_S)
OUTPUTS, PROMPTS = Ask("hostile", 64, 4, 512), Ask("hostile", 4, 3000, 1)
ATTACKS = {"long outputs": [OUTPUTS] * 2, "long prompts": [PROMPTS] * 2}
ATTACKS["all"] = ATTACKS["long outputs"] + ATTACKS["long prompts"]


class Bench:
    """Clients that ask one thing after the other; `run` returns their latencies by owner."""

    def __init__(self, machine: Machine, asks: list[Ask]) -> None:
        self.machine, self.clock = machine, Clock()
        self.scheduler, _ = make(10**5, max_running=machine.max_running, max_rows=machine.max_rows)
        self.scheduler._clock = self.clock
        self.took_s = {ask.owner: list[float]() for ask in asks}
        self.rows = list[dict[str, int]]()  # rows by sequence, for each step
        self.tokens = Counter[str]()
        self.of: dict[str, str] = {}  # owner, by sequence
        self._ids, self._open = itertools.count(), set[str]()
        self._clients = [(self._client(ask), set[str](), 0.0) for ask in asks]

    def run(self, seconds: float = SECONDS) -> dict[str, list[float]]:
        while self.clock.now < seconds:
            self._clients = [
                (client, ids, at_s)
                if ids & self._open or at_s > self.clock.now
                else (client, *next(client))
                for client, ids, at_s in self._clients
            ]
            if not self._step():
                self.clock.now = min(at_s for _, ids, at_s in self._clients if not ids)
        return self.took_s

    def _client(self, ask: Ask) -> Iterator[tuple[set[str], float]]:
        began_s = 0.0
        for serial in itertools.count():
            requests = [
                GenerateRequest(
                    id=f"{next(self._ids)}",
                    token_ids=[(serial + i) % VOCAB for i in range(ask.prompt)],
                    sampling=Sampling(max_tokens=ask.tokens, ignore_eos=True),
                    seed=0,
                    owner=ask.owner,
                    salt=f"{ask.owner} {ask.prompt} {serial}",
                )
                for _ in range(ask.sequences)
            ]
            self.scheduler.submit(
                Sequence(each, SamplingState(each, VOCAB, []), PAGE) for each in requests
            )
            ids = {each.id for each in requests}
            self.of |= dict.fromkeys(ids, ask.owner)
            self._open |= ids
            yield ids, 0.0
            self.took_s[ask.owner].append(self.clock.now - began_s)
            began_s = self.clock.now + ask.pause_s
            yield set(), began_s

    def _step(self) -> bool:
        if not (batch := self.scheduler.next_batch()):
            return False
        self.scheduler.launched(batch, 0)
        self.rows.append({c.sequence.id: c.end - c.start for c in batch.chunks})
        for chunk in batch.chunks:
            read = chunk.sequence.request.sampling.max_tokens == 1
            self.tokens[chunk.sequence.owner] += chunk.end - chunk.start if read else chunk.samples
        ms = self.machine.fixed + self.machine.per_row * sum(self.rows[-1].values())
        self.clock.now += ms / 1e3
        emissions = [Emission([1], [0.0]) if c.samples else Emission() for c in batch.chunks]
        for said in self.scheduler.commit(batch, emissions):
            if said.finish_reason:
                self._open.discard(said.id)
        self.scheduler.observe(batch, ms)
        return True


@cache
def alone(machine: Machine, attack: str) -> Counter[str]:
    bench = Bench(machine, ATTACKS[attack])
    bench.run()
    return bench.tokens


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    "machine", [pytest.param(CPU, id="cpu"), pytest.param(GPU, id="gpu", marks=pytest.mark.long)]
)
def test_small_requests_of_other_keys_slow_down_at_most_twofold(
    machine: Machine, attack: str
) -> None:
    """The hostile key keeps about half of what it does alone. Without shares of time the factor is
    3.7 to 8.3, but for long outputs on a GPU. The first requests come before a step is measured.
    """
    idle = percentile(Bench(machine, [SMALL]).run()["small"], 99)
    bench = Bench(machine, [*ATTACKS[attack], SMALL])
    busy = bench.run()["small"][5:]
    assert percentile(busy, 99) <= 2 * idle
    assert bench.tokens["hostile"] >= 0.45 * alone(machine, attack)["hostile"]


@pytest.mark.parametrize("attack", ATTACKS)
def test_steps_of_a_lone_key_run_every_sequence(attack: str) -> None:
    unmeasured = Bench(CPU, ATTACKS[attack])
    unmeasured.scheduler.observe = lambda batch, ms: None  # type: ignore[method-assign]
    measured = Bench(CPU, ATTACKS[attack])
    unmeasured.run(3)
    measured.run(3)
    assert measured.rows == unmeasured.rows


def test_keys_with_equal_demand_fill_the_batch_like_one_key() -> None:
    halves = [OUTPUTS._replace(owner=owner, sequences=32) for owner in "ab"]
    bench = Bench(CPU, halves)
    bench.run(3)
    decoding = bench.rows[10:]
    assert all(len(rows) == CPU.max_running for rows in decoding[: OUTPUTS.tokens // 2])


def test_sequences_of_a_limited_key_take_turns() -> None:
    bench = Bench(CPU, [OUTPUTS, SMALL._replace(pause_s=0.0)])
    bench.run(4)
    steps = [rows for rows in bench.rows[200:] if len(rows) < CPU.max_running // 2]
    assert len(steps) > 100
    counts = Counter(id for rows in steps[:100] for id in rows)
    hostile = [id for id in counts if bench.of[id] == "hostile"]
    assert len(hostile) >= CPU.max_running - 2
    assert max(counts[id] for id in hostile) - min(counts[id] for id in hostile) <= 1


def test_batch_slot_stays_free_for_a_returning_key() -> None:
    bench = Bench(CPU, [*ATTACKS["long outputs"], SMALL])
    bench.run(3)
    assert len(bench.took_s["small"]) > 50
    assert bench.scheduler.preemptions == 0
