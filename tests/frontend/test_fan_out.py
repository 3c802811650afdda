"""Commands to a fleet of three replicas: every phase of a push, and every way in which one of them
fails there. A replica here has a transaction like an engine's, and no time passes but the loop's.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.waiting import timed
from tlt_client.channels.checksums import digest
from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    EngineFailed,
    InvalidRequest,
    NotFound,
    PushFailed,
    StorageFailed,
    TltError,
    Unavailable,
    WeightsRefused,
)
from tlt_server.frontend.link.fan_out import FanOut
from tlt_server.frontend.link.fleet_file import Committed, FleetFile
from tlt_server.frontend.link.members import Member
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    HandOver,
    JoinGroup,
    LeaveGroup,
    LookAtWeights,
    Manifest,
    NameWeights,
    Pause,
    PushWeights,
    ReadWeights,
    Resume,
    RollbackWeights,
    SetPolicy,
    Sleep,
    TensorEntry,
    UnloadAdapter,
    WakeUp,
)
from tlt_server.wire.events import ControlReport, WeightReport, WeightState

FAILS = ("refuses", "differs", "dies", "is silent")
COMMIT_S = 5.0


def sums(content: str) -> dict[str, str]:
    return {"w": f"mix64:{content}"}


def kept(version: str, content: str = "") -> Committed:
    return Committed(version, digest(sums(content or version)))


class FakeReplica:
    """The weights of a replica. `faults`: command -> how it fails when it comes next."""

    def __init__(self, name: str) -> None:
        self.name, self.url = name, f"http://{name}"
        self.live = {"target": ("v0", "v0")}  # role -> version and content
        self.previous: dict[str, tuple[str, str]] = {}
        self.staged: tuple[Manifest, tuple[str, str]] | None = None
        self.adapters: dict[str, str] = {}
        self.groups: dict[str, int] = {}  # joined group -> rank
        self.faults: dict[type, str] = {}
        self.got: list[Any] = []
        self.peers: dict[str, FakeReplica] = {}  # by their addresses
        self.released = asyncio.Event()  # ends a drain
        self.alive = True

    async def ask(self, command: Any) -> Any:
        if not self.alive:
            raise EngineFailed(f"{self.name} is gone")
        command = replace(command, id=f"g{len(self.got)}")
        self.got.append(command)
        fault = self.faults.pop(type(command), "")
        match fault:
            case "refuses":
                return self._refusal(command, StorageFailed("no room"))
            case "dies":
                await asyncio.sleep(0)
                self.die()
                raise EngineFailed(f"{self.name} has died")
            case "is silent":
                await asyncio.Event().wait()
            case "differs":
                return self._done(command, "!")
            case "waits":
                await self.released.wait()
            case "works on":
                await asyncio.sleep(100 * COMMIT_S)
        try:
            return self._done(command)
        except TltError as error:
            return self._refusal(command, error)

    told = Member.told

    def die(self) -> None:
        self.alive, self.staged, self.groups = False, None, {}

    def _refusal(self, command: Any, error: TltError) -> Any:
        told = (error.code, error.message)
        if isinstance(command, Pause | Resume | Sleep | WakeUp | SetPolicy):
            return ControlReport(command.id, told)
        return self._report(command, error.code, error=told)

    def _report(self, command: Any, result: str, **fields: Any) -> WeightReport:
        staged = self.staged
        state = WeightState(
            target=self.live["target"][0],
            drafter=self.live.get("drafter", ("",))[0],
            previous={role: version for role, (version, _) in self.previous.items()},
            open={"version": staged[1][0], "role": staged[0].role, "state": "staged"}
            if staged
            else {},
            groups=[*self.groups],
            adapters=dict(self.adapters),
        )
        return WeightReport(id=command.id, state=state, result=result, **fields)

    def _made(self, command: Any, result: str, version: str, role: str, content: str) -> Any:
        found = sums(content)
        if role == "all":
            found |= {"draft.w": f"mix64:{content}"}
        return self._report(command, result, version=version, role=role, checksums=found)

    def _done(self, command: Any, odd: str = "") -> Any:
        match command:
            case PushWeights(_, manifest):
                return self._push(command, manifest, odd)
            case CommitWeights(_, version, name):
                return self._commit(command, version, name, odd)
            case AbortWeights(_, version):
                if self.staged is None or version not in ("", self.staged[0].version):
                    raise NotFound("there is no push in progress")
                self.staged = None
                return self._report(command, "aborted")
            case RollbackWeights(_, to, _, role):
                role = role or "target"
                if self.previous.get(role, ("",))[0] != to:
                    raise Conflict(f"{self.name} keeps no {to}")
                self.live[role] = self.previous.pop(role)
                return self._made(command, "rolled_back", to, role, self.live[role][1] + odd)
            case NameWeights(_, version):
                self.live["target"] = (version + odd, self.live["target"][1])
                return self._report(command, "named", version=version + odd, role="target")
            case UnloadAdapter(_, name):
                if self.adapters.pop(name, None) is None:
                    raise NotFound(f"{name} is not loaded")
                return self._report(command, "unloaded", role="adapter")
        return self._answer(command)

    def _answer(self, command: Any) -> Any:
        """Answer what changes no weights."""
        match command:
            case LookAtWeights(_, checksums):
                both = {"w": "target", "draft.w": "drafter"}
                found = {
                    name: sums(self.live[role][1])["w"]
                    for name, role in both.items()
                    if checksums and role in self.live
                }
                role = "all" if "drafter" in self.live else "target"
                version = self.live["target"][0]
                return self._report(command, "looked", checksums=found, role=role, version=version)
            case ReadWeights():
                return self._report(command, "looked", values=b"1234", shape=[1])
            case JoinGroup(_, name, _, _, _, rank):
                self.groups[name] = rank
                return self._report(command, "joined")
            case LeaveGroup(_, name):
                self.groups.pop(name, None)
                return self._report(command, "left")
        return ControlReport(command.id)

    def _push(self, command: Any, manifest: Manifest, odd: str) -> Any:
        if manifest.group and manifest.group not in self.groups:
            raise Conflict(f"group {manifest.group} is not joined")
        if self.staged is not None and not manifest.partial:
            raise Conflict(f"{self.staged[1][0]} is being pushed")
        content = manifest.version
        if manifest.channel == "peer" and {*manifest.path.split()} <= self.peers.keys():
            found = [self.peers[url].live[manifest.role] for url in manifest.path.split()]
            found = [each for each in found if each[0] == manifest.version]
            if not found:
                raise ChannelBroken(f"no server gave {manifest.version}")
            content = found[0][1]
            if manifest.digest not in ("", digest(sums(content))):
                raise WeightsRefused(f"{manifest.version} has other content")
        if self.live.get(manifest.role) == (manifest.version, content):
            return self._made(command, "unchanged", manifest.version, manifest.role, content)
        self.staged = manifest, (manifest.version, content + odd)
        if manifest.partial and manifest.tensors:
            return self._report(command, "gathering")
        if manifest.commit:
            return self._commit(command, manifest.version, "", "")
        return self._made(command, "staged", manifest.version, manifest.role, content + odd)

    def _commit(self, command: Any, version: str, name: str, odd: str) -> Any:
        if self.staged is None:
            if version and version in {version for version, _ in self.live.values()}:
                return self._made(command, "unchanged", version, "target", self.live["target"][1])
            raise NotFound(f"there is no push of {version}")
        manifest, (staged, content) = self.staged
        assert version in ("", staged)
        self.staged, made = None, ((name or staged) + odd, content)
        if manifest.role == "adapter":
            self.adapters[manifest.adapter] = made[0]
        for role in manifest.roles:
            if role != "adapter":
                self.previous[role] = self.live.get(role, ("", ""))
                self.live[role] = made
        return self._made(command, "committed", made[0], manifest.role, content)


class Fleet:
    """Three replicas, the gateway's record, and what the gateway was told."""

    def __init__(self, state_dir: Path, **given: Any) -> None:
        self.all = [FakeReplica(name) for name in "abc"]
        for replica in self.all:
            replica.peers = {each.url: each for each in self.all}
        self.a, self.b, self.c = self.all
        self.used = [*self.all]
        self.lost: dict[str, str] = {}
        self.state_dir = state_dir
        self.restart(**given)

    def restart(self, **given: Any) -> None:
        self.file = FleetFile(self.state_dir)
        self.fan_out = FanOut(
            lambda: [each for each in self.used if each.alive],
            self.file,
            self._lose,
            **{"url": "http://gateway", "key": "k", "commit_s": COMMIT_S, **given},
        )

    def _lose(self, replica: FakeReplica, why: str) -> None:
        assert replica.name not in self.lost
        self.lost[replica.name] = why
        self.used.remove(replica)

    async def start(self) -> Fleet:
        for replica in self.all:
            await self.fan_out.catch_up(replica)
        return self

    async def push(self, version: str = "v1", **fields: Any) -> WeightReport:
        return await self.fan_out.weights(PushWeights("c", Manifest(version=version, **fields)))

    async def heal(self) -> None:
        """Bring every replica back, as a gateway does."""
        for replica in self.all:
            if replica not in self.used or not replica.alive:
                replica.alive = True
                await self.fan_out.catch_up(replica)
        self.used, self.lost = [*self.all], {}

    @property
    def versions(self) -> list[str]:
        return [replica.live["target"][0] for replica in self.all]

    def got(self, kind: type) -> list[list[Any]]:
        return [[each for each in replica.got if isinstance(each, kind)] for replica in self.all]


