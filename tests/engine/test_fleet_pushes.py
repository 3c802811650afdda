"""Pushes to a fleet whose replicas have real engines: what these report is what the fleet compares
and records.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from tests.engine.adapters import write_adapter
from tests.engine.pushing import Pushable, cpu_settings, perturbed
from tests.engine.tiny import SMALLEST, write_eagle, write_target
from tlt_server.engine.settings import EngineSettings
from tlt_server.frontend.link.fan_out import FanOut
from tlt_server.frontend.link.fleet_file import FleetFile
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.merging import digests
from tlt_server.wire.commands import (
    CommitWeights,
    LookAtWeights,
    Manifest,
    NameWeights,
    PushWeights,
    RollbackWeights,
    TensorEntry,
    UnloadAdapter,
)
from tlt_server.wire.events import WeightReport
from tlt_server.wire.labels import label_of

PARTS = 3
IDS = itertools.count()


class EngineReplica:
    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.name, self.url, self.engine = name, f"http://{name}", Pushable(settings)

    async def ask(self, command: Any) -> Any:
        command = msgspec.structs.replace(command, id=f"f{next(IDS)}")
        self.engine.engine.send(command)
        while command.id not in self.engine.reports:
            self.engine.step()
            await asyncio.sleep(0.001)  # a thread of a push needs the interpreter, too
        return self.engine.reports[command.id]

    told = Member.told


class EngineFleet:
    def __init__(self, root: Path, state_dir: Path) -> None:
        self.root, self.state_dir = root, state_dir
        settings = replace(
            cpu_settings(root / "base", root / "drafter", kv_memory_mb=4, threads=1),
            weight_root=str(root),
            max_loras=2,
            max_lora_rank=8,
        )
        self.all = [EngineReplica(name, settings) for name in "abc"]
        self.lost: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.file = FleetFile(self.state_dir)
        self.fan_out = FanOut(
            lambda: self.all,
            self.file,
            lambda replica, why: self.lost.append(why),
            url="http://gateway",
            commit_s=600.0,
        )

    async def join(self) -> None:
        for replica in self.all:
            await self.fan_out.catch_up(replica)

    async def ask(self, command: Any) -> WeightReport:
        report = await self.fan_out.weights(command)
        assert not self.lost and not report.lagging
        return report

    async def push(self, path: str, version: str = "", **fields: Any) -> WeightReport:
        manifest = Manifest(path=str(self.root / path), version=version, **fields)
        return await self.ask(PushWeights("c", manifest))

    async def check(self, target: str, drafter: str = "initial") -> None:
        """Assert that all replicas have these versions, with the content that is recorded."""
        roles = self.file.record.roles
        assert (roles["target"].version, roles["drafter"].version) == (target, drafter)
        for replica in self.all:
            looked = await replica.ask(LookAtWeights("", checksums=True))
            assert (looked.state.target, looked.state.drafter) == (target, drafter)
            assert digests(looked) == {role: kept.digest for role, kept in roles.items()}
            assert not looked.state.open


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fleet")
    write_target(root / "base", shape=SMALLEST)
    write_eagle(root / "drafter", shape=SMALLEST, draft_vocab=40)
    for seed in (1, 2):
        perturbed(root / "base", root / f"new{seed}", seed)
    perturbed(root / "drafter", root / "new-drafter", 3)
    write_adapter(root / "adapter", root / "base", 1)
    tensors = load_file(root / "new1" / "model.safetensors")
    for part in range(PARTS):
        (root / f"part{part}").mkdir()
        some = {name: tensors[name] for name in sorted(tensors)[part::PARTS]}
        save_file(some, root / f"part{part}" / "model.safetensors")
    return root


@pytest.fixture
def fleet(root: Path, tmp_path: Path) -> EngineFleet:
    return EngineFleet(root, tmp_path)


def told(fleet: EngineFleet, story: Callable[[], Any]) -> None:
    async def main() -> None:
        await fleet.join()
        await story()

    asyncio.run(main())


def test_engines_of_a_fleet_have_one_version(fleet: EngineFleet) -> None:
    async def story() -> None:
        await fleet.check("initial")
        report = await fleet.push("new1", "v1")
        assert (report.result, report.role, report.pause_ms > 0) == ("committed", "target", True)
        await fleet.check("v1")
        assert (await fleet.push("new1", "v1")).result == "unchanged"
        report = await fleet.push(
            "new2", "v2", role="all", drafter_path=str(fleet.root / "new-drafter")
        )
        assert (report.result, report.role) == ("committed", "all")
        await fleet.check("v2", "v2")
        assert (await fleet.ask(RollbackWeights("c"))).result == "rolled_back"
        await fleet.check("v1")
        assert (await fleet.ask(NameWeights("c", "best"))).result == "named"
        await fleet.check("best")
        assert (await fleet.push("new2")).result == "committed"  # named by the content
        await fleet.check(fleet.file.record.roles["target"].version)
        assert (await fleet.ask(RollbackWeights("c", "best"))).result == "rolled_back"
        await fleet.check("best")

    told(fleet, story)


def test_label_of_other_content_at_one_engine_has_one_name(fleet: EngineFleet) -> None:
    async def story() -> None:
        other = fleet.all[1].engine
        assert other.push(fleet.root / "new2", "7", labelled=True).result == "committed"
        assert other.roll_back("initial").result == "rolled_back"
        assert (await fleet.push("new1", "7", labelled=True)).result == "committed"
        version = fleet.file.record.roles["target"].version
        assert label_of(version) == "7" != version
        await fleet.check(version)

    told(fleet, story)


def test_parts_of_a_session_become_live_together(fleet: EngineFleet) -> None:
    async def part(number: int) -> WeightReport:
        path = f"part{number}"
        names = load_file(fleet.root / path / "model.safetensors")
        tensors = [TensorEntry(name=name) for name in names]
        return await fleet.push(path, tensors=tensors, partial=True, commit=False, session="s")

    async def story() -> None:
        assert [(await part(number)).result for number in range(PARTS - 1)] == ["gathering"] * 2
        early = await fleet.ask(CommitWeights("c", session="s"))
        assert early.error is not None and "is not complete: " in early.error[1]
        assert (await part(PARTS - 1)).result == "staged"
        await fleet.ask(LookAtWeights("c"))
        report = await fleet.ask(CommitWeights("c", name="step-1", session="s"))
        assert (report.result, report.version) == ("committed", "step-1")
        await fleet.check("step-1")

    told(fleet, story)


def test_parts_without_a_session_commit_with_the_last(fleet: EngineFleet) -> None:
    async def story() -> None:
        results = []
        for number in range(PARTS):
            names = load_file(fleet.root / f"part{number}" / "model.safetensors")
            tensors = [TensorEntry(name=name) for name in names]
            report = await fleet.push(f"part{number}", "v1", tensors=tensors, partial=True)
            results.append(report.result)
        assert results == ["gathering", "gathering", "committed"]
        await fleet.check("v1")

    told(fleet, story)


def test_adapter_is_live_at_every_engine(fleet: EngineFleet) -> None:
    async def story() -> None:
        report = await fleet.push("adapter", "m1", role="adapter", adapter="math")
        assert (report.result, report.state.adapters) == ("committed", {"math": "m1"})
        tensors = load_file(fleet.root / "adapter" / "adapter_model.safetensors")
        assert len(report.checksums) == len(tensors) > 0
        assert fleet.file.record.adapters["math"].digest == digests(report)["adapter"]
        await fleet.join()
        report = await fleet.ask(UnloadAdapter("c", "math"))
        assert (report.result, report.state.adapters) == ("unloaded", {})

    told(fleet, story)


@pytest.mark.parametrize("recorded", [True, False])
def test_next_gateway_decides_about_staged_weights(fleet: EngineFleet, recorded: bool) -> None:
    async def story() -> None:
        report = await fleet.push("new1", "v1", commit=False)
        assert report.result == "staged"
        if recorded:  # the gateway died before it told the engines
            [(role, digest)] = digests(report).items()
            live = fleet.file.record.roles["target"]
            kept = {role: msgspec.structs.replace(live, version="v1", digest=digest)}
            fleet.file.commit(fleet.file.record.committing(kept))
        fleet.restart()
        await fleet.join()
        await fleet.check("v1" if recorded else "initial")

    told(fleet, story)


def test_file_missing_at_one_engine_changes_none(fleet: EngineFleet) -> None:
    async def story() -> None:
        settings = replace(fleet.all[2].engine.settings, weight_root="")
        fleet.all[2].engine = Pushable(settings)
        await fleet.join()
        report = await fleet.push("new1", "v1")
        assert report.error is not None and report.error[1].startswith("replica c: ")
        await fleet.check("initial")
        assert all(each.engine.look().state.open == {} for each in fleet.all)

    told(fleet, story)
