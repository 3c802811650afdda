"""One drafter for a fleet, which one replica trains on the sequences of all.

`Coordination` decides from the replicas' states, which come by HTTP, as sequences do. Replicas
serve and train without it: their pauses expire, and a drafter that was not pushed to all is pushed
with the next one, or replaced at the replica's next join.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Never

import structlog

from tlt_client import AsyncClient
from tlt_client.channels import PEER
from tlt_client.errors import Conflict as Refusal
from tlt_client.errors import InvalidRequest, Unavailable
from tlt_server.drafter.coordination import (
    AT_WORK,
    Action,
    Coordination,
    GiveSamples,
    LetTrain,
    Seen,
    ShareDrafter,
    StopTraining,
)
from tlt_server.errors import Conflict
from tlt_server.fleet.launchers.plan import FleetPlan
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.weights.session import WeightSession
from tlt_server.wire.commands import Manifest
from tlt_server.wire.training import NO_DATA

INTERVAL_S = 2.0
HOLD_S = 60.0  # for which a replica trains nothing unless it is asked again
LOOK_S, ANSWER_S = 5.0, 20.0  # for the call that looks, and for another one
GATHERED_BYTES = 2**24  # bound on the sequences that a step moves
LIMIT = 256  # sequences of a call

log = structlog.get_logger()


class FleetDrafter:
    def __init__(
        self,
        session: WeightSession,
        fleet: Fleet,
        plan: FleetPlan,
        connect: Callable[..., AsyncClient] = AsyncClient,
    ) -> None:
        """`session`: pushes to all replicas."""
        self.coordination = Coordination()
        self._own, self._session, self._fleet = fleet.client.versions.own, session, fleet
        self._faults, self._plan, self._connect = fleet.client.faults, plan, connect
        self._clients: dict[str, AsyncClient] = {}  # by address
        self._after: dict[tuple[str, str], int] = {}  # (source, taker) -> last number moved
        self._said: dict[str, str] = {}  # what was last logged of a replica

    async def run(self) -> Never:
        try:
            while True:
                await asyncio.sleep(INTERVAL_S)
                with self._faults.containing("the training of a fleet's drafter"):
                    await self.step(time.monotonic())
        finally:
            await self._forget({})

    async def step(self, now_s: float) -> None:
        """Look at the replicas, decide and act once."""
        known = self._fleet.members
        await self._forget(known)
        members = {name: each for name, each in known.items() if each.state == "ready"}
        looking = (self._look(member) for member in members.values())
        looks = await asyncio.gather(*looking, return_exceptions=True)
        found = [look for look in looks if isinstance(look, Seen)]
        for name, look in zip(members, looks, strict=True):
            if isinstance(look, BaseException):
                self._say(name, f"GET /drafter: {type(look).__name__}: {look}")
        actions = self.coordination.decide(found, now_s)
        for each in found:
            self._say(each.name, self.coordination.notes.get(each.name, ""))
        trains = {each.name for each in found if each.trainer in AT_WORK and not each.held}
        for name, member in members.items():
            member.trains = name in trains
        wanted = defaultdict[str, list[Action]](list)
        for action in actions:
            wanted[action.name].append(action)
        await asyncio.gather(*(self._act(own, members) for own in wanted.values()))

    async def _look(self, member: Member) -> Seen:
        async with asyncio.timeout(LOOK_S):
            return seen_of(member.name, member.gauges, await self._client(member).drafter())

    async def _forget(self, known: Mapping[str, Member]) -> None:
        """Drop what concerns replicas that have left the fleet, or another address."""
        self._said = {name: said for name, said in self._said.items() if name in known}
        self._after = {pair: last for pair, last in self._after.items() if known.keys() >= {*pair}}
        for url in self._clients.keys() - {each.url for each in known.values()}:
            await self._clients.pop(url).close()

    async def _act(self, actions: Sequence[Action], members: Mapping[str, Member]) -> None:
        """Carry out the actions for one replica."""
        for action in actions:
            taker = members[action.name]
            try:
                match action:
                    case LetTrain(name, again):
                        moved = await self._gather(taker, members)
                        await self._client(taker).pause_drafter_training(0)
                        with suppress(Refusal):  # a round has begun meanwhile
                            await self._client(taker).train_drafter()
                        if not again:
                            log.info("drafter_training_begins", replica=name, given=moved)
                    case StopTraining(name, reason, again):
                        await self._client(taker).pause_drafter_training(HOLD_S)
                        if not again:
                            log.info("drafter_training_held", replica=name, reason=reason)
                    case GiveSamples():
                        await self._gather(taker, members)
                    case ShareDrafter():
                        await self._share(action, taker)
            except Exception as error:  # a call or a push has failed
                self._say(action.name, f"{type(error).__name__}: {error}")
                if isinstance(action, LetTrain):
                    self.coordination.put_off(action.name)
                if isinstance(action, ShareDrafter) and not isinstance(error, Conflict):
                    self.coordination.refused(action.version)

    async def _share(self, share: ShareDrafter, source: Member) -> None:
        manifest = Manifest(
            role="drafter",
            version=share.version,
            channel=PEER,
            path=source.url,
            key=self._plan.key,
            of=share.target,
        )
        self._own.add(share.version)
        await self._session.adopt(manifest)
        log.info("drafter_shared", version=share.version, source=share.name)

    async def _gather(self, taker: Member, members: Mapping[str, Member]) -> int:
        """Give a replica the sequences that it does not have yet, and return their number."""
        moved, left_bytes, at = 0, GATHERED_BYTES, self._client(taker)
        for source in members.values():
            left, key = 1, (source.name, taker.name)
            while left and left_bytes > 0 and source is not taker:
                after = self._after.get(key, 0)
                try:
                    content, last, left = await self._client(source).drafter_samples(
                        after, limit=LIMIT
                    )
                except (InvalidRequest, Refusal) as error:  # emptied meanwhile, or not in files
                    self._after.pop(key, None)
                    self._say(source.name, str(error))
                    break
                if last == after:
                    break
                left_bytes -= len(content)
                try:
                    moved += int((await at.add_drafter_samples(content))["sequences"])
                except Unavailable:  # it has not read the earlier ones
                    return moved
                except (InvalidRequest, Refusal) as error:
                    self._say(taker.name, str(error))
                self._after[key] = last
        return moved

    def _client(self, member: Member) -> AsyncClient:
        url, plan = member.url, self._plan
        if url not in self._clients:
            self._clients[url] = self._connect(
                url, api_key=plan.key or None, timeout_s=ANSWER_S, tls=plan.tls
            )
        return self._clients[url]

    def _say(self, name: str, reason: str) -> None:
        """Log why a replica does not take part, unless that was the last reason."""
        if reason and self._said.get(name) != reason:
            log.warning("drafter_not_trained", replica=name, reason=reason)
            self._said[name] = reason


def seen_of(name: str, gauges: Mapping[str, float], drafter: Mapping[str, Any]) -> Seen:
    """Return a replica's state from its gauges and its reply to `GET /drafter`."""
    trainer, target = drafter["trainer"] or {}, drafter["target_version"]
    served: Mapping[str, Any] = next(
        (each for each in drafter["drafters"] if each["weight_version"]), {}
    )
    refused = {why: count for why, count in trainer.get("refused", {}).items() if why != NO_DATA}
    load = int(gauges.get("running", 0.0) + gauges.get("waiting", 0.0))
    return Seen(
        name,
        load if drafter["training"] == "idle" else 0,
        trainer.get("state", ""),
        trainer.get("adopted", 0) + sum(refused.values()),
        target,
        served.get("weight_version", ""),
        trained=served.get("trained_for") == target[:64],
        held=trainer.get("pause_left_s") is not None,
        reason=trainer.get("reason", ""),
    )
