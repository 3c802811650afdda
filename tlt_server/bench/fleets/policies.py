"""Rollouts over simulated replicas under several ways of placing their requests."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tlt_server.bench.fleets.clock import simulate
from tlt_server.bench.fleets.gateway import Machines, SimulatedDisk, SimulatedGateway
from tlt_server.bench.fleets.machine import FleetHistory, Machine, own_id
from tlt_server.frontend.link.moving import Mover
from tlt_server.frontend.link.placing import Placer
from tlt_server.frontend.link.submission import HOP
from tlt_server.metrics import Metrics
from tlt_server.wire.records import GenerateRequest, Sampling

MEDIAN, SIGMA = 2500, 1.1  # tokens of an output
PROMPT, GROUP = 300, 16
HASH, TOGETHER, SPREAD = "hash", "groups kept together", "even spreading"


class LongTail(NamedTuple):
    """Requests of a rollout, and the output tokens of each by id."""

    requests: list[GenerateRequest]
    lengths: dict[str, int]


def long_tailed(count: int, seed: int, longest: int = 32_768) -> LongTail:
    """Draw lengths; half of the variance is between groups."""
    draw = np.random.default_rng(seed)
    shared = np.repeat(draw.standard_normal(-(-count // GROUP)), GROUP)[:count]
    normal = np.sqrt(0.5) * shared + np.sqrt(0.5) * draw.standard_normal(count)
    return _of(np.clip(MEDIAN * np.exp(SIGMA * normal), 1, longest), longest)


def recorded(lengths_N: ArrayLike, count: int, seed: int) -> LongTail:
    """Draw from these lengths."""
    lengths = np.random.default_rng(seed).choice(np.asarray(lengths_N), count)
    return _of(lengths, int(lengths.max()))


def _of(lengths: NDArray[Any], longest: int) -> LongTail:
    sampling, prompt = Sampling(max_tokens=longest), [1] * PROMPT
    requests = [
        GenerateRequest(
            id=f"{at}", token_ids=prompt, sampling=sampling, seed=at, group_id=f"g{at // GROUP}"
        )
        for at in range(len(lengths))
    ]
    sizes = lengths.astype(int).tolist()
    return LongTail(requests, {r.id: n for r, n in zip(requests, sizes, strict=True)})


class Guided(Placer):
    """A placer with a policy, which names the replicas that a request may go to."""

    def __init__(
        self,
        policy: Callable[[Guided, GenerateRequest], list[str]],
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        """`lengths`: output tokens by id, if they are known in advance."""
        super().__init__()
        self._policy, self._lengths = policy, lengths
        self.homes: dict[str, str | None] = {}  # group -> replica of its first request

    def place(
        self,
        request: GenerateRequest,
        tokens: int = 0,
        share: float = 0.0,
        among: Collection[str] | None = None,
    ) -> str | None:
        if self._lengths is not None:
            share = self._lengths[request.id] / request.sampling.max_tokens
        name = super().place(request, tokens, share, self._policy(self, request))
        self.homes.setdefault(request.group_id, name)
        return name


def hashed(placer: Guided, request: GenerateRequest) -> list[str]:
    """Send all requests of a group to the replica that its hash names."""
    names = [*placer.loads]
    return [names[zlib.crc32(request.group_id.encode()) % len(names)]]


def together(placer: Guided, request: GenerateRequest) -> list[str]:
    """Send a group where its first request went."""
    home = placer.homes.get(request.group_id)
    return [home] if home else [*placer.loads]


def clairvoyant(replicas: int, each: int, placer: Guided, request: GenerateRequest) -> list[str]:
    """Keep the longest, which are placed first, together: `each` at every one of a few replicas."""
    names = [*placer.loads]
    few = len(placer.placed) < replicas * each
    return names[:replicas] if few else names[replicas:]


class RolloutFigures(NamedTuple):
    """Figures of one simulated rollout."""

    seconds: float
    tokens: int
    read_again: int
    moves: int
    free: float  # share of the replicas' time until the end


def still(placer: Placer) -> Mover:
    return Mover(placer, balance=False)


def simulated(
    workload: LongTail,
    replicas: int,
    placer: Callable[[], Placer] = Placer,
    mover: Callable[[Placer], Mover] = still,
    *,
    max_running: int = 256,
    speculates: bool = True,
) -> RolloutFigures:
    """Return the figures of a rollout over this many replicas. `max_running`: of each."""

    async def run(state_dir: str) -> RolloutFigures:
        loop, history, metrics = asyncio.get_running_loop(), FleetHistory(), Metrics()

        def machine(name: str) -> Machine:
            return Machine(
                name,
                history,
                lambda request: lengths[own_id(request.id).partition(HOP)[0]],
                metrics,
                max_running=max_running,
                speculates=speculates,
            )

        machines = Machines(replicas, machine)
        disk = SimulatedDisk(Path(state_dir), history, set())
        gateway = SimulatedGateway(machines, disk, metrics, placer(), mover)
        while len(gateway.fleet.replicas.placer.loads) < replicas:  # noqa: ASYNC110 (the beginning)
            await asyncio.sleep(0.01)
        begun_s, tokens = loop.time(), 0
        submission = gateway.client.submit(workload.requests)
        async for outputs, _ in submission.slices(lambda output: 1, 256):
            tokens += sum(len(output.token_ids) for output in outputs)
        assert tokens == sum(lengths.values())
        seconds = loop.time() - begun_s
        engines = [machine.engine for machine in machines.values()]
        free_s = sum(engine.free_s(loop.time()) for engine in engines)
        return RolloutFigures(
            seconds,
            tokens,
            sum(engine.read_again for engine in engines),
            sum(member.moves for member in gateway.fleet.members.values()),
            free_s / (seconds * replicas),
        )

    lengths = workload.lengths
    with TemporaryDirectory(prefix="tlt-fleet-") as state_dir:
        return simulate(run(state_dir))


def policies(
    workload: LongTail, replicas: int, slower: Sequence[float]
) -> dict[str, Callable[[], RolloutFigures]]:
    """Return the simulations of this workload by the name of the policy. `slower`: the bounds of
    consolidation.
    """
    run = partial(simulated, workload, replicas)
    found: dict[str, Callable[[], RolloutFigures]] = {
        HASH: partial(run, partial(Guided, hashed)),
        TOGETHER: partial(run, partial(Guided, together)),
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
    ways = [partial(clairvoyant, count, each) for count in sorted(few) for each in (4, 6)]
    return min(simulated(ordered, replicas, partial(Guided, way, workload.lengths)) for way in ways)
