"""Drawn histories of deaths: only the key whose request ended the engine is blamed, and rests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.test_open_sequences import opened, size, submit
from tests.waiting import in_loop
from tlt_server.errors import EngineFailed, Unavailable
from tlt_server.frontend.link import suspects
from tlt_server.frontend.link.sequences import OpenSequences
from tlt_server.frontend.link.submission import Submission
from tlt_server.frontend.link.supervisor import Backoff
from tlt_server.frontend.link.suspects import FIRST_S, MAX_S, Rests
from tlt_server.wire.commands import Abort, Command, Submit
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput, last_output

KEYS = ("a", "b", "c")
GONE = EngineFailed("it is gone")
LONGEST = 4  # tokens of a sequence
LATE = 50  # token id that ends an engine that begins it with tokens from an earlier one
DEADLY = 100  # token ids from here on end the engine in their first step


class Engines:
    """One engine after another, which handle commands, note what starts, and take one step."""

    def __init__(self, sequences: OpenSequences, sent: list[Command]) -> None:
        self._sequences, self._sent = sequences, sent
        self.waiting: list[GenerateRequest] = []
        self.running: list[GenerateRequest] = []
        self.noted: list[str] = []
        self._aside: list[GenerateRequest] = []  # without KV until the next step has ended
        self._given: dict[str, int] = {}

    @property
    def deadly(self) -> list[GenerateRequest]:
        """The requests that end this engine in the step at hand."""
        return [
            request
            for request in self.running
            if request.token_ids[0] >= DEADLY
            or (request.token_ids[0] == LATE and request.generated and not self._given[request.id])
        ]

    def start(self) -> None:
        """Handle what was sent, and begin all that waits."""
        for command in self._sent:
            if isinstance(command, Submit):
                self.waiting += command.requests
                self._given |= dict.fromkeys((request.id for request in command.requests), 0)
            elif isinstance(command, Abort):
                for request in self.waiting + self.running + self._aside:
                    if request.id in command.ids:
                        self._end(request, command.finish_reason)
        self._sent.clear()
        self.running += self.waiting
        if self.waiting:
            self.noted = [request.id for request in self.running]
        self.waiting = []

    def step(self) -> None:
        for request in [*self.running]:
            self._given[request.id] += 1
            output = StepOutput(id=request.id, token_ids=[1], logprobs=[-1.0])
            self._sequences.dispatch([output])
            if self._given[request.id] == LONGEST:
                self._end(request, "stop")
        self.waiting, self._aside = self._aside, []

    def put_back(self, which: int) -> None:
        """Take one that runs out of the next step."""
        self._aside += self.running[which : which + 1]
        del self.running[which : which + 1]

    def die(self) -> None:
        """Begin the next one. What was sent to this one is lost with it."""
        self._sent.clear()
        self.waiting, self.running, self._aside, self.noted = [], [], [], []

    def _end(self, request: GenerateRequest, reason: str) -> None:
        for some in (self.waiting, self.running, self._aside):
            some[:] = [each for each in some if each.id != request.id]
        self._sequences.dispatch([last_output(request.id, reason)])


async def errors_of(submission: Submission) -> list[str]:
    slices = [few async for few, _ in submission.slices(size, 10**9)]
    return [output.error[0] for few in slices for output in few if output.error is not None]


NUMBER = st.integers(0, 7)
ASKS = st.tuples(
    st.just("ask"), st.sampled_from(KEYS), st.sampled_from([1, 2, LATE, DEADLY]), st.booleans()
)
ACTS = st.tuples(st.sampled_from(["step", "put back", "leave", "expire"]), NUMBER, NUMBER)


class History:
    def __init__(self) -> None:
        self.sequences, sent = opened()
        self.replica, self.engines = sent.replica, Engines(self.sequences, sent)
        self.rests, self.causes = Rests(window_s=300.0), list[str]()
        self.asked: list[tuple[Submission, GenerateRequest]] = []

    def act(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("ask", key, content, resumes):
                number = len(self.asked)
                request = GenerateRequest(
                    id=f"{key}{number}",
                    token_ids=[content if content < DEADLY else content + number],  # another form
                    sampling=Sampling(max_tokens=LONGEST),
                    seed=1,
                    owner=key,
                )
                self.asked.append((submit(self.sequences, [request], resumes=resumes), request))
            case ("step", leaves, expires):
                self._step(leaves, expires)
            case ("put back", which, _):
                self.engines.put_back(which)
            case ("leave", which, _):
                self._end(which, expires=False)
            case ("expire", which, _):
                self._end(which, expires=True)

    def _end(self, which: int, *, expires: bool) -> None:
        """End one that was asked lately, as its client leaves or its deadline passes."""
        if which < len(self.asked):
            submission, _ = self.asked[-1 - which]
            if expires:
                self.sequences.expire(submission)
            else:
                submission.close()

    def _step(self, leaves: int, expires: int) -> None:
        """Let one leave and one expire while the step runs, which may be the engine's last."""
        self.engines.start()
        self._end(leaves, expires=False)
        self._end(expires, expires=True)
        deadly = {request.owner for request in self.engines.deadly}
        if not deadly:
            self.engines.step()
            return
        ran = {request.owner for request in self.engines.running}
        now_s = float(len(self.causes))
        blamed = self.sequences.alone(self.engines.noted)
        assert blamed in {"", *deadly}
        assert blamed or len(ran) > 1
        self.rests.died(blamed, now_s)
        self.causes += [blamed] if blamed else []
        for key in KEYS:
            assert not left_s(self.rests, key, now_s) or self.causes.count(key) >= 2
        self.sequences.died(self.replica, self.engines.noted, GONE)
        self.engines.die()
        self.sequences.resume()

    async def close(self) -> None:
        self.sequences.end_all(GONE)
        for submission, request in self.asked:
            errors = await asyncio.wait_for(errors_of(submission), 60)
            assert "poisoned" not in errors or request.token_ids[0] >= LATE


