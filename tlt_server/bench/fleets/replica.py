"""A simulated replica: batches, times and outputs of an engine, without a model.

Its sequences advance together, by as many tokens as a step of that batch is known to give; prompts
are read first, and hold the others up meanwhile. Token n of a sequence is a function of its seed,
so that a gap or a repetition shows. It preempts nothing.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tlt_server.wire.events import Outputs
from tlt_server.wire.records import (
    CHUNK_S,
    OFF,
    Cycle,
    GenerateRequest,
    StepContext,
    StepOutput,
    last_output,
)

# A 7B target on an H200, by batch: milliseconds of a step without drafts (decode-gpu), tokens per
# second under the default policy over those without drafts (rollout-http-sweep-gpu).
STEP_MS = {1: 3.839, 8: 3.890, 32: 4.263, 64: 4.644, 256: 9.068}
GAINS = {1: 2.036, 2: 1.869, 4: 2.239, 8: 2.083, 16: 1.915, 32: 1.76, 64: 1.424, 128: 1.194}
GAINS |= {192: 1.193, 256: 1.042}
CONTEXT_S = 2.67e-8  # time of a step for each token of context (decode-gpu: 16,000 against 128)
READ_S = 1 / 44_000  # for a prompt token (prefill-gpu)
LARGEST = 256
PERIOD = 251
CYCLE = random.Random(1).sample(range(PERIOD), PERIOD)
FREE_S = 10.0  # pieces of idle time that something else can use


SIZES = np.arange(1, LARGEST + 1)
STEPS_S = 1e-3 * np.interp(SIZES, [*STEP_MS], [*STEP_MS.values()])
SPED_UP = np.interp(SIZES, [*GAINS], [*GAINS.values()])


def token_seconds(decoding: int, context: float, *, speculates: bool = True) -> float:
    """Return the seconds of one token of each sequence of a batch with so much context in all."""
    at = min(decoding, LARGEST) - 1
    return float((STEPS_S[at] + CONTEXT_S * context) / (SPED_UP[at] if speculates else 1.0))


@dataclass(eq=False, slots=True)
class _Run:
    request: GenerateRequest
    end: float  # tokens of the replica at which the sequence is complete
    given: int  # output tokens, with those from before
    length: int  # output tokens in all
    size: int  # prompt and output when it began


class SimulatedReplica:
    def __init__(
        self,
        emit: Callable[[Outputs], None],
        length: Callable[[GenerateRequest], int],
        max_running: int,
        *,
        speculates: bool = True,
    ) -> None:
        """`emit` takes outputs: of all sequences in chunks, and at the end of one. `length` returns
        the output tokens of a request.
        """
        self._emit, self._length, self._max_running = emit, length, max_running
        self._speculates = speculates
        self.version, self.corrupt = "", False  # the weights; corrupt ones give other tokens
        self.waiting = deque[GenerateRequest]()
        self.running: dict[str, _Run] = {}
        self.read_again = 0  # tokens of continued sequences that were read here
        self.idle: list[tuple[float, float]] = []  # from, until
        self._cached: dict[tuple[str, str], int] = {}
        self._progress = self._emitted = 0.0  # tokens that a sequence here since the start has
        self._stall_s = 0.0  # prompts still to read
        self._read = 0  # prompt tokens since the last cycle
        self._loop = asyncio.get_running_loop()
        self._at_s = self._cycle_s = self._idle_s = self._loop.time()
        self._tick_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # commands

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        self._advance()
        if not (self.running or self.waiting):
            self.idle.append((self._idle_s, self._at_s))
            self._tick_at_s = self._cycle_s = self._at_s
        self.waiting += requests
        self._begin()
        self._schedule()

    def abort(self, ids: Iterable[str], finish_reason: str = "abort") -> None:
        self._advance()
        gone = set(ids)
        outputs = [self._output(id, finish_reason) for id in [*self.running] if id in gone]
        outputs += [last_output(r.id, finish_reason) for r in self.waiting if r.id in gone]
        self.waiting = deque(r for r in self.waiting if r.id not in gone)
        self._begin()
        self._report(outputs)

    def tell(self) -> None:
        """Report the tokens until now."""
        self._advance()
        self._report([self._output(id) for id in self.running])

    def stop(self, for_s: float) -> None:
        """Compute nothing for this time."""
        self._advance()
        self._stall_s += for_s
        self._schedule()

    def rest(self, *, asleep: bool) -> None:
        """Compute nothing from now on, or go on."""
        self._advance()
        self._stall_s = math.inf if asleep else 0.0
        self._schedule()

    def close(self) -> None:
        """End without another word."""
        self.running, self._cached = {}, {}
        self.waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def free_s(self, until_s: float) -> float:
        """Return the time it was idle for until then, in whole pieces of `FREE_S`."""
        ends = [*self.idle] if self.running or self.waiting else [*self.idle, (self._idle_s, 1e9)]
        gaps = (min(end_s, until_s) - begin_s for begin_s, end_s in ends)
        return sum(max(0.0, gap_s) // FREE_S * FREE_S for gap_s in gaps)

    # time

    def _advance(self) -> None:
        """Compute the tokens until now."""
        now_s = self._loop.time()
        passed_s, self._at_s = now_s - self._at_s, now_s
        if self.running:
            stalled_s = min(passed_s, self._stall_s)
            self._stall_s -= stalled_s
            self._progress += (passed_s - stalled_s) / self._token_s()

    def _token_s(self) -> float:
        return token_seconds(len(self.running), self._context(), speculates=self._speculates)

    def _context(self) -> int:
        return sum(run.size for run in self.running.values())

    def _begin(self) -> None:
        while self.waiting and len(self.running) < self._max_running:
            request = self.waiting.popleft()
            given, length = len(request.generated), self._length(request)
            size = len(request.token_ids) + given
            key = request.tenant, request.group_id
            new = size - min(size, self._cached.get(key, 0))
            self._cached[key] = max(size, self._cached.get(key, 0))
            self._stall_s += new * READ_S
            self._read += new
            self.read_again += new if given else 0
            end = self._progress + max(0, length - given)
            self.running[request.id] = _Run(request, end, given, length, size)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.running:
            left = min(run.end for run in self.running.values()) - self._progress
            end_s = self._at_s + self._stall_s + max(0.0, left) * self._token_s()
            self._timer = self._loop.call_at(
                max(self._at_s, min(end_s, self._tick_at_s)), self._wake
            )

    def _wake(self) -> None:
        self._advance()
        ended = [id for id, run in self.running.items() if run.end <= self._progress + 1e-6]
        outputs = [self._output(id, self._reason(id)) for id in ended]
        if self._at_s >= self._tick_at_s - 1e-9:
            self._tick_at_s = self._at_s + CHUNK_S
            outputs += [self._output(id) for id in self.running]
        self._begin()
        self._report(outputs)

    def _reason(self, id: str) -> str:
        run = self.running[id]
        return "length" if run.length >= run.request.sampling.max_tokens else "stop"

    def _output(self, id: str, finish_reason: str | None = None) -> StepOutput:
        """Return the tokens of a sequence since its last output."""
        run = self.running[id]
        known = (
            run.length
            if run.end <= self._progress + 1e-6
            else run.length - math.ceil(run.end - self._progress - 1e-6)
        )
        known = max(known, run.given)
        tokens = tokens_of(run.request.seed + self.corrupt, run.given, known)
        run.size += known - run.given
        run.given = known
        if finish_reason is not None:
            del self.running[id]
            key = run.request.tenant, run.request.group_id
            self._cached[key] = max(self._cached[key], run.size)
        return StepOutput(
            id=id,
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            finish_reason=finish_reason,
            weight_version=self.version,
        )

    def _report(self, outputs: list[StepOutput]) -> None:
        cycle = None
        emitted = self._progress - self._emitted
        if outputs and self._at_s > self._cycle_s and emitted > 0:
            count = max(1, len(self.running))
            cycle = Cycle(
                context=StepContext(count, self._read, self._context() / count, 0),
                strategy=OFF,
                rows=count,
                emitted=round(emitted * count),
                accepted=(),
                drafted=0,
                step_s=self._at_s - self._cycle_s,
            )
            self._cycle_s, self._emitted, self._read = self._at_s, self._progress, 0
        if not (self.running or self.waiting):
            self._idle_s = self._at_s
        self._schedule()
        if outputs:
            gauges = {"running": float(len(self.running)), "waiting": float(len(self.waiting))}
            self._emit(Outputs(outputs, gauges, cycle))


def tokens_of(seed: int, first: int, end: int) -> list[int]:
    """Return these tokens of the output of a request with this seed; any four in a row tell where
    they are in a period of 251.
    """
    at = (seed + first) % PERIOD
    return (CYCLE * (1 + (at + end - first) // PERIOD))[at : at + end - first]