def in_fleet(**given: Any) -> Callable[..., Any]:
    """Run a test that is a coroutine with a fleet that has started, on the loop's own clock."""

    def decorated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def run(tmp_path: Path, **asked: Any) -> None:
            async def main() -> None:
                await test(await Fleet(tmp_path, **given).start(), **asked)

            timed(main())

        names = [each for each in inspect.signature(test).parameters if each != "fleet"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, keyword) for name in ("tmp_path", *names)]
        )
        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorated


# -- pushes ----------------------------------------------------------------------------------------


@in_fleet()
async def test_push_is_staged_by_all_before_any_commits(fleet: Fleet) -> None:
    seen: list[tuple[str, Committed]] = []
    for replica in fleet.all:
        ask = replica.ask

        async def watched(command: Any, ask: Any = ask) -> Any:
            staged = [each.staged is not None for each in fleet.all]
            if isinstance(command, CommitWeights) and not seen:
                assert staged == [True] * 3 and fleet.fan_out.committing.locked()
                seen.append(("commit", fleet.file.record.roles["target"]))
            return await ask(command)

        replica.ask = watched  # type: ignore[method-assign]
    report = await fleet.push()
    assert seen == [("commit", kept("v1"))]
    assert (report.id, report.result, report.version, report.lagging) == (
        "c",
        "committed",
        "v1",
        {},
    )
    assert fleet.versions == ["v1"] * 3 and report.state.target == "v1"
    assert not fleet.lost and not fleet.fan_out.committing.locked()
    assert fleet.file.record.previous == {"target": kept("v0")}


