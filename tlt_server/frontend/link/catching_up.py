"""The fleet's committed weights that a replica lacks, and the steps that bring it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from tlt_server.errors import Conflict
from tlt_server.frontend.link.fleet_file import Committed, FleetRecord
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.merging import digests
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


def owed(
    record: FleetRecord, state: WeightState, live_digests: Mapping[str, str], fetch: Manifest
) -> list[WeightCommand]:
    """Return the commands that bring a replica to the committed weights, in order and without ids;
    after them it is asked again. `live_digests`: by role.

    A staged push is committed if the record has its version, and aborted otherwise. A replaced
    version is restored if it is kept, and anything else is pushed as `fetch`.
    """
    live: dict[Role, str] = {"target": state.target, "drafter": state.drafter}
    staged = state.open.get("version", "") if state.open.get("state") == "staged" else ""
    brings = state.open.get("role", "")
    steps: list[WeightCommand] = []
    for role, version in live.items():
        kept, digest = record.roles.get(role), live_digests.get(role, "")
        if kept is None or not version:  # a replica without the fleet's drafter drafts with none
            continue
        if version == kept.version and (kept.same(digest) or not kept.digest):
            continue
        if role == "target" and kept.same(digest):
            steps.append(NameWeights("", kept.version))
        elif brings in (role, "all") and _means(staged, kept):
            return [_commit(staged, kept)]
        elif state.previous.get(role) == kept.version:
            steps.append(RollbackWeights("", kept.version, role=role))
        else:
            wanted = replace(fetch, role=role, version=kept.version, digest=kept.digest)
            steps.append(PushWeights("", wanted))
    for name, kept in record.adapters.items():
        if state.adapters.get(name) != kept.version:
            if brings == "adapter" and _means(staged, kept):
                return [_commit(staged, kept)]
            wanted = replace(fetch, role="adapter", version=kept.version, digest=kept.digest)
            steps.append(PushWeights("", replace(wanted, adapter=name)))
    unknown = [name for name in state.adapters if name not in record.adapters]
    steps += [UnloadAdapter("", name, "abort") for name in unknown]
    return [AbortWeights(""), *steps] if state.open else steps


def _means(staged: str, kept: Committed) -> bool:
    return bool(staged) and label_of(staged) == label_of(kept.staged or kept.version)


def _commit(staged: str, kept: Committed) -> CommitWeights:
    return CommitWeights("", staged, kept.version if kept.version != staged else "")


async def caught_up(replica: Member, record: Callable[[], FleetRecord], fetch: Manifest) -> None:
    """Return once the replica has the committed weights; raise an error if it cannot have them now.
    `fetch`: where it gets those that it lacks.
    """
    for _ in range(ROUNDS):
        looked = await replica.told(LookAtWeights("", checksums=True))
        steps = owed(record(), looked.state, digests(looked), fetch)
        if not steps:
            return
        for step in steps:
            if isinstance(step, PushWeights) and not fetch.path:
                raise Conflict(
                    f"no other replica has version {step.manifest.version!r} of the "
                    f"{step.manifest.role}; start one that has it, or the gateway with another "
                    "--state-dir, and push again"
                )
            await replica.told(step)
    raise Conflict(f"replica {replica.name} has not caught up in {ROUNDS} rounds: {steps}")
