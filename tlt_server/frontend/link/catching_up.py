"""The fleet's committed weights that a replica lacks, and the steps that bring it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from msgspec.structs import replace

from tlt_server.errors import Conflict
from tlt_server.frontend.link.fleet_file import Committed, FleetRecord
from tlt_server.frontend.link.merging import digests
from tlt_server.frontend.link.orders import FleetReplica, ReplicaOrders
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    LookAtWeights,
    Manifest,
    NameWeights,
    PushWeights,
    Role,
    RollbackWeights,
    UnloadAdapter,
    WeightCommand,
)
from tlt_server.wire.events import WeightState
from tlt_server.wire.labels import label_of

ROUNDS = 4


class Owed(NamedTuple):
    """A step that brings a replica to the committed weights."""

    do: Literal["abort", "commit", "name", "roll back", "unload", "fetch"]
    role: Literal["target", "drafter", "adapter"] = "target"
    version: str = ""
    adapter: str = ""
    staged: str = ""  # version of the staged push that a commit takes


def owed(record: FleetRecord, state: WeightState, live_digests: Mapping[str, str]) -> list[Owed]:
    """Return the steps that a replica owes, in order; after them it is asked again. `live_digests`:
    by role.

    A staged push is committed if the record has its version, and aborted otherwise. A replaced
    version is restored if it is kept, and anything else is fetched.
    """
    live: dict[Role, str] = {"target": state.target, "drafter": state.drafter}
    staged = state.open.get("version", "") if state.open.get("state") == "staged" else ""
    brings = state.open.get("role", "")
    steps: list[Owed] = []
    for role, version in live.items():
        kept, digest = record.roles.get(role), live_digests.get(role, "")
        if kept is None or (version == kept.version and (kept.same(digest) or not kept.digest)):
            continue
        step = Owed("fetch", role, kept.version)
        if role == "target" and kept.same(digest):
            step = step._replace(do="name")
        elif brings in (role, "all") and _means(staged, kept):
            return [step._replace(do="commit", staged=staged)]
        elif state.previous.get(role) == kept.version:
            step = step._replace(do="roll back")
        steps.append(step)
    for name, kept in record.adapters.items():
        if state.adapters.get(name) != kept.version:
            if brings == "adapter" and _means(staged, kept):
                return [Owed("commit", "adapter", kept.version, name, staged)]
            steps.append(Owed("fetch", "adapter", kept.version, name))
    steps += [
        Owed("unload", "adapter", version, name)
        for name, version in state.adapters.items()
        if name not in record.adapters
    ]
    return [Owed("abort"), *steps] if state.open else steps


def _means(staged: str, kept: Committed) -> bool:
    return bool(staged) and label_of(staged) == label_of(kept.staged or kept.version)


async def caught_up(
    replica: FleetReplica, record: Callable[[], FleetRecord], fetch: Manifest, orders: ReplicaOrders
) -> None:
    """Return once the replica has the committed weights; raise an error if it cannot have them now.
    `fetch`: where it gets those that it lacks.
    """
    for _ in range(ROUNDS):
        looked = await orders.told(replica, LookAtWeights("", checksums=True))
        steps = owed(record(), looked.state, digests(looked))
        if not steps:
            return
        for step in steps:
            await orders.told(replica, _command(step, fetch))
    raise Conflict(f"replica {replica.name} has not caught up in {ROUNDS} rounds: {steps}")


def _command(step: Owed, fetch: Manifest) -> WeightCommand:
    match step:
        case Owed("commit", _, version, _, staged):
            return CommitWeights("", staged, version if version != staged else "")
        case Owed("name"):
            return NameWeights("", step.version)
        case Owed("roll back", "target" | "drafter" as role):
            return RollbackWeights("", step.version, role=role)
        case Owed("unload"):
            return UnloadAdapter("", step.adapter, "abort")
        case Owed("fetch", role, version, adapter):
            if not fetch.path:
                raise Conflict(
                    f"no other replica has version {version!r} of the {role}; start one that has "
                    "it, or the gateway with another --state-dir, and push again"
                )
            named = replace(fetch, role=role, version=version, adapter=adapter)
            return PushWeights("", named)
    return AbortWeights("")