@pytest.mark.parametrize("fault", FAILS)
@pytest.mark.parametrize("which", range(3))
@in_fleet()
async def test_fault_at_staging_changes_no_replica(fleet: Fleet, which: int, fault: str) -> None:
    before, bad = fleet.file.record, fleet.all[which]
    bad.faults = {PushWeights: fault}
    pushing = asyncio.create_task(fleet.push())
    if fault == "is silent":  # until its link ends
        await asyncio.sleep(1000)
        assert not pushing.done() and fleet.versions == ["v0"] * 3
        pushing.cancel()
        return
    report = await pushing
    if fault == "dies":  # it catches up once it is back
        assert report.result == "committed" and report.lagging == {}
        assert [*fleet.versions[:which], *fleet.versions[which + 1 :]] == ["v1", "v1"]
        await fleet.heal()
        assert fleet.versions == ["v1"] * 3
        return
    assert report.error is not None and fleet.versions == ["v0"] * 3
    odd = "a" if fault == "refuses" else "b"
    named = bad.name if fault == "refuses" or which else odd
    assert report.error[1].startswith(f"replica {named}: ")
    assert [each.staged for each in fleet.all] == [None] * 3 and not fleet.lost
    assert fleet.file.record == before
    assert (await fleet.push("v2")).result == "committed"


