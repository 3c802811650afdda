"""Pushes of the drafter, alone and with the target: it follows the target, rests if its drafts are
never accepted, and no token changes.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable, perturbed, why
from tests.engine.weight_cases import engine, fresh, request, root, settings
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import Strategy

__all__ = ["engine", "root", "settings"]  # fixtures


def test_borrowed_embedding_follows_the_target(engine: Pushable, root: Path) -> None:
    def borrowed() -> bool:
        live = engine.engine.pushes.transaction.versions.live
        assert live.drafter is not None and not live.drafter.network.own_embedding
        return live.drafter.network.embedding_VH is live.target.network.embedding_VH

    steps = [
        lambda: engine.push(root / "new", "v1"),
        lambda: engine.push(root / "new-drafter", "d1", role="drafter"),
        lambda: engine.push(root / "newer", "v2"),
        lambda: engine.roll_back(),
        lambda: engine.push(
            root / "newer", "v3", role="all", drafter_path=str(root / "new-drafter")
        ),
        lambda: engine.roll_back(),
    ]
    for step in steps:
        assert step().error is None and borrowed()


def test_drafter_push_keeps_the_previous_target(settings: EngineSettings, root: Path) -> None:
    engine, asked = Pushable(settings), request()
    generated = engine.run(asked)
    sums = {"initial": engine.checksums()}
    for path, version, role in (
        ("new", "v1", "target"),
        ("newer", "v2", "target"),
        ("new-drafter", "d1", "drafter"),
    ):
        assert engine.push(root / path, version, role=role).result == "committed"
        sums[version] = engine.checksums()
    report = engine.roll_back("v1")
    assert (report.result, report.role, report.state.target, report.state.drafter) == (
        "rolled_back",
        "target",
        "v1",
        "d1",
    )
    assert report.state.previous == {"drafter": "initial"}
    assert engine.checksums() == {
        name: sums["d1" if name.startswith("draft.") else "v1"][name] for name in sums["d1"]
    }
    assert engine.roll_back().result == "conflict", "the last step was a rollback"
    assert engine.roll_back("v1").result == "unchanged"
    assert engine.roll_back("v2").result == "conflict"
    report = engine.roll_back("initial", role="drafter")
    assert (report.role, report.state.target, report.state.drafter, report.state.previous) == (
        "drafter",
        "v1",
        "initial",
        {},
    )
    assert engine.checksums() == sums["v1"]
    assert engine.push(root / "base", "v3").result == "committed" and engine.run(asked) == generated


def test_a_drafter_push_changes_no_token(settings: EngineSettings, root: Path) -> None:
    drafting = replace(settings, policy="fixed", sd_strategy=Strategy("eagle", 4, 3, 9).name)
    asked = [request(i) for i in range(3)]
    plain = fresh(settings, root / "base", *asked)
    engine = Pushable(drafting)
    before = engine.checksums()
    engine.submit(*asked)
    engine.step(4)
    report = engine.push(root / "new-drafter", "d1", role="drafter")
    assert (report.result, report.state.drafter, report.state.target) == (
        "committed",
        "d1",
        "initial",
    )
    engine.finish()
    assert {r.id: (engine.tokens(r.id), engine.logprobs(r.id)) for r in asked} == plain
    assert all(engine.spans(r.id) == [("initial", 0, 40)] for r in asked)
    after = engine.checksums()
    changed = {name for name in before if before[name] != after[name]}
    assert changed
    assert all(name.startswith("draft.") for name in changed)
    assert "draft.d2t" not in changed
    assert engine.roll_back().result == "rolled_back" and engine.checksums() == before


def test_pushed_vocabulary_map_may_have_any_integer_dtype(engine: Pushable, root: Path) -> None:
    """The version's checksums are those of the types that are kept."""
    directory = root / "other-types"
    shutil.copytree(root / "new-drafter", directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors |= {"d2t": tensors["d2t"].int(), "t2d": tensors["t2d"].to(torch.uint8)}
    save_file(tensors, file)
    report = engine.push(directory, "d1", role="drafter")
    assert report.result == "committed", report.error
    live = engine.checksums()
    assert {
        f"draft.{name}": value for name, value in report.checksums.items()
    }.items() <= live.items()
    again = engine.push(root / "new-drafter", "d1", role="drafter")
    assert again.result == "unchanged", "the same content"


def test_target_and_drafter_are_committed_in_one_transaction(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    report = engine.push(root / "new", "v1", role="all", drafter_path=str(root / "new-drafter"))
    assert (report.result, report.state.target, report.state.drafter) == ("committed", "v1", "v1")
    assert report.checksums == engine.checksums()
    engine.engine.send(SetPolicy("fixed", Strategy("eagle", 4, 3, 9)))
    assert engine.run(request()) == fresh(settings, root / "new", request())
    broken = root / "broken-drafter"
    shutil.copytree(root / "new-drafter", broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    sums = engine.checksums()
    report = engine.push(root / "newer", "v2", role="all", drafter_path=str(broken))
    assert report.result == "weights_refused" and "norm.weight" in why(report)
    assert engine.checksums() == sums and report.state.target == report.state.drafter == "v1"


def test_pushes_give_the_same_bits_with_and_without_speculation(
    settings: EngineSettings, root: Path
) -> None:
    """Compare new requests only: a commit makes the drafter start from nothing, and later tokens of
    the others depend on where the change fell.
    """
    engine = Pushable(
        replace(settings, policy="fixed", sd_strategy=Strategy("eagle", 4, 3, 9).name)
    )
    for version, model in (("v1", "new"), ("v2", "newer"), ("v3", "base")):
        engine.submit(request(3, 60, id=f"during-{version}"))
        engine.step(4)
        assert engine.push(root / model, version).result == "committed"
        engine.finish()
        assert engine.run(request()) == fresh(settings, root / model, request())


@pytest.fixture
def demo_settings(tmp_path: Path) -> EngineSettings:
    shutil.copytree(DRAFTER, tmp_path / "good")
    perturbed(DRAFTER, tmp_path / "bad", 1, scale=1.0)
    return EngineSettings(
        model=str(TARGET),
        device="cpu",
        drafter=str(DRAFTER),
        policy="fixed",
        sd_strategy=Strategy("eagle", 2, 1, 3).name,
        kv_memory_mb=256,
        max_model_len=512,
        weight_root=str(tmp_path),
    )


def test_useless_drafter_is_disabled_until_the_next_push(
    demo_settings: EngineSettings, tmp_path: Path, capfd
) -> None:
    engine, used = Pushable(demo_settings), []
    requests = problems_as_requests(TARGET, 8, group=2, seed=3, max_tokens=40)

    def answers() -> dict[str, tuple[list[int], list[float]]]:
        used.clear()
        observe = engine.engine.choice.policy.observe
        engine.engine.choice.policy.observe = lambda cycle: (
            used.append(cycle.strategy.drafter),
            observe(cycle),
        )
        try:
            return engine.run(*requests)
        finally:
            engine.engine.choice.policy.observe = observe

    expected = answers()
    assert set(used) <= {"eagle", ""} and "eagle" in used
    assert engine.push(tmp_path / "bad", "bad", role="drafter").result == "committed"
    assert answers() == expected
    assert "eagle" in used and used[-1] == "history", used
    assert engine.engine.gauges()["drafters_resting"] == 1
    assert "first drafts of eagle are accepted for" in capfd.readouterr().err
    assert engine.push(tmp_path / "good", "good", role="drafter").result == "committed"
    assert answers() == expected
    assert set(used) <= {"eagle", ""} and engine.engine.gauges()["drafters_resting"] == 0
