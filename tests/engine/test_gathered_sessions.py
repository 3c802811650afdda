"""Staged, named and session pushes in parts: a commit takes them and an abort ends them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tests.engine.gathered import PARTS, engine, live_as, part, results, root, settings
from tests.engine.pushing import Pushable, small_request, why
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    JoinGroup,
    NameWeights,
    RollbackWeights,
    Sleep,
    WeightCommand,
)
from tlt_server.wire.events import WeightReport

__all__ = ["engine", "root", "settings"]  # fixtures


def test_incomplete_push_is_aborted_but_not_committed(engine: Pushable, root: Path) -> None:
    assert results(engine, root, "new1", range(2), version="v1", commit=False) == ["gathering"] * 2
    refused = engine.commit("v1")
    assert refused.result == "conflict"
    assert "tensors are missing, among them 'model." in why(refused)
    whole = engine.push(root / "new2", "v2")
    assert whole.result == "conflict" and "'v1' is being pushed" in why(whole)
    assert engine.abort("v1").result == "aborted"
    assert engine.push(root / "new2", "v2").result == "committed"


def test_target_then_drafter_are_committed_together(engine: Pushable, root: Path) -> None:
    before = engine.checksums()
    assert results(engine, root, "new1", version="v", commit=False) == [
        "gathering",
        "gathering",
        "staged",
    ]
    assert results(engine, root, "new-drafter", version="v", commit=False, role="drafter") == [
        "gathering",
        "gathering",
        "staged",
    ]
    assert engine.checksums() == before
    done = engine.commit("v")
    assert (done.result, done.role, done.state.target, done.state.drafter) == (
        "committed",
        "all",
        "v",
        "v",
    )
    after = engine.checksums()
    assert all(after[name] != before[name] for name in ("model.norm.weight", "draft.fc.weight"))


def test_waiting_commit_never_commits_a_later_push(
    settings: EngineSettings, engine: Pushable, root: Path
) -> None:
    """Another push in its place would be committed and answered as this one."""
    fields = {"version": "v", "commit": False, "in_flight": "drain"}
    assert results(engine, root, "new1", **fields)[-1] == "staged"
    engine.submit(small_request(32))
    engine.step(3)
    engine.engine.send(CommitWeights("commit", "v", "named"))
    engine.step()
    assert "commit" not in engine.reports and not engine.engine.idle, "it waits for what runs"
    assert [part(engine, root, "new2", number, **fields).result for number in range(PARTS)] == [
        "conflict"
    ] * 3
    done = engine.report("commit")
    assert (done.result, done.version) == ("committed", "named")
    assert engine.checksums() == live_as(settings, root / "new1")
    assert engine.engine.pushes.transaction.push is None


def test_a_session_commits_and_ends_its_own_push_only(engine: Pushable, root: Path) -> None:
    def asked(command: WeightCommand) -> WeightReport:
        engine.engine.send(command)
        return engine.report(command.id)

    assert part(engine, root, "new1", 0, session="s7", commit=False).result == "gathering"
    assert (
        asked(AbortWeights("a1", session="s8")).result
        == asked(CommitWeights("c1", session="s8")).result
        == "not_found"
    )
    assert asked(AbortWeights("a2", session="s7")).result == "aborted"
    assert results(engine, root, "new1", session="s8", commit=False)[-1] == "staged"
    done = asked(CommitWeights("c2", name="8", session="s8"))
    assert (done.result, done.version) == ("committed", "8")


def test_push_without_a_version_name_is_reported_and_abortable(
    engine: Pushable, root: Path
) -> None:
    assert part(engine, root, "new1", 0).result == "gathering"
    engine.engine.send(RollbackWeights("r"))
    refused = engine.report("r")
    assert why(refused).startswith("conflict: a version without a name is being pushed; wait")
    assert engine.abort("").result == "aborted" and engine.abort("").result == "not_found"
    ended = "the push of a version without a name was aborted; nothing has changed"
    assert why(engine.report("")).endswith(f": {ended}")


def test_naming_requires_the_expected_live_version(engine: Pushable, root: Path) -> None:
    before = engine.info.weight_version
    assert results(engine, root, "new1", version="v1")[-1] == "committed"
    assert engine.roll_back().result == "rolled_back"
    for id, of, result in (
        ("n1", "v1", "conflict"),
        ("n2", before, "named"),
        ("n3", before, "unchanged"),
    ):
        engine.engine.send(NameWeights(id, "8", of))
        assert engine.report(id).result == result


def test_group_join_during_weight_sleep_succeeds_or_says_why(engine: Pushable) -> None:
    engine.engine.pushes.transaction.options.intake.groups.timeout_s = 0.5
    engine.engine.send(Sleep("s", ["weights", "kv_cache"]))
    engine.engine.send(JoinGroup("j", "g", "gloo", "127.0.0.1", 9, 1, 2))
    report = engine.report("j")
    assert report.result == "channel_broken"
    assert "broke while joining" in why(report)
    if torch.cuda.is_available():
        return
    engine.engine.send(JoinGroup("n", "g", "nccl", "127.0.0.1", 9, 1, 2))
    assert engine.report("n").result == "weights_refused"
    assert "there is no GPU here" in why(engine.reports["n"])


def test_session_push_survives_a_restart_without_later_parts(
    root: Path, settings: EngineSettings, tmp_path: Path
) -> None:
    """Parts of the next push leave no trace."""
    kept = replace(settings, state_dir=str(tmp_path / "state"))
    engine = Pushable(kept)
    of_session = {"version": "v1", "commit": False, "session": "s"}
    assert results(engine, root, "new1", **of_session)[-1] == "staged"
    assert results(engine, root, "new-drafter", role="drafter", **of_session)[-1] == "staged"
    assert engine.commit("v1").result == "committed"
    assert results(engine, root, "new2", range(2), version="v2") == ["gathering"] * 2
    again = Pushable(kept)
    assert not again.info.lost
    assert again.info.weight_version == "v1"
    assert again.checksums() == engine.checksums()
