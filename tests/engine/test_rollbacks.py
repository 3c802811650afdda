"""Rollbacks never report a version as live while another target serves, whichever roles share its
name, and never undo an adoption of the server's own trainer.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tests.engine.pushing import Pushable, why
from tests.engine.weight_cases import engine, root, settings
from tlt_client.channels import TRAINED
from tlt_server.engine.settings import EngineSettings
from tlt_server.samples.ring import WORK, make_ring

__all__ = ["engine", "root", "settings"]  # fixtures


def live(engine: Pushable) -> tuple[str, str]:
    state = engine.look().state
    return state.target, state.drafter


def test_target_rollback_to_a_drafters_version_name_is_refused(
    engine: Pushable, root: Path
) -> None:
    engine.push(root / "new", "v1")
    engine.push(root / "newer", "v2")
    report = engine.roll_back("initial")
    assert report.result == "conflict"
    for words in ("'initial' of the target is not kept", "restore 'v1'", '"role": "drafter"'):
        assert words in why(report)
    assert live(engine) == ("v2", "initial")
    drafter = engine.roll_back("initial", role="drafter")
    assert (drafter.result, drafter.role) == ("unchanged", "drafter")
    assert engine.push(root / "new-drafter", "d1", role="drafter").result == "committed"
    assert engine.roll_back("initial").result == "conflict", "the drafter alone could go back"
    assert live(engine) == ("v2", "d1")
    assert engine.roll_back("initial", role="target").result == "conflict"
    back = engine.roll_back("v1", role="target")
    assert (back.result, back.role) == ("rolled_back", "target") and live(engine) == ("v1", "d1")
    again = engine.roll_back("v1")
    assert (again.result, again.role, again.version) == ("unchanged", "target", "v1")
    assert engine.roll_back("initial").result == "conflict" and live(engine) == ("v1", "d1")


def test_version_name_of_both_roles_refers_to_the_target(engine: Pushable, root: Path) -> None:
    engine.push(root / "new", "step-5")
    engine.push(root / "newer", "step-6")
    engine.push(root / "base", "step-7")
    assert engine.push(root / "new-drafter", "step-5", role="drafter").result == "committed"
    assert engine.roll_back("step-5").result == "conflict", "the target's is gone"
    assert live(engine) == ("step-7", "step-5")
    assert engine.push(root / "new-drafter", "d8", role="drafter").result == "committed"
    assert engine.roll_back("step-5").result == "conflict"
    assert engine.roll_back("d8").result == "unchanged", "the target never had that name"
    assert engine.roll_back("step-6").result == "rolled_back"
    assert live(engine) == ("step-6", "d8")
    assert engine.roll_back("step-5", role="drafter").role == "drafter"
    assert live(engine) == ("step-6", "step-5")


def test_rollback_after_restart_refuses_an_ambiguous_name(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    kept = replace(settings, state_dir=str(tmp_path / "state"))
    before = Pushable(kept)
    both = {"role": "all", "drafter_path": str(root / "new-drafter")}
    assert before.push(root / "new", "step-5", **both).result == "committed"
    assert before.push(root / "newer", "step-6").result == "committed"
    before.until(lambda: before.engine.idle, "end")
    after = Pushable(kept)
    assert live(after) == ("step-6", "step-5")
    assert after.roll_back("step-5").result == "conflict" and live(after) == ("step-6", "step-5")
    assert after.roll_back("step-6").result == "unchanged"


def test_unnamed_rollback_does_not_undo_an_adopted_drafter(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    make_ring(tmp_path / "ring", 2**16)
    engine = Pushable(replace(settings, sample_ring=tmp_path / "ring"))
    shutil.copytree(root / "new-drafter", tmp_path / WORK / "candidate")

    def adopt(version: str) -> str:
        fields = {"role": "drafter", "channel": TRAINED}
        return engine.push("candidate", version, **fields).result

    assert engine.push(root / "new", "v1").result == "committed"
    assert adopt("drafter-1") == "committed"
    undone = engine.roll_back()
    assert (undone.result, undone.role) == ("rolled_back", "target")
    assert live(engine) == ("initial", "drafter-1")
    assert engine.roll_back().result == "conflict" and live(engine) == ("initial", "drafter-1")
    drafter = engine.roll_back(role="drafter")
    assert (drafter.result, drafter.role) == ("rolled_back", "drafter")
    assert live(engine) == ("initial", "initial")
    nothing = engine.roll_back(role="drafter")
    assert nothing.result == "conflict"
    assert "no version of the drafter is kept" in why(nothing)
