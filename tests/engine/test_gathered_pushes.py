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

from tests.engine.pushing import Pushable, perturbed
from tests.engine.tiny import write_eagle, write_target
from tlt_server.commands import (
    AbortWeights,
    CommitWeights,
    JoinGroup,
    NameWeights,
    Pause,
    Resume,
    RollbackWeights,
    Sleep,
    WeightCommand,
)
from tlt_server.engine.gate import Reason
from tlt_server.engine.settings import EngineSettings
from tlt_server.events import WeightReport
from tlt_server.records import GenerateRequest, Sampling

PARTS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parts")
    write_target(root / "base")
    write_eagle(root / "drafter")
    perturbed(root / "drafter", root / "new-drafter", 3)
    for seed in (1, 2):
        perturbed(root / "base", root / f"new{seed}", seed)
    for name in ("new1", "new2", "new-drafter"):
        tensors = load_file(root / name / "model.safetensors")
        names = sorted(tensors)
        for part in range(PARTS):
            folder = root / f"{name}-{part}"
            folder.mkdir()
            save_file(
                {tensor: tensors[tensor] for tensor in names[part::PARTS]},
                folder / "model.safetensors",
            )
    return root


@pytest.fixture(scope="module")
def settings(root: Path) -> EngineSettings:
    return EngineSettings(
        model=str(root / "base"),
        device="cpu",
        drafter=str(root / "drafter"),
        policy="off",
        kv_memory_mb=16,
        weight_root=str(root),
        weight_channels="disk,broadcast",
    )


@pytest.fixture
def engine(settings: EngineSettings) -> Pushable:
    return Pushable(settings)


def part(
    engine: Pushable, root: Path, name: str, number: int, version: str = "", **fields: object
) -> WeightReport:
    tensors = [
        {"name": tensor} for tensor in load_file(root / f"{name}-{number}" / "model.safetensors")
    ]
    return engine.push(root / f"{name}-{number}", version, partial=True, tensors=tensors, **fields)


def results(
    engine: Pushable, root: Path, name: str, numbers: range = range(PARTS), **fields: object
) -> list[str]:
    return [part(engine, root, name, number, **fields).result for number in numbers]


def speak(engine: Pushable) -> object:
    return engine.run(
        GenerateRequest(
            id="r", token_ids=[5, 6, 7], seed=3, sampling=Sampling(max_tokens=8, ignore_eos=True)
        )
    )


def live_as(settings: EngineSettings, model: Path) -> dict[str, str]:
    return Pushable(replace(settings, model=str(model))).checksums()


