"""The table of a fleet: its replicas, and the placer that has those where sequences are placed.

Two servers give the same tokens and log-prob bits if nothing that these depend on differs, so
`differences` compares the descriptions of their engines before a replica is used.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, get_args

import msgspec

from tlt_client.wire import ReplicaState
from tlt_server.errors import NotFound, from_code
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.placing import Placer, ReplicaLoad
from tlt_server.frontend.link.replica import Replica, Replicas
from tlt_server.wire.commands import ControlCommand, SetPolicy, WeightCommand
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.records import Cycle, GenerateRequest

SUMMED_S = 0.25  # time for which the sums of gauges are used
# Gauges that are averaged, by prefix.
MEANS = ("cost_error", "training_slowdown", "outlook_ratio_", "policy_preparing")
Order: TypeAlias = WeightCommand | ControlCommand | SetPolicy


class Member(Replica):
    def __init__(self, address: ReplicaAddress) -> None:
        super().__init__(address.name)
        self.address = address
        self.state: ReplicaState = "joining"
        self.asleep = False  # it has given its memory back; nothing is placed there
        self.fault = ""  # why it was last lost or refused
        self.is_held = False  # by another gateway, for which it refused this one
        self.moves = 0  # sequences that were moved away
        self.drained = False  # an operator wants nothing placed there
        self.leaves = False  # it is drained, and then ends for good
        self.ends = False  # it leaves, and is being ended
        self.trains = False  # it trains the fleet's drafter
        self.busy_s, self.asleep_s = math.inf, -math.inf  # when it was last seen so; see `idling`
        self.load: ReplicaLoad | None = None  # since it has joined
        self.task: asyncio.Task[None] | None = None  # runs the link
        self.joining: asyncio.Task[None] | None = None
        self._asked = itertools.count(1)

    @property
    def sequences(self) -> int:
        """The open sequences that it has, or will get."""
        return self.load.sequences if self.load is not None else 0

    async def ask(self, command: Order) -> Any:
        """Send a command under an id of its own, since a replica may get several at once, and
        return the report.
        """
        of_weights = isinstance(command, get_args(WeightCommand))
        answers: Any = self.weight_answers if of_weights else self.control_answers
        return await answers.ask(msgspec.structs.replace(command, id=f"f{next(self._asked)}"))

    async def told(self, command: Order) -> Any:
        """Return the report, or raise the error in it."""
        report = await self.ask(command)
        if report.error is not None:
            raise from_code(*report.error)
        return report


class FleetReplicas(Replicas):
    """All replicas of a fleet. Iteration yields those where sequences are placed."""

    resume = True

    def __init__(self, share: Callable[[], float], commits: Callable[[], bool]) -> None:
        """`share`: of max_tokens that a sequence is expected to use; 0: unknown. `commits`: nothing
        is placed while it returns True.
        """
        super().__init__()
        self._share, self._commits = share, commits
        self.placer, self.members = Placer(), dict[str, Member]()
        self._sums: dict[str, float] = {}
        self._summed_s = -math.inf

    def __iter__(self) -> Iterator[Member]:
        return (self.members[name] for name in self.placer.loads)

    @property
    def pushed_to(self) -> list[Member]:
        """The replicas that every order goes to. Those that sleep are woken before, except by a
        look at their versions.
        """
        return [each for each in self.members.values() if each.state in ("ready", "draining")]

    @property
    def count(self) -> int:
        return sum(each.load is not None for each in self.members.values())

    @property
    def asleep(self) -> list[Member]:
        return [each for each in self.members.values() if each.asleep]

    def member(self, name: str) -> Member:
        member = self.members.get(name)
        if member is None:
            known = ", ".join(sorted(self.members)) or "none"
            raise NotFound(f"there is no replica {name!r}; the fleet has {known}")
        return member

    def place(
        self, request: GenerateRequest, tokens: int = 0, at: Replica | None = None
    ) -> Member | None:
        if self._commits():
            return None
        among = {at.name} if at is not None and at.name in self.placer.loads else None
        name = self.placer.place(request, tokens, self._share(), among)
        return self.members[name] if name is not None else None

    def took(self, id: str, tokens: int) -> None:
        self.placer.took(id, tokens)

    def ended(self, id: str) -> None:
        self.placer.ended(id)

    def together(self, cycle: Cycle) -> Cycle:
        """Return a step of all replicas, if their steps are like this one."""
        count = max(1, len(self.placer.loads))
        decoding = cycle.context.decoding * count
        return msgspec.structs.replace(
            cycle,
            step_s=cycle.step_s / count,
            context=msgspec.structs.replace(cycle.context, decoding=decoding),
        )

    def gauges(self) -> dict[str, float]:
        """Return the replicas' gauges together: shares and ratios as their mean, others added."""
        now_s = time.monotonic()
        if now_s >= self._summed_s + SUMMED_S:
            self._summed_s, self._sums = now_s, {}
            for replica in self:
                for name, value in replica.gauges.items():
                    part = value / len(self.placer.loads) if name.startswith(MEANS) else value
                    self._sums[name] = self._sums.get(name, 0.0) + part
        return self._sums


def differences(mine: EngineInfo, other: EngineInfo) -> str:
    """Return the first difference that keeps the replica `other` out of the fleet of `mine`, with
    both values; empty if it may join. Comparing a replica with itself checks what no fleet takes.
    """
    if not other.numerics.startswith("strict"):
        return f"numerics is {other.numerics!r}; a fleet needs replicas with --numerics strict"
    if not other.stages:
        return "weight_staging is 'none'; a fleet needs replicas that stage what is pushed"
    if mine.model != other.model:
        return _differ("model", mine.model, other.model)
    if found := mine.fingerprint.difference(other.fingerprint):
        return f"fingerprint: {found}"
    for name in sorted(mine.libraries.keys() | other.libraries.keys()):
        ours, theirs = mine.libraries.get(name, "missing"), other.libraries.get(name, "missing")
        if ours != theirs:
            return f"{_differ(name, ours, theirs)}; install the same versions"
    for name in ("vocab_size", "eos_token_ids", "max_model_len"):
        if getattr(mine, name) != getattr(other, name):
            return _differ(name, getattr(mine, name), getattr(other, name))
    ours, theirs = mine.gpu.partition(",")[0], other.gpu.partition(",")[0]  # without its memory
    return _differ("gpu", ours, theirs) if ours != theirs else ""


def _differ(name: str, mine: object, other: object) -> str:
    return f"{name} is {mine!r} here and {other!r} there"


def together(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Describe the replicas of a fleet, at least one, as one engine."""
    adapters = set.intersection(*({*info.adapters.items()} for info in infos))
    return msgspec.structs.replace(
        infos[0],
        pages=sum(info.pages for info in infos),
        max_running=sum(info.max_running for info in infos),
        adapters=dict(sorted(adapters)),
        phases={},
        pid=0,
        rank_pids=[],
    )
