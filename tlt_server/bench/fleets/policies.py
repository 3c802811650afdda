"""Rollouts over simulated replicas under several ways of placing their requests."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from tlt_server.bench.fleets.clock import simulate
from tlt_server.bench.fleets.replica import SimulatedReplica, StepTimes
from tlt_server.frontend.link.forecast import Forecast
from tlt_server.frontend.link.moving import Mover
from tlt_server.frontend.link.placing import Placer
from tlt_server.wire.events import Outputs
from tlt_server.wire.records import GenerateRequest, Sampling

MEDIAN, SIGMA = 2500, 1.1  # tokens of an output
PROMPT, GROUP = 300, 16
SPREAD = "even spreading"
LOOK_S = 1.0  # between two looks at what could move


class LongTail(NamedTuple):
    """Requests of a rollout, and the output tokens of each by id."""

    requests: list[GenerateRequest]
    lengths: dict[str, int]


def long_tailed(count: int, seed: int, *, group: int = GROUP, longest: int = 32_768) -> LongTail:
    """Draw lengths; half of the variance is between groups."""
    draw = np.random.default_rng(seed)
    shared = np.repeat(draw.standard_normal(-(-count // group)), group)[:count]
    normal = np.sqrt(0.5) * shared + np.sqrt(0.5) * draw.standard_normal(count)
    return _of(np.clip(MEDIAN * np.exp(SIGMA * normal), 1, longest), longest, group)


def recorded(lengths_N: ArrayLike, count: int, seed: int) -> LongTail:
    """Draw from these lengths."""
    lengths = np.random.default_rng(seed).choice(np.asarray(lengths_N), count)
    return _of(lengths, int(lengths.max()), GROUP)


def _of(lengths: NDArray[Any], longest: int, group: int) -> LongTail:
    sampling, prompt = Sampling(max_tokens=longest), [1] * PROMPT
    requests = [
        GenerateRequest(
            id=f"{at}", token_ids=prompt, sampling=sampling, seed=at, group_id=f"g{at // group}"
        )
        for at in range(len(lengths))
    ]
    sizes = lengths.astype(int).tolist()
    return LongTail(requests, {r.id: n for r, n in zip(requests, sizes, strict=True)})


class Hashed(Placer):
    """Places all requests of a group at the replica that its hash names."""

    def place(
        self,
        request: GenerateRequest,
        tokens: int = 0,
        share: float = 0.0,
        among: Collection[str] | None = None,
    ) -> str | None:
        names = [*self.loads]
        name = names[zlib.crc32(request.group_id.encode()) % len(names)]
        return super().place(request, tokens, share, [name])


class Together(Placer):
    """Places a group where its first request went."""

    def __init__(self) -> None:
        super().__init__()
        self._homes: dict[str, str] = {}

    def place(
        self,
        request: GenerateRequest,
        tokens: int = 0,
        share: float = 0.0,
        among: Collection[str] | None = None,
    ) -> str | None:
        home = self._homes.get(request.group_id)
        name = super().place(request, tokens, share, [home] if home else among)
        self._homes[request.group_id] = str(name)
        return name


class Clairvoyant(Placer):
    """Knows how long each output will be, and keeps the longest ones together at few replicas. It
    is asked in the order of their lengths.
    """

    def __init__(self, lengths: Mapping[str, int], replicas: int, each: int) -> None:
        """`each`: the sequences at each of these `replicas`."""
        super().__init__()
        self._lengths, self._replicas, self._apart = lengths, replicas, replicas * each

    def place(
        self,
        request: GenerateRequest,
        tokens: int = 0,
        share: float = 0.0,
        among: Collection[str] | None = None,
    ) -> str | None:
        share = self._lengths[request.id] / request.sampling.max_tokens
        names, few = [*self.loads], len(self.placed) < self._apart
        chosen = names[: self._replicas] if few else names[self._replicas :]
        return super().place(request, tokens, share, chosen)


class RolloutFigures(NamedTuple):
    """Figures of one simulated rollout."""

    seconds: float
    tokens: int
    read_again: int
    moves: int
    free: float  # share of the replicas' time until the end


class FleetRollout:
    """Sends a workload to replicas, and moves its sequences until they have ended."""

    def __init__(
        self, placer: Placer, mover: Mover | None, workload: LongTail, names: Sequence[str]
    ) -> None:
        self._placer, self._mover, self._workload = placer, mover, workload
        self._forecast, self._done = Forecast(), asyncio.Event()
        self._open = {request.id: request for request in workload.requests}
        self._given: dict[str, list[int]] = {request.id: [] for request in workload.requests}
        self._moving: dict[str, str] = {}
        self._moves = 0
        times = StepTimes()
        self.replicas = {
            name: SimulatedReplica(name, self._take, lambda r: workload.lengths[r.id], times)
            for name in names
        }
        for name in names:
            placer.add(name, 256)

    async def run(self) -> RolloutFigures:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        at: dict[str, list[GenerateRequest]] = {name: [] for name in self.replicas}
        for request in self._workload.requests:
            name = self._placer.place(request, 0, self._forecast.share)
            assert name is not None
            at[name].append(request)
        for name, requests in at.items():
            self.replicas[name].submit(requests)
        while self._open:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._done.wait()
            except TimeoutError:
                self._look(loop.time())
        seconds = loop.time() - begun_s
        every = self.replicas.values()
        free_s = sum(replica.free_s(loop.time()) for replica in every)
        for replica in every:
            replica.close()
        return RolloutFigures(
            seconds,
            sum(self._workload.lengths.values()),
            sum(replica.read_again for replica in every),
            self._moves,
            free_s / (seconds * len(self.replicas)),
        )

    def _look(self, now_s: float) -> None:
        for move in self._mover.moves(now_s) if self._mover else ():
            self._moving[move.id] = move.to
            self._moves += 1
            self.replicas[self._placer.placed[move.id].load.name].abort([move.id])

    def _take(self, name: str, event: Outputs) -> None:
        self._placer.stepped(name, event.cycle, event.gauges)
        for output in event.outputs:
            self._given[output.id] += output.token_ids
            self._placer.took(output.id, len(output.token_ids))
            if output.finish_reason is None:
                continue
            request = self._open[output.id]
            given = self._given[output.id]
            if output.finish_reason == "abort":
                share = self._forecast.share
                to = self._moving.pop(output.id)
                self._placer.place(request, len(given), share, [to])
                rest = msgspec.structs.replace(request, generated=[*given])
                asyncio.get_running_loop().call_soon(self.replicas[to].submit, [rest])
            else:
                assert len(given) == self._workload.lengths[output.id]
                self._forecast.ended(len(given), request.sampling.max_tokens)
                self._placer.ended(output.id)
                del self._open[output.id]
        if not self._open:
            self._done.set()


def simulated(
    workload: LongTail,
    replicas: int,
    placer: Callable[[], Placer] = Placer,
    mover: Callable[[Placer], Mover] | None = None,
) -> RolloutFigures:
    """Return the figures of a rollout over this many replicas."""

    async def run() -> RolloutFigures:
        own = placer()
        names = [f"r{number:03}" for number in range(replicas)]
        return await FleetRollout(own, mover and mover(own), workload, names).run()

    return simulate(run())


def policies(
    workload: LongTail, replicas: int, slower: Sequence[float]
) -> dict[str, Callable[[], RolloutFigures]]:
    """Return the simulations of this workload by the name of the policy. `slower`: the bounds of
    consolidation.
    """
    run = partial(simulated, workload, replicas)
    found: dict[str, Callable[[], RolloutFigures]] = {
        "hash": partial(run, Hashed),
        "groups kept together": partial(run, Together),
        SPREAD: run,
        "with moves": partial(run, Placer, Mover),
    }
    for bound in slower:
        mover = partial(Mover, consolidate=bound)
        found[f"with consolidation {bound:g}"] = partial(run, Placer, mover)
    if replicas > 1:
        found["clairvoyant"] = partial(foreseen, workload, replicas)
    return found


def foreseen(workload: LongTail, replicas: int) -> RolloutFigures:
    """Return the best of a few ways to keep the longest apart."""
    by_length = sorted(workload.requests, key=lambda each: -workload.lengths[each.id])
    ordered = LongTail(by_length, workload.lengths)
    few = {max(1, replicas * part // 8) for part in (3, 4, 5)}
    ways = [(count, each) for count in sorted(few) for each in (4, 6)]
    return min(
        simulated(ordered, replicas, partial(Clairvoyant, workload.lengths, *way)) for way in ways
    )