def test_the_part_that_completes_it_makes_it_live(
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


def test_what_comes_again_begins_anew_and_versions_do_not_mix(
    settings: EngineSettings, engine: Pushable, root: Path
) -> None:
    before = engine.checksums()
    assert results(engine, root, "new1", range(2)) == ["gathering"] * 2
    assert results(engine, root, "new2", range(2)) == ["gathering"] * 2, (
        "its first tensor came: the sender has begun again"
    )
    assert part(engine, root, "new1", 0, "other").result == "gathering", (
        "another version is another push"
    )
    assert part(engine, root, "new2", 2).result == "conflict" and engine.checksums() == before, (
        "and the one before has ended"
    )
    assert results(engine, root, "new2", version="v2") == ["gathering", "gathering", "committed"]
    assert engine.checksums() == live_as(settings, root / "new2")


def test_a_part_that_would_wait_for_what_is_paused_is_refused(engine: Pushable, root: Path) -> None:
    engine.submit(
        GenerateRequest(
            id="r", token_ids=[5, 6, 7], seed=3, sampling=Sampling(max_tokens=200, ignore_eos=True)
        )
    )
    engine.step(4)
    assert part(engine, root, "new1", 0, "v1", in_flight="drain").result == "gathering"
    engine.engine.send(Pause("p"))
    refused = part(engine, root, "new1", 1, "v1", in_flight="drain")
    assert (
        refused.result == "conflict"
        and "resume it first" in (refused.error or ("", ""))[1]
        and refused.state.open == {}
    )
    assert part(engine, root, "new1", 2, "v1", in_flight="drain").result == "conflict"
    engine.engine.send(Resume("q"))
    engine.finish()
    assert results(engine, root, "new1", version="v1", in_flight="drain") == [
        "gathering",
        "gathering",
        "committed",
    ]


def test_a_part_that_is_refused_ends_the_push(engine: Pushable, root: Path, tmp_path: Path) -> None:
    before = engine.checksums()
    assert results(engine, root, "new1", range(2)) == ["gathering"] * 2
    spoiled = root / "spoiled"
    spoiled.mkdir(exist_ok=True)
    save_file({"model.nowhere.weight": torch.ones(1)}, spoiled / "model.safetensors")
    refused = engine.push(spoiled, partial=True, tensors=[{"name": "model.nowhere.weight"}])
    assert (
        refused.result == "weights_refused"
        and "no place" in (refused.error or ("", ""))[1]
        and refused.state.open == {}
    )
    rest = part(engine, root, "new1", 2)
    assert (
        rest.result == "conflict"
        and "push from 'model.embed_tokens.weight' on" in (rest.error or ("", ""))[1]
    )
    assert engine.checksums() == before and results(engine, root, "new1")[-1] == "committed"


def test_a_part_of_one_role_that_is_lost_takes_the_other_role_along_in_no_step(
    engine: Pushable, root: Path
) -> None:
    def drafter(numbers: range) -> list[str]:
        return results(engine, root, "new-drafter", numbers, role="drafter")

    whole = ["gathering", "gathering", "committed"]
    assert drafter(range(PARTS)) == whole and results(engine, root, "new1") == whole
    assert drafter(range(2)) == ["gathering"] * 2 and results(engine, root, "new2") == whole
    assert results(engine, root, "new1") == whole and drafter(range(PARTS)) == [
        "gathering",
        "gathering",
        "unchanged",
    ]


def test_a_part_that_comes_twice_ends_the_push(engine: Pushable, root: Path) -> None:
    """A sender that repeats a part may be at the next step already, and its parts could not be told
    from this one's.
    """
    assert results(engine, root, "new1", range(2)) == ["gathering"] * 2
    assert part(engine, root, "new2", 1).result == "conflict"
    assert part(engine, root, "new2", 2).result == "conflict", "what has come ended with it"
    assert results(engine, root, "new2")[-1] == "committed"


def test_a_part_refused_before_anything_of_it_is_taken_ends_the_push(
    engine: Pushable, root: Path
) -> None:
    for named in ({}, {"version": "v"}):
        assert part(engine, root, "new1", 0, **named).result == "gathering"
        engine.engine.gate.hold(Reason.WEIGHTS_ASLEEP)
        assert part(engine, root, "new1", 1, **named).result == "conflict"
        engine.engine.gate.release(Reason.WEIGHTS_ASLEEP)
        assert part(engine, root, "new1", 2, **named).result == "conflict"
        assert part(engine, root, "new2", 1, **named).result == "conflict"
    assert results(engine, root, "new2")[-1] == "committed"


def test_parts_of_two_sessions_never_meet(
    settings: EngineSettings, engine: Pushable, root: Path
) -> None:
    assert results(engine, root, "new1", range(2), commit=False, session="1") == ["gathering"] * 2
    assert part(engine, root, "new2", 2, commit=False, session="2").result == "gathering", (
        "and not staged"
    )
    assert engine.commit("").result == "conflict"
    assert results(engine, root, "new2", range(1), commit=False, session="2") == ["gathering"], (
        "in any order"
    )
    staged = part(engine, root, "new2", 1, commit=False, session="2")
    assert staged.result == "staged" and engine.commit(staged.version).result == "committed"
    assert engine.checksums() == live_as(settings, root / "new2")


def test_a_push_that_is_not_complete_cannot_be_committed_and_can_be_aborted(
    engine: Pushable, root: Path
) -> None:
    assert results(engine, root, "new1", range(2), version="v1", commit=False) == ["gathering"] * 2
    refused = engine.commit("v1")
    assert (
        refused.result == "conflict"
        and "tensors are missing, among them 'model." in (refused.error or ("", ""))[1]
    )
    whole = engine.push(root / "new2", "v2")
    assert whole.result == "conflict" and "'v1' is being pushed" in (whole.error or ("", ""))[1]
    assert (
        engine.abort("v1").result == "aborted"
        and engine.push(root / "new2", "v2").result == "committed"
    )


def test_target_and_drafter_one_after_the_other_are_one_commit(
    engine: Pushable, root: Path
) -> None:
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


def test_a_commit_that_waits_is_of_what_was_staged_when_it_was_asked_for(
    settings: EngineSettings, engine: Pushable, root: Path
) -> None:
    """Another push in its place would be committed and answered as this one."""
    fields = {"version": "v", "commit": False, "in_flight": "drain"}
    assert results(engine, root, "new1", **fields)[-1] == "staged"
    engine.submit(
        GenerateRequest(
            id="runs",
            token_ids=[5, 6, 7],
            seed=3,
            sampling=Sampling(max_tokens=32, ignore_eos=True),
        )
    )
    engine.step(3)
    engine.engine.send(CommitWeights("commit", "v", "named"))
    engine.step()
    assert "commit" not in engine.reports and not engine.engine.idle, "it waits for what runs"
    assert [part(engine, root, "new2", number, **fields).result for number in range(PARTS)] == [
        "conflict"
    ] * 3
    done = engine.report("commit")
    assert (done.result, done.version) == ("committed", "named") and engine.checksums() == live_as(
        settings, root / "new1"
    )
    assert engine.engine.pushes.transaction.push is None


@pytest.mark.parametrize("named", [{}, {"version": "d"}])
def test_a_drafter_is_not_complete_without_its_vocabulary_map(
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
    assert (
        push({"d2t": maps["d2t"]}).result == "gathering"
        and push({"t2d": maps["t2d"]}).result == "committed"
    )
    assert engine.checksums()["draft.fc.weight"] != before["draft.fc.weight"]


@pytest.mark.parametrize("named", [{}, {"version": "v"}])
@pytest.mark.parametrize("staging", [None, "none"])
def test_a_tied_head_behind_the_part_that_completed_its_version(
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
    assert (
        differs.result == "weights_refused"
        and "'lm_head.weight' differs from" in (differs.error or ("", ""))[1]
    )
    assert engine.checksums() == live and not differs.state.quarantined
    assert (
        results(engine, root, "new2")[-1] == "committed"
        and Pushable(engine.settings).checksums() == engine.checksums() != live
    )


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


def test_a_push_that_has_no_name_yet_can_be_aborted(engine: Pushable, root: Path) -> None:
    assert part(engine, root, "new1", 0).result == "gathering"
    engine.engine.send(RollbackWeights("r"))
    assert engine.report("r").result == "conflict"
    assert engine.abort("").result == "aborted" and engine.abort("").result == "not_found"


def test_what_is_live_is_named_only_if_it_is_what_was_meant(engine: Pushable, root: Path) -> None:
    before = engine.info.weight_version
    assert (
        results(engine, root, "new1", version="v1")[-1] == "committed"
        and engine.roll_back().result == "rolled_back"
    )
    for id, of, result in (
        ("n1", "v1", "conflict"),
        ("n2", before, "named"),
        ("n3", before, "unchanged"),
    ):
        engine.engine.send(NameWeights(id, "8", of))
        assert engine.report(id).result == result


def test_a_restart_finds_what_came_in_parts(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    kept = replace(settings, state_dir=str(tmp_path))
    engine = Pushable(kept)
    assert results(engine, root, "new1", version="v1")[-1] == "committed"
    assert results(engine, root, "new2", range(2), version="v2") == ["gathering"] * 2
    again = Pushable(kept)
    assert again.info.weight_version == "v1" and again.checksums() == engine.checksums()


def test_a_sender_that_falls_silent_is_given_up(engine: Pushable, root: Path) -> None:
    engine.engine.pushes.transaction.options.intake.groups.timeout_s = 0.2
    assert part(engine, root, "new1", 0, "v1").result == "gathering"
    engine.until(lambda: "" in engine.reports, "word of it")
    told = engine.reports[""]
    assert (
        told.result == "channel_broken"
        and "nothing came for 0.2 s" in (told.error or ("", ""))[1]
        and told.state.open == {}
    )


def test_in_place_nothing_is_computed_with_a_part(settings: EngineSettings, root: Path) -> None:
    engine = Pushable(replace(settings, weight_staging="none"))
    said = speak(engine)
    assert part(engine, root, "new1", 0).result == "gathering"
    engine.submit(
        GenerateRequest(
            id="waits",
            token_ids=[5, 6, 7],
            seed=3,
            sampling=Sampling(max_tokens=8, ignore_eos=True),
        )
    )
    engine.step(20)
    assert "waits" not in engine.said
    assert (
        part(engine, root, "new1", 1).result == "gathering"
        and part(engine, root, "new1", 2).result == "committed"
    )
    engine.finish()
    assert engine.checksums() == live_as(settings, root / "new1")
    assert {"r": (engine.tokens("waits"), engine.logprobs("waits"))} == speak(engine) != said
    engine.engine.pushes.transaction.options.intake.groups.timeout_s = 0.2
    assert part(engine, root, "new2", 0).result == "gathering"
    engine.until(lambda: "" in engine.reports, "word of it")
    assert (
        list(engine.reports[""].state.quarantined) == ["target"]
        and "nothing is generated" in (engine.reports[""].error or ("", ""))[1]
    )
    assert (
        results(engine, root, "new2")[-1] == "committed"
        and not engine.engine.pushes.transaction.versions.quarantined
    )


def test_a_refused_push_leaves_the_group_whose_bytes_nobody_has_taken(
    engine: Pushable, root: Path
) -> None:
    """Else the next push would take them for its own."""
    left: list[str] = []
    groups = engine.engine.pushes.transaction.options.intake.groups
    groups.leave = lambda name: left.append(name) or True  # type: ignore[method-assign, func-returns-value]
    assert part(engine, root, "new1", 0, commit=False).result == "gathering"
    tensors = [{"name": "model.norm.weight", "dtype": "float32", "shape": [1]}]
    refused = engine.push("", "v9", channel="broadcast", group="g", tensors=tensors)
    assert refused.result == "conflict" and left == ["g"]


def test_a_group_may_be_joined_while_the_weights_sleep_and_a_join_that_fails_says_so(
    engine: Pushable,
) -> None:
    engine.engine.pushes.transaction.options.intake.groups.timeout_s = 0.5
    engine.engine.send(Sleep("s", ["weights", "kv_cache"]))
    engine.engine.send(JoinGroup("j", "g", "gloo", "127.0.0.1", 9, 1, 2))
    report = engine.report("j")
    assert (
        report.result == "channel_broken" and "broke while joining" in (report.error or ("", ""))[1]
    )
    if torch.cuda.is_available():
        return
    engine.engine.send(JoinGroup("n", "g", "nccl", "127.0.0.1", 9, 1, 2))
    assert (
        engine.report("n").result == "weights_refused"
        and "there is no GPU here" in (engine.reports["n"].error or ("", ""))[1]
    )


def test_a_session_that_is_complete_more_than_once_is_restored_whole(
    root: Path, settings: EngineSettings, tmp_path: Path
) -> None:
    kept = replace(settings, state_dir=str(tmp_path / "state"))
    engine = Pushable(kept)
    of_session = {"version": "v1", "commit": False, "session": "s"}
    assert results(engine, root, "new1", **of_session)[-1] == "staged"
    assert results(engine, root, "new-drafter", role="drafter", **of_session)[-1] == "staged"
    assert engine.commit("v1").result == "committed"
    again = Pushable(kept)
    assert (
        not again.info.lost
        and again.info.weight_version == "v1"
        and again.checksums() == engine.checksums()
    )
