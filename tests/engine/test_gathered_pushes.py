"""Pushes that come in several calls, a part of the tensors in each: nothing is live before all have
come, and never a mixture of two.

Parts come by disk here, as staging knows no channel; `tests/e2e/test_broadcasts.py` sends them
through groups.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.gathered import PARTS, engine, live_as, part, results, root, settings, speak
from tests.engine.pushing import Pushable, small_request, why
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import Pause, Resume
from tlt_server.wire.events import WeightReport

__all__ = ["engine", "root", "settings"]  # fixtures


def test_last_missing_part_commits_the_push(
    settings: EngineSettings, engine: Pushable, root: Path
) -> None:
    before, said = engine.checksums(), speak(engine)
    assert results(engine, root, "new1", range(2), version="v1") == ["gathering", "gathering"]
    assert engine.checksums() == before and speak(engine) == said
    last = part(engine, root, "new1", 2, "v1")
    assert (last.result, last.version, last.state.open) == ("committed", "v1", {})
    assert engine.checksums() == live_as(settings, root / "new1") and speak(engine) != said
    assert {"open", "read", "check", "fill", "wait", "commit"} <= last.phases.keys()
    assert results(engine, root, "new1", version="v1") == ["gathering", "gathering", "unchanged"]
    assert engine.roll_back().result == "rolled_back" and engine.checksums() == before


def test_draining_part_is_refused_while_paused(engine: Pushable, root: Path) -> None:
    engine.submit(small_request(200))
    engine.step(4)
    assert part(engine, root, "new1", 0, "v1", in_flight="drain").result == "gathering"
    engine.engine.send(Pause("p"))
    refused = part(engine, root, "new1", 1, "v1", in_flight="drain")
    assert refused.result == "conflict"
    assert "resume it first" in why(refused)
    assert refused.state.open == {}
    assert part(engine, root, "new1", 2, "v1", in_flight="drain").result == "conflict"
    engine.engine.send(Resume("q"))
    engine.finish()
    assert results(engine, root, "new1", version="v1", in_flight="drain") == [
        "gathering",
        "gathering",
        "committed",
    ]


def test_refused_part_ends_the_push(engine: Pushable, root: Path, tmp_path: Path) -> None:
    before = engine.checksums()
    assert results(engine, root, "new1", range(2)) == ["gathering"] * 2
    spoiled = root / "spoiled"
    spoiled.mkdir(exist_ok=True)
    save_file({"model.nowhere.weight": torch.ones(1)}, spoiled / "model.safetensors")
    refused = engine.push(spoiled, partial=True, tensors=[{"name": "model.nowhere.weight"}])
    assert refused.result == "weights_refused"
    assert "no place" in why(refused)
    assert refused.state.open == {}
    rest = part(engine, root, "new1", 2)
    assert rest.result == "conflict"
    assert "push from 'model.embed_tokens.weight' on" in why(rest)
    assert engine.checksums() == before and results(engine, root, "new1")[-1] == "committed"


def test_lost_drafter_part_ends_no_push_of_the_target(engine: Pushable, root: Path) -> None:
    def drafter(numbers: range) -> list[str]:
        return results(engine, root, "new-drafter", numbers, role="drafter")

    whole = ["gathering", "gathering", "committed"]
    assert drafter(range(PARTS)) == whole and results(engine, root, "new1") == whole
    assert drafter(range(2)) == ["gathering"] * 2 and results(engine, root, "new2") == whole
    assert results(engine, root, "new1") == whole
    assert drafter(range(PARTS)) == ["gathering", "gathering", "unchanged"]


@pytest.mark.parametrize("named", [{}, {"version": "d"}])
def test_drafter_push_is_incomplete_without_its_vocabulary_map(
    named: dict[str, str], engine: Pushable, root: Path
) -> None:
    """Else it would draft with the map of another until its own one comes."""
    tensors, before = load_file(root / "new-drafter" / "model.safetensors"), engine.checksums()
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d")}

    def push(content: dict[str, torch.Tensor]) -> WeightReport:
        folder = root / f"drafter-{'-'.join(sorted(content))[:20]}"
        folder.mkdir(exist_ok=True)
        save_file(content, folder / "model.safetensors")
        return engine.push(
            folder,
            role="drafter",
            partial=True,
            tensors=[{"name": name} for name in content],
            **named,
        )

    assert push(tensors).result == "gathering" and engine.checksums() == before
    assert push({"d2t": maps["d2t"]}).result == "gathering"
    assert push({"t2d": maps["t2d"]}).result == "committed"
    assert engine.checksums()["draft.fc.weight"] != before["draft.fc.weight"]


@pytest.mark.parametrize("named", [{}, {"version": "v"}])
@pytest.mark.parametrize("staging", [None, "none"])
def test_tied_head_may_arrive_after_the_last_missing_part(
    staging: str, named: dict[str, str], settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    engine = Pushable(replace(settings, weight_staging=staging, state_dir=str(tmp_path)))

    def head(name: str) -> WeightReport:
        folder = root / f"head-of-{name}"
        folder.mkdir(exist_ok=True)
        embedding = load_file(root / name / "model.safetensors")["model.embed_tokens.weight"]
        save_file({"lm_head.weight": embedding}, folder / "model.safetensors")
        return engine.push(folder, partial=True, tensors=[{"name": "lm_head.weight"}], **named)

    assert results(engine, root, "new1", **named)[-1] == "committed"
    live = engine.checksums()
    agrees = head("new1")
    assert (agrees.result, agrees.state.open, agrees.state.quarantined) == ("unchanged", {}, {})
    differs = head("new2")
    assert differs.result == "weights_refused"
    assert "'lm_head.weight' differs from" in why(differs)
    assert engine.checksums() == live and not differs.state.quarantined
    assert results(engine, root, "new2")[-1] == "committed"
    assert Pushable(engine.settings).checksums() == engine.checksums() != live


def test_push_parts_of_a_silent_sender_are_dropped(engine: Pushable, root: Path) -> None:
    engine.engine.pushes.transaction.options.intake.groups.timeout_s = 0.2
    assert part(engine, root, "new1", 0, "v1").result == "gathering"
    engine.until(lambda: "" in engine.reports, "word of it")
    report = engine.reports[""]
    assert report.result == "channel_broken"
    assert "nothing came for 0.2 s" in why(report)
    assert report.state.open == {}


def test_in_place_push_pauses_requests_until_all_parts_arrive(
    settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(replace(settings, weight_staging="none"))
    said = speak(engine)
    assert part(engine, root, "new1", 0).result == "gathering"
    engine.submit(small_request(8, "waits"))
    engine.step(20)
    assert "waits" not in engine.said
    assert part(engine, root, "new1", 1).result == "gathering"
    assert part(engine, root, "new1", 2).result == "committed"
    engine.finish()
    assert engine.checksums() == live_as(settings, root / "new1")
    assert {"r": (engine.tokens("waits"), engine.logprobs("waits"))} == speak(engine) != said
    engine.engine.pushes.transaction.options.intake.groups.timeout_s = 0.2
    assert part(engine, root, "new2", 0).result == "gathering"
    engine.until(lambda: "" in engine.reports, "word of it")
    assert list(engine.reports[""].state.quarantined) == ["target"]
    assert "nothing is generated" in why(engine.reports[""])
    assert results(engine, root, "new2")[-1] == "committed"
    assert not engine.engine.pushes.transaction.versions.quarantined
