"""Outputs of patient requests: gathered into chunks that lose no token and no figure."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fake_kv import EOS, PAGE, VOCAB, alone, collect, make, run, sequence
from tlt_server.engine.sampling.sampler import SamplingState
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.frontend.generation.choice import FinishedChoice, GrowingChoice
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.link.submission import Route, Submission
from tlt_server.frontend.link.suspects import Suspects
from tlt_server.wire.records import CHUNK_TOKENS, StepOutput

STEP_S = 0.01


class Running:
    """One request with prompts of its own seed, a step each `STEP_S` of a clock of its own."""

    def __init__(self, seed: int, *, tokens: int = 150, patient: bool = True) -> None:
        self.now_s, self._draw = 1.0, random.Random(seed)
        self.scheduler, self._kv = make(200, clock=lambda: self.now_s)
        self.sequence = sequence(0, [1, 2, 3], tokens, _endless(seed, tokens), patient=patient)
        self.scheduler.submit([self.sequence])
        self.outputs: list[StepOutput] = []
        self.gaps: list[tuple[float, int, int]] = []

    def step(self, count: int = 1) -> list[StepOutput]:
        """Return the outputs of these steps."""
        before = len(self.outputs)
        for _ in range(count):
            if batch := self.scheduler.next_batch():
                emissions = run(self.scheduler, batch, self._kv, self._draw)
                self._collect(self.scheduler.commit(batch, emissions))
                self.gaps += self.scheduler.take_gaps()
            self.now_s += STEP_S
        self.scheduler.check()
        return self.outputs[before:]

    def wait(self, seconds: float) -> list[StepOutput]:
        """Return the outputs that come without a step."""
        self.now_s += seconds
        found = self.scheduler.expire()
        self._collect(found)
        return found

    def choice(self) -> FinishedChoice:
        growing = GrowingChoice(
            self.sequence.request, 0, Text(None), incremental=False, stop=lambda id: None
        )
        growing.push(self.outputs)
        return growing.choice()

    def _collect(self, outputs: list[StepOutput]) -> None:
        collect(outputs, {"r0": self.outputs})


def _endless(seed: int, tokens: int) -> int:
    """Return the first seed from this one on whose response has all its tokens."""
    while alone(sequence(0, [1, 2, 3], tokens, seed).request)[1] != "length":
        seed += 1
    return seed


@given(st.integers(0, 2**20))
def test_output_chunks_keep_tokens_and_figures(seed: int) -> None:
    gathered, plain = (Running(seed, tokens=90, patient=patient) for patient in (True, False))
    for each in (gathered, plain):
        each.step(200)
    assert gathered.choice() == plain.choice()
    assert gathered.gaps == plain.gaps
    assert sum(count for _, _, count in plain.gaps) == len(plain.outputs) - 1
    assert len(gathered.outputs) < len(plain.outputs)


def test_first_tokens_go_out_at_once() -> None:
    running = Running(0)
    assert [bool(output.token_ids) for output in running.step(1)] == [True]
    assert running.step(2) == []


def test_chunk_goes_out_with_enough_tokens_or_after_its_time() -> None:
    running = Running(0)
    running.step(1)
    [chunk] = running.step(26)
    assert CHUNK_TOKENS <= len(chunk.token_ids) < CHUNK_TOKENS + 4
    assert 1 < chunk.steps < 26
    if not running.scheduler._chunks._held:
        running.step(1)
    assert running.wait(0.1) == []
    [late] = running.wait(0.2)
    assert late.token_ids and late.finish_reason is None


def test_end_of_a_sequence_delivers_held_tokens() -> None:
    running = Running(0)
    running.step(4)
    [last] = running.scheduler.abort(["r0"])
    assert last.finish_reason == "abort" and last.steps == 3
    assert sum(len(output.token_ids) for output in [*running.outputs, last]) == (
        running.sequence.output_len
    )


def test_each_chunk_is_of_one_weight_version() -> None:
    running = Running(0)
    running.step(4)
    [held] = running.scheduler.change_version("v2", "continue")
    assert held.weight_version == "v1" and held.steps == 3 and held.finish_reason is None
    running.step(8)
    [last] = running.scheduler.abort(["r0"])
    assert last.weight_version == "v2"


def test_resumed_sequence_sends_its_first_tokens_at_once() -> None:
    scheduler: Scheduler
    scheduler, kv = make(50)
    made = sequence(0, [1, 2, 3], 40, _endless(0, 40), patient=True, generated=[4, 5])
    scheduler.submit([made])
    batch = scheduler.next_batch()
    assert batch is not None
    [first] = scheduler.commit(batch, run(scheduler, batch, kv, random.Random(0)))
    assert first.token_ids


@pytest.mark.parametrize("last", [1, 7, 40, 64, 100])
def test_request_that_ends_each_engine_is_soon_refused(last: int) -> None:
    """Each engine dies before it has told of the token at this place."""
    request = sequence(0, [1, 2, 3], 150, _endless(0, 150), patient=True).request
    route = Route(Submission([request.id], lambda submission: None, resumes=True), request)
    suspects, deaths = Suspects(), 0
    while not suspects.sort([request], float(deaths)).refused:
        deaths += 1
        asked = route.rest()
        scheduler, kv = make(200)
        made = Sequence(asked, SamplingState(asked, VOCAB, [EOS]), PAGE)
        scheduler.submit([made])
        while made.output_len < last and (batch := scheduler.next_batch()):
            emissions = run(scheduler, batch, kv, random.Random(deaths))
            if made.output_len + sum(len(each.tokens) for each in emissions) < last:
                for output in scheduler.commit(batch, emissions):
                    route.take(output)
            else:
                break
        route.crashed = True
        suspects.crashed([(request, route.tokens)], request, float(deaths))
        assert deaths <= 4