@pytest.mark.parametrize("fault", FAILS)
@pytest.mark.parametrize("which", range(3))
@in_fleet()
async def test_fault_at_the_commit_loses_one_replica(fleet: Fleet, which: int, fault: str) -> None:
    bad = fleet.all[which]
    bad.faults = {CommitWeights: fault}
    report = await fleet.push()
    assert (report.result, report.version, report.error) == ("committed", "v1", None)
    assert [*report.lagging] == [*fleet.lost] == [bad.name]
    assert fleet.file.record.roles["target"] == kept("v1")
    await fleet.heal()
    assert fleet.versions == ["v1"] * 3


@pytest.mark.parametrize("fault", ["refuses", "dies", "is silent"])
@in_fleet()
async def test_fault_of_all_at_the_commit(fleet: Fleet, fault: str) -> None:
    before = fleet.file.record
    for replica in fleet.all:
        replica.faults = {CommitWeights: fault}
    if fault == "refuses":
        report = await fleet.push()
        assert report.error == ("storage_failed", "replica a: no room")
        assert fleet.file.record == before and not fleet.lost
        assert [each.staged for each in fleet.all] == [None] * 3
    else:  # they may have done it
        with pytest.raises(EngineFailed, match="replica a: "):
            await fleet.push()
        assert fleet.file.record.roles["target"] == kept("v1")
        assert [*fleet.lost] == ["a", "b", "c"]


@in_fleet()
async def test_lost_replica_may_have_committed_what_others_refuse(fleet: Fleet) -> None:
    for replica, fault in zip(fleet.all, ("refuses", "refuses", "dies"), strict=True):
        replica.faults = {CommitWeights: fault}
    with pytest.raises(EngineFailed, match="replica c: "):
        await fleet.push()
    assert fleet.file.record.roles["target"] == kept("v1") and [*fleet.lost] == ["a", "b", "c"]


@in_fleet()
async def test_late_transfer_is_aborted_after_a_refusal(fleet: Fleet) -> None:
    fleet.a.faults, fleet.b.faults = {PushWeights: "works on"}, {PushWeights: "refuses"}
    report = await fleet.push()
    assert report.error == ("storage_failed", "replica b: no room")
    assert asyncio.get_running_loop().time() < 3 * COMMIT_S
    assert [len(aborts) for aborts in fleet.got(AbortWeights)] == [1, 0, 1]


@in_fleet()
async def test_abort_leaves_another_push_of_a_silent_replica(fleet: Fleet) -> None:
    fleet.a.staged = another = Manifest(version="v7"), ("v7", "v7")
    fleet.a.faults, fleet.b.faults = {PushWeights: "works on"}, {PushWeights: "refuses"}
    await fleet.push()
    assert [each.staged for each in fleet.all] == [another, None, None]
    assert len(fleet.got(AbortWeights)[0]) == 1


@in_fleet()
async def test_refused_push_leaves_another_staged(fleet: Fleet) -> None:
    assert (await fleet.push("v1", commit=False)).result == "staged"
    report = await fleet.push("v2")
    assert report.error == ("conflict", "replica a: v1 is being pushed")
    assert fleet.versions == ["v0"] * 3 and fleet.got(AbortWeights) == [[], [], []]
    assert (await fleet.fan_out.weights(CommitWeights("d", "v1"))).result == "committed"
    assert fleet.versions == ["v1"] * 3 and fleet.file.record.roles["target"] == kept("v1")
    again = await fleet.fan_out.weights(CommitWeights("e", "v1"))
    assert (again.result, again.error) == ("unchanged", None)


@in_fleet()
async def test_repeated_push_is_unchanged(fleet: Fleet) -> None:
    await fleet.push()
    record = fleet.file.record
    assert (await fleet.push()).result == "unchanged"
    assert fleet.file.record == record and not any(map(len, fleet.got(AbortWeights)))


@in_fleet()
async def test_replica_with_the_version_needs_no_commit(fleet: Fleet) -> None:
    fleet.b.live["target"] = ("v1", "v1")
    report = await fleet.push()
    assert (report.result, report.lagging) == ("committed", {})
    assert [len(commits) for commits in fleet.got(CommitWeights)] == [1, 0, 1]