BEGUN_BEFORE = [  # one that an earlier engine began ends the one where another key is on trial
    ("ask", "a", LATE, True),
    ("step", 9, 9),
    ("put back", 0, 0),
    ("ask", "b", 1, False),
    ("ask", "c", DEADLY, False),
    ("step", 9, 9),
    ("ask", "b", 1, False),
    ("step", 9, 9),
    ("ask", "b", 1, False),
]


@example(BEGUN_BEFORE)
@settings(max_examples=300, deadline=None)
@given(st.lists(ASKS | ACTS | ACTS, max_size=40))
@in_loop
async def test_key_is_not_delayed_for_crashes_of_a_different_key(
    history: list[tuple[Any, ...]],
) -> None:
    drawn = History()
    for action in history:
        drawn.act(action)
    await drawn.close()


@pytest.mark.parametrize("ends", ["leave", "expire"])
@in_loop
async def test_key_of_a_client_that_left_before_a_crash_is_blamed(ends: str) -> None:
    drawn = History()
    for _ in range(2):
        drawn.act(("ask", "a", DEADLY, False))
        drawn.act(("step", 0, 9) if ends == "leave" else ("step", 9, 0))
    assert drawn.causes == ["a", "a"] and left_s(drawn.rests, "a", 2.0)
    await drawn.close()


def left_s(rests: Rests, owner: str, now_s: float) -> float:
    try:
        rests.check(owner, now_s)
    except Unavailable as error:
        assert error.retry_after_s is not None
        return error.retry_after_s
    return 0.0


def test_key_delay_begins_at_the_second_crash_and_doubles() -> None:
    rests, now_s, found = Rests(window_s=300.0), 0.0, list[float]()
    for _ in range(10):
        rests.died("a", now_s)
        found.append(left_s(rests, "a", now_s))
        assert left_s(rests, "b", now_s) == left_s(rests, "", now_s) == 0.0
        now_s += found[-1] + 299.0  # the next one comes within the window after the rest
        assert left_s(rests, "a", now_s) == 0.0
    assert found[:4] == [0.0, FIRST_S, 2 * FIRST_S, 4 * FIRST_S] and found[-2:] == [MAX_S] * 2


def test_distant_crashes_delay_no_key() -> None:
    rests = Rests(window_s=300.0)
    for i in range(5):
        rests.died("a", 301.0 * i)
        assert left_s(rests, "a", 301.0 * i) == 0.0


def test_without_keys_no_request_waits_and_memory_is_bounded() -> None:
    rests = Rests(window_s=300.0)
    for _ in range(5):
        rests.died("", 0.0)
    assert left_s(rests, "", 0.0) == 0.0
    for i in range(suspects.KEYS + 5):
        rests.died(f"k{i}", 0.0)
        rests.died(f"k{i}", 0.0)
    assert not left_s(rests, "k0", 0.0) and left_s(rests, f"k{suspects.KEYS + 4}", 0.0)


@pytest.mark.parametrize(
    ("owners", "ends"),
    [
        (["a"] * 20, None),
        (["a", "b"] * 10, None),
        (["a", "b", "c", "d"], 3),  # one each: none is known to be the cause
        ([""] * 4, 3),
        (["", "a", "", "a", "", "a", ""], 6),
    ],
)
def test_crashes_by_delayed_keys_never_end_the_server(owners: list[str], ends: int | None) -> None:
    backoff = Backoff(3, window_s=300.0)
    delays = [backoff.death(float(i), owner=owner) for i, owner in enumerate(owners)]
    assert (delays.index(None) if None in delays else None) == ends
