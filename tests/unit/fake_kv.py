"""A model that is a function of the prefix, a KV that remembers what it was computed from, and a
runner on both, to drive the scheduler without a tensor.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from tlt_server.engine.gate import StepGate
from tlt_server.engine.sampling.sampler import SamplingState
from tlt_server.engine.schedule.batch import Batch
from tlt_server.engine.schedule.pages import PagePool
from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.scheduler import Scheduler, unpadded
from tlt_server.engine.schedule.sequence import Emission, Sequence
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput

PAGE = 4
VOCAB = 50
EOS = 49


def target(tokens: list[int], seed: int) -> int:
    """The fake model: the next token is a function of the whole prefix and the seed."""
    return random.Random(f"{tokens}{seed}").randrange(VOCAB)


def alone(request: GenerateRequest) -> tuple[list[int], str]:
    """The slow twin: no batch, no pages."""
    tokens = list(request.token_ids)
    if not request.sampling.max_tokens:
        return [], "length"
    while True:
        tokens.append(target(tokens, request.seed))
        if tokens[-1] == EOS:
            return tokens[len(request.token_ids) :], "stop"
        if len(tokens) - len(request.token_ids) == request.sampling.max_tokens:
            return tokens[len(request.token_ids) :], "length"


class FakeKV:
    """Remembers the token prefix that every KV slot was computed from, so that wrong sharing or
    stale pages are caught.
    """

    def __init__(self) -> None:
        # By KV slot: the prefix it was computed from, and the weight version that computed it.
        self.slot: dict[int, tuple[int, ...]] = {}
        self.made: dict[int, str] = {}
        # By KV slot: the flushes before the oldest KV that it was computed from.
        self.since: dict[int, int] = {}
        self.flushes = 0
        self.started: list[str] = []  # what the scheduler announced last
        # By sequence and epoch: what the device knows, ahead of the host.
        self.tokens: dict[tuple[Sequence, int], list[int]] = {}

    def save(self, pages: list[int]) -> list[tuple[tuple[int, ...] | None, str | None, int | None]]:
        return [
            (self.slot.get(slot), self.made.get(slot), self.since.get(slot))
            for page in pages
            for slot in range(page * PAGE, (page + 1) * PAGE)
        ]

    def restore(self, saved: list[tuple[tuple[int, ...], str, int]], pages: list[int]) -> None:
        slots = [slot for page in pages for slot in range(page * PAGE, (page + 1) * PAGE)]
        for slot, (prefix, version, since) in zip(slots, saved, strict=False):
            self.slot[slot], self.made[slot], self.since[slot] = prefix, version, since

    def check_versions(self, scheduler: Scheduler) -> None:
        """All KV of a sequence is of the version in force, unless the sequence is known to span
        versions.
        """
        for s in scheduler.running:
            made = {self.made[self.at(s, position)] for position in range(s.computed)}
            assert s.mixed_version or made <= {scheduler.weight_version}, (
                f"{s.id} reads KV of {made}"
            )
            assert not s.mixed_version or s.decoding, (
                f"{s.id} has read its prompt under two versions"
            )
        for page in scheduler.pool._key:
            assert len({self.made[page * PAGE + i] for i in range(PAGE)}) == 1, (
                f"page {page} is published with KV of two versions"
            )

    def start(self, ids: list[str]) -> None:
        self.started = ids

    def extend(
        self, sequence: Sequence, tokens: list[int], start: int, end: int, version: str
    ) -> None:
        for position in range(start):
            assert self.slot[self.at(sequence, position)] == tuple(tokens[: position + 1]), (
                f"{sequence.id} reads foreign KV at {position}"
            )
        since = min(
            [self.flushes, *(self.since[self.at(sequence, position)] for position in range(start))]
        )
        for position in range(start, end):
            self.slot[self.at(sequence, position)] = tuple(tokens[: position + 1])
            self.made[self.at(sequence, position)] = version
            self.since[self.at(sequence, position)] = since

    def check_published(self, pool: PagePool) -> None:
        """Every indexed page holds one unbroken, fully computed prefix, and nothing of before the
        last flush.
        """
        for page in pool._key:
            held = [self.slot.get(page * PAGE + i) for i in range(PAGE)]
            since = {self.since[page * PAGE + i] for i in range(PAGE)}
            assert since == {self.flushes}, f"page {page} is of before a flush"
            assert None not in held, f"page {page} is published before it is computed"
            assert all(b[:-1] == a for a, b in pairwise(held)), f"page {page} mixes prefixes"

    @staticmethod
    def at(sequence: Sequence, position: int) -> int:
        return sequence.pages[position // PAGE] * PAGE + position % PAGE


def run(scheduler: Scheduler, batch: Batch, kv: FakeKV, draw: random.Random) -> list[Emission]:
    """Launch the batch on a device that knows at once what the host will be told later."""
    scheduler.launched(batch, 3)
    emissions = []
    for chunk in batch.chunks:
        sequence = chunk.sequence
        assert sequence.id in kv.started, "it is computed and was not announced"
        tokens = kv.tokens.setdefault((sequence, sequence.epoch), sequence.tokens.tolist())
        remaining = sequence.length + sequence.remaining - len(tokens)
        output = tokens[sequence.prompt_len :]
        if output and (output[-1] == EOS or not remaining):
            emissions.append(Emission())  # it has ended on the device
            continue
        start, end = (len(tokens) - 1, len(tokens)) if chunk.decodes else (chunk.start, chunk.end)
        assert start <= chunk.start and end <= chunk.end, "the host's bounds are wrong"
        kv.extend(sequence, tokens, start, end, batch.weight_version)
        if not chunk.samples:
            emissions.append(Emission())
            continue
        before = len(tokens)
        most = max(0, min(remaining - 1, sequence.capacity - before, 3))
        depth = draw.randint(0, most) if chunk.decodes else 0
        for _ in range(depth + 1):
            tokens.append(target(tokens, sequence.request.seed))
        new = tokens[before:]
        for i in range(depth):
            kv.slot[kv.at(sequence, before + i)] = tuple(tokens[: before + i + 1])
            kv.made[kv.at(sequence, before + i)] = batch.weight_version
            kv.since[kv.at(sequence, before + i)] = kv.since[kv.at(sequence, before - 1)]
        if EOS in new:
            del tokens[before + new.index(EOS) + 1 :]
        emissions.append(Emission(tokens=new, logprobs=[0.0] * len(new), drafted=depth))
    return emissions


def running(pages: int, max_running: int, max_pages: int) -> RunningSet:
    return RunningSet(
        PagePool(pages, PAGE), max_running=max_running, max_pages_per_sequence=max_pages
    )


def make(
    pages: int,
    *,
    max_running: int = 4,
    max_rows: int = 8,
    gate: StepGate | None = None,
    prompt_budget: Callable[[int, int], int] = unpadded,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Scheduler, FakeKV]:
    kv = FakeKV()
    return Scheduler(
        gate or StepGate(),
        running(pages, max_running, pages),
        max_rows=max_rows,
        lookahead=4,
        weight_version="v1",
        prompt_budget=prompt_budget,
        on_start=kv.start,
        save=kv.save,
        restore=kv.restore,
        clock=clock,
    ), kv


def sequence(i: int, prompt: list[int], max_tokens: int, seed: int, **fields: Any) -> Sequence:
    request = GenerateRequest(
        id=f"r{i}", token_ids=prompt, sampling=Sampling(max_tokens=max_tokens), seed=seed, **fields
    )
    return Sequence(request, SamplingState(request, VOCAB, [EOS]), PAGE)


def collect(outputs: list[StepOutput], into: dict[str, list[StepOutput]]) -> None:
    for output in outputs:
        assert not into.get(output.id) or into[output.id][-1].finish_reason is None, (
            f"{output.id} spoke after its end"
        )
        into.setdefault(output.id, []).append(output)