@in_fleet()
async def test_replica_that_joins_during_a_push_catches_up(fleet: Fleet) -> None:
    fleet.used.remove(fleet.c)
    fleet.a.faults = {PushWeights: "waits"}
    pushing = asyncio.create_task(fleet.push())
    await asyncio.sleep(1)
    await fleet.fan_out.catch_up(fleet.c)
    fleet.used.append(fleet.c)
    fleet.a.released.set()
    assert (await pushing).lagging == {"c": "it has joined meanwhile"} == fleet.lost
    await fleet.heal()
    assert fleet.versions == ["v1"] * 3


@in_fleet()
async def test_full_disk_of_the_gateway_aborts_the_push(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(record: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(fleet.file, "commit", full)
        with pytest.raises(PushFailed, match="cannot be recorded .*no room.* make room"):
            await fleet.push()
    assert fleet.versions == ["v0"] * 3 and [each.staged for each in fleet.all] == [None] * 3
    assert (await fleet.push()).result == "committed"


@in_fleet()
async def test_drain_may_take_longer_than_a_commit(fleet: Fleet) -> None:
    fleet.b.faults = {CommitWeights: "waits"}
    pushing = asyncio.create_task(fleet.push(in_flight="drain"))
    await asyncio.sleep(100 * COMMIT_S)
    assert fleet.fan_out.committing.locked() and not pushing.done()
    with pytest.raises(Conflict, match="is being committed at all replicas"):
        await fleet.fan_out.weights(AbortWeights("d"))
    looked = await fleet.fan_out.weights(LookAtWeights("e"))
    assert looked.error is None
    later = asyncio.create_task(fleet.push("v2"))
    fleet.b.released.set()
    assert ((await pushing).result, (await later).result) == ("committed", "committed")
    assert fleet.versions == ["v2"] * 3 and not fleet.lost


@in_fleet(halted=lambda: True)
async def test_drain_is_refused_while_paused(fleet: Fleet) -> None:
    for command in (
        PushWeights("c", Manifest(version="v1", in_flight="drain")),
        RollbackWeights("c", "v0", "drain"),
    ):
        with pytest.raises(Conflict, match="in_flight is drain, .* resume it first"):
            await fleet.fan_out.weights(command)
    assert fleet.got(PushWeights) == fleet.got(RollbackWeights) == [[], [], []]
    assert (await fleet.push()).result == "committed"


@in_fleet()
async def test_http_pushes_are_taken_from_the_gateway(fleet: Fleet) -> None:
    await fleet.push(channel="http", path="upload-1")
    [[one], [other], [third]] = fleet.got(PushWeights)
    pushed = one.manifest
    assert (pushed.channel, pushed.path, pushed.key) == ("peer", "http://gateway", "k")
    assert one.manifest == other.manifest == third.manifest
    with pytest.raises(InvalidRequest, match="channel is ipc, .* push by disk, http or broadcast"):
        await fleet.push("v2", channel="ipc", path="socket")


@in_fleet(url="http://127.0.0.1:8000")
async def test_parts_at_a_loopback_gateway_need_local_replicas(fleet: Fleet) -> None:
    fleet.b.url = "http://10.0.0.3:8000"
    fleet.a.url = fleet.c.url = "http://127.0.0.1:9000"
    with pytest.raises(InvalidRequest, match="replica on 10.0.0.3 cannot .* start it with --host"):
        await fleet.push(channel="http", path="upload-1")
    assert fleet.got(PushWeights) == [[], [], []]
    fleet.used.remove(fleet.b)
    await fleet.push(channel="http", path="upload-1", commit=False)
    assert [len(each) for each in fleet.got(PushWeights)] == [1, 0, 1]


@in_fleet()
async def test_parts_and_sessions_commit_together(fleet: Fleet) -> None:
    part = Manifest(partial=True, session="s", version="7", labelled=True, commit=False)
    first = replace(part, tensors=[TensorEntry(name="w")])
    gathered = await fleet.fan_out.weights(PushWeights("c", first))
    assert gathered.result == "gathering" and fleet.versions == ["v0"] * 3
    fleet.b.faults = {PushWeights: "refuses"}
    assert (await fleet.fan_out.weights(PushWeights("d", part))).error is not None
    assert (await fleet.fan_out.weights(PushWeights("e", part))).result == "staged"
    report = await fleet.fan_out.weights(CommitWeights("f", name="step-7", session="s"))
    assert (report.result, report.version, report.lagging) == ("committed", "step-7", {})
    assert fleet.versions == ["step-7"] * 3
    assert fleet.file.record.roles["target"] == Committed("step-7", kept("7").digest, "7")
    repeated = await fleet.fan_out.weights(CommitWeights("g", "step-7", session="s"))
    assert repeated.result == "unchanged"
    assert (await fleet.fan_out.weights(CommitWeights("h", "other"))).error is not None


# -- groups ----------------------------------------------------------------------------------------

GROUP = JoinGroup("c", "g", "gloo", "127.0.0.1", 29500, 2, 6)


@in_fleet()
async def test_replicas_join_a_group_with_ranks_in_order(fleet: Fleet) -> None:
    report = await fleet.fan_out.weights(GROUP)
    assert [each.groups for each in fleet.all] == [{"g": 2}, {"g": 3}, {"g": 4}]
    assert {each.world_size for [each] in fleet.got(JoinGroup)} == {6}
    assert (report.result, report.state.groups) == ("joined", ["g"])
    with pytest.raises(InvalidRequest, match="rank_offset is 2 and world_size 4, and 3 replicas"):
        await fleet.fan_out.weights(replace(GROUP, world_size=4))
    assert (await fleet.push(channel="broadcast", group="g")).result == "committed"
    left = await fleet.fan_out.weights(LeaveGroup("c", "g"))
    assert (left.result, left.state.groups) == ("left", [])
    fleet.c.die()  # it is no member any more
    report = await fleet.push("v2", channel="broadcast", group="g")
    assert report.error == ("conflict", "replica a: group g is not joined")


@pytest.mark.parametrize("fault", ["refuses", "dies"])
@in_fleet()
async def test_group_is_joined_by_all_or_none(fleet: Fleet, fault: str) -> None:
    fleet.b.faults = {JoinGroup: fault}
    if fault == "refuses":
        report = await fleet.fan_out.weights(GROUP)
        assert report.error == ("storage_failed", "replica b: no room")
    else:
        with pytest.raises(ChannelBroken, match="replica b: b has died; join group 'g' again"):
            await fleet.fan_out.weights(GROUP)
    assert [each.groups for each in fleet.all] == [{}] * 3


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@in_fleet()
async def test_push_by_a_group_fails_with_one_member(fleet: Fleet, when: str) -> None:
    await fleet.fan_out.weights(GROUP)
    if when == "before":
        fleet.c.die()
    else:
        fleet.c.faults = {PushWeights: "dies"}
    with pytest.raises(ChannelBroken, match="replica c, a member of group 'g', is gone, .*again"):
        await fleet.push(channel="broadcast", group="g")
    assert fleet.versions == ["v0"] * 3 and fleet.file.record.roles["target"] == kept("v0")
    assert [each.staged for each in fleet.all] == [None] * 3
    assert [each.groups for each in fleet.all] == [{}] * 3
    await fleet.fan_out.weights(GROUP)
    assert (await fleet.push(channel="broadcast", group="g")).result == "committed"


@in_fleet()
async def test_replica_outside_the_group_catches_up(fleet: Fleet) -> None:
    fleet.used.remove(fleet.c)
    await fleet.fan_out.weights(GROUP)
    fleet.used.append(fleet.c)
    report = await fleet.push(channel="broadcast", group="g")
    assert report.lagging == {"c": "it has joined meanwhile"}
    await fleet.heal()
    assert fleet.versions == ["v1"] * 3


# -- other changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", *FAILS])
@in_fleet()
async def test_rollback_is_made_by_all(fleet: Fleet, fault: str) -> None:
    await fleet.push()
    fleet.b.faults = {RollbackWeights: fault}
    report = await fleet.fan_out.weights(RollbackWeights("c"))
    assert (report.result, report.version) == ("rolled_back", "v0")
    assert [*report.lagging] == [*fleet.lost] == (["b"] if fault else [])
    await fleet.heal()
    assert fleet.versions == ["v0"] * 3 and fleet.file.record.roles["target"] == kept("v0")
    with pytest.raises(Conflict, match="keeps no version for a rollback"):
        await fleet.fan_out.weights(RollbackWeights("c"))


@in_fleet()
async def test_rollback_refused_by_all_changes_nothing(fleet: Fleet) -> None:
    await fleet.push()
    record = fleet.file.record
    for replica in fleet.all:
        replica.faults = {RollbackWeights: "refuses"}
    assert (await fleet.fan_out.weights(RollbackWeights("c"))).error is not None
    assert fleet.file.record == record and not fleet.lost


@in_fleet()
async def test_rollback_restores_each_model_that_was_pushed(fleet: Fleet) -> None:
    await fleet.push("d1", role="drafter")
    await fleet.push("v2", role="all")
    await fleet.fan_out.weights(RollbackWeights("c"))
    assert [each.live for each in fleet.all] == [
        {"target": ("v0", "v0"), "drafter": ("d1", "d1")}
    ] * 3
    assert fleet.file.record.roles == {"target": kept("v0"), "drafter": kept("d1")}


@pytest.mark.parametrize("fault", ["", *FAILS])
@in_fleet()
async def test_name_is_given_at_all_replicas(fleet: Fleet, fault: str) -> None:
    fleet.b.faults = {NameWeights: fault}
    report = await fleet.fan_out.weights(NameWeights("c", "best"))
    assert report.result == "named"
    await fleet.heal()
    [version] = {*fleet.versions}
    assert fleet.file.record.roles["target"].version == version


@in_fleet()
async def test_taken_label_gets_the_same_name_everywhere(fleet: Fleet) -> None:
    """One replica has other content of that label, so its name has the digest too."""
    apart = "best~0123456789ab"
    ask = fleet.b.ask

    async def renamed(command: Any) -> Any:
        if isinstance(command, NameWeights) and command.version == "best":
            command = replace(command, version=apart)
        return await ask(command)

    fleet.b.ask = renamed  # type: ignore[method-assign]
    report = await fleet.fan_out.weights(NameWeights("c", "best"))
    assert (report.version, [*report.lagging]) == (apart, ["a", "c"])
    await fleet.heal()
    assert fleet.versions == [apart] * 3 == [fleet.file.record.roles["target"].version] * 3


@in_fleet()
async def test_adapter_is_loaded_and_unloaded_by_all(fleet: Fleet) -> None:
    await fleet.push("m1", role="adapter", adapter="math")
    assert [each.adapters for each in fleet.all] == [{"math": "m1"}] * 3
    fleet.b.faults = {UnloadAdapter: "refuses"}
    refused = await fleet.fan_out.weights(UnloadAdapter("c", "math"))
    assert refused.error == ("storage_failed", "replica b: no room")
    report = await fleet.fan_out.weights(UnloadAdapter("c", "math", "abort"))
    assert (report.result, report.error) == ("unloaded", None)
    assert [each.adapters for each in fleet.all] == [{}] * 3 and not fleet.file.record.adapters
    gone = await fleet.fan_out.weights(UnloadAdapter("c", "math"))
    assert gone.error == ("not_found", "replica a: math is not loaded")


@in_fleet()
async def test_questions_are_answered_by_one_or_all(fleet: Fleet) -> None:
    read = await fleet.fan_out.weights(ReadWeights("c", "w", 1))
    assert read.values == b"1234" and [len(each) for each in fleet.got(ReadWeights)] == [1, 0, 0]
    with pytest.raises(Conflict, match="a gateway trains no drafter"):
        await fleet.fan_out.weights(HandOver("c", "d", "e"))
    fleet.c.live["target"] = ("v0", "other")
    looked = await fleet.fan_out.weights(LookAtWeights("c", checksums=True))
    assert looked.error is not None and "replica c: its 'w' has checksum" in looked.error[1]
    fleet.used = []
    for command in (LookAtWeights("c"), PushWeights("c", Manifest()), ReadWeights("c", "w", 1)):
        with pytest.raises(Unavailable, match="no replica of the fleet takes commands"):
            await fleet.fan_out.weights(command)


@pytest.mark.parametrize(
    ("command", "undone"),
    [(Pause("c"), Resume), (Sleep("c", ["weights"]), WakeUp), (Resume("c"), None)],
)
@in_fleet()
async def test_pause_or_sleep_holds_at_all_or_none(fleet: Fleet, command: Any, undone: Any) -> None:
    assert (await fleet.fan_out.control(command)).error is None
    assert [len(each) for each in fleet.got(type(command))] == [1, 1, 1]
    fleet.b.faults = {type(command): "refuses"}
    report = await fleet.fan_out.control(command)
    assert report == ControlReport("c", ("storage_failed", "replica b: no room"))
    if undone is not None:
        assert [len(each) for each in fleet.got(undone)] == [1, 0, 1]
    fleet.b.faults = {type(command): "dies"}
    assert (await fleet.fan_out.control(command)).error is None


# -- restarts of the gateway -----------------------------------------------------------------------


@pytest.mark.parametrize("reached", ["staged", "recorded", "one committed", "all committed"])
@in_fleet()
async def test_killed_gateway_leaves_one_version_everywhere(fleet: Fleet, reached: str) -> None:
    """The next gateway asks each replica as it is found, and the record decides."""
    await fleet.push("v1", commit=False)
    if reached != "staged":
        record = fleet.file.record.committing({"target": kept("v1")})
        fleet.file.commit(record)
    asked = {"one committed": fleet.all[:1], "all committed": fleet.all}.get(reached, [])
    for replica in asked:
        await replica.ask(CommitWeights("x", "v1"))
    fleet.restart()
    fleet.used = []
    for replica in fleet.all:
        await fleet.fan_out.catch_up(replica)
        fleet.used.append(replica)
    version = "v0" if reached == "staged" else "v1"
    assert fleet.versions == [version] * 3 and not any(each.staged for each in fleet.all)
    assert fleet.file.record.epoch == 2 and fleet.file.record.roles["target"] == kept(version)
    fetched = [each for each in itertools.chain(*fleet.got(PushWeights)) if each.manifest.commit]
    assert fetched == []


@in_fleet()
async def test_joiner_fetches_from_the_other_replicas(fleet: Fleet) -> None:
    await fleet.push()
    fleet.c.live, fleet.c.previous = {"target": ("v7", "v7")}, {}
    fleet.a.live["target"] = ("v9", "v9")  # not the fleet's any more
    await fleet.fan_out.catch_up(fleet.c)
    [_, fetched] = fleet.got(PushWeights)[2]
    assert (fetched.manifest.path, fetched.manifest.key) == ("http://a http://b", "k")
    assert fleet.c.live["target"] == ("v1", "v1")


@in_fleet()
async def test_joiner_never_takes_other_content_of_the_version(fleet: Fleet) -> None:
    """One source was overwritten in place, and has the version's name."""
    await fleet.push()
    fleet.c.live, fleet.c.previous = {"target": ("v7", "v7")}, {}
    fleet.a.live["target"] = ("v1", "other")
    with pytest.raises(WeightsRefused, match="v1 has other content"):
        await fleet.fan_out.catch_up(fleet.c)
    assert fleet.c.live["target"] == ("v7", "v7")
    fleet.used.remove(fleet.a)
    await fleet.fan_out.catch_up(fleet.c)
    assert fleet.c.live["target"] == ("v1", "v1")


@in_fleet()
async def test_joiner_without_a_source_does_not_join(fleet: Fleet) -> None:
    await fleet.push()
    fleet.c.live, fleet.c.previous = {"target": ("v7", "v7")}, {}
    fleet.used = [fleet.c]
    with pytest.raises(Conflict, match="no other replica has version 'v1' of the target; start"):
        await fleet.fan_out.catch_up(fleet.c)


@in_fleet()
async def test_joiner_with_other_content_does_not_join(fleet: Fleet) -> None:
    """The version has the name of the fleet's, so only the digest tells."""
    await fleet.push()
    fleet.c.live["target"] = ("v1", "other")
    fleet.c.faults = {PushWeights: "refuses"}
    fleet.used = [fleet.a, fleet.c]
    with pytest.raises(StorageFailed, match="no room"):
        await fleet.fan_out.catch_up(fleet.c)
