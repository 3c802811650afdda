"""Pushes into a running engine: each way of treating what runs, exact spans, no stale KV, rollback,
idempotence, the spool.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable, perturbed
from tests.engine.tiny import VOCAB, write_eagle, write_target
from tlt_client.channels import checkpoint
from tlt_server.commands import (
    CommitWeights,
    LookAtWeights,
    NameWeights,
    Pause,
    Resume,
    SetPolicy,
    Sleep,
)
from tlt_server.engine.gate import Reason
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.decoder import Decoder
from tlt_server.records import GenerateRequest, Sampling, Strategy
from tlt_server.threads import Errands
from tlt_server.weights.checksums import checksum


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    write_target(root / "base")
    write_eagle(root / "drafter")
    perturbed(root / "base", root / "new", 1)
    perturbed(root / "base", root / "newer", 2)
    perturbed(root / "drafter", root / "new-drafter", 3)
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
    )


@pytest.fixture
def engine(settings: EngineSettings) -> Pushable:
    return Pushable(settings)


def request(i: int = 0, max_tokens: int = 40, **fields: object) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return msgspec.structs.replace(
        GenerateRequest(
            id=f"r{i}",
            token_ids=[(7 * i + 3 * p) % (VOCAB - 1) for p in range(21 + i)],
            sampling=sampling,
            seed=50 + i,
        ),
        **fields,
    )


def fresh(
    settings: EngineSettings, model: Path, *requests: GenerateRequest
) -> dict[str, tuple[list[int], list[float]]]:
    """Return the outputs of an engine that never had other weights."""
    return Pushable(replace(settings, model=str(model))).run(*requests)


def continued(asked: GenerateRequest, tokens: list[int]) -> GenerateRequest:
    """The request whose prompt is what `asked` has so far."""
    left = msgspec.structs.replace(
        asked.sampling, max_tokens=asked.sampling.max_tokens - len(tokens)
    )
    return msgspec.structs.replace(asked, token_ids=asked.token_ids + tokens, sampling=left)


def check_spans(engine: Pushable, id: str, versions: list[str]) -> list[int]:
    """Spans cover all tokens without a gap, in order; returns where they begin."""
    spans = engine.spans(id)
    assert [version for version, _, _ in spans] == versions
    starts = [start for _, start, _ in spans]
    assert (
        starts[0] == 0
        and starts[1:] == [end for _, _, end in spans][:-1]
        and spans[-1][2] == len(engine.tokens(id))
    )
    return starts


def test_after_a_commit_new_requests_are_those_of_a_fresh_engine(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    asked = [request(i) for i in range(3)]
    before = engine.run(*asked)
    report = engine.push(root / "new", "v1")
    assert (report.result, report.version, report.role, report.state.target) == (
        "committed",
        "v1",
        "target",
        "v1",
    )
    assert (
        set(report.phases) >= {"open", "read", "check", "fill", "wait", "commit"}
        and 0 < report.pause_ms < 1000
    )
    after = engine.run(*asked)
    assert after == fresh(settings, root / "new", *asked) != before
    assert all(engine.spans(r.id) == [("v1", 0, 40)] for r in asked)
    assert engine.checksums() == {
        **report.checksums,
        **{k: v for k, v in engine.checksums().items() if k.startswith("draft.")},
    }


def test_continue_keeps_kv_and_marks_the_change_at_the_token(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    asked = [request(i) for i in range(3)]
    old = fresh(settings, root / "base", *asked)
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    engine.submit(*asked)
    engine.step(10)
    at = {r.id: len(engine.tokens(r.id)) for r in asked}
    assert engine.commit("v1").result == "committed"
    engine.finish()
    for r in asked:
        (_, change) = check_spans(engine, r.id, ["initial", "v1"])
        assert change == at[r.id], "the commit falls between two steps"
        assert engine.tokens(r.id)[:change] == old[r.id][0][:change]
        assert engine.logprobs(r.id)[:change] == old[r.id][1][:change]
    restarted = {r.id: continued(r, engine.tokens(r.id)[: engine.spans(r.id)[1][1]]) for r in asked}
    recomputed = fresh(settings, root / "new", *restarted.values())
    assert any(
        recomputed[i][1] != engine.logprobs(i)[engine.spans(i)[1][1] :] for i in recomputed
    ), "kept KV must be of the old version"


def test_recompute_continues_as_if_the_new_version_had_read_the_tokens(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    asked = [request(i) for i in range(3)]
    assert (
        engine.push(root / "new", "v1", in_flight="recompute", commit=False).result == "staged"
    )  # before anything could end
    engine.submit(*asked)
    engine.step(8)
    assert engine.commit("v1").result == "committed"
    engine.finish()
    for r in asked:
        (_, change) = check_spans(engine, r.id, ["initial", "v1"])
        rest = fresh(settings, root / "new", continued(r, engine.tokens(r.id)[:change]))[r.id]
        assert (engine.tokens(r.id)[change:], engine.logprobs(r.id)[change:]) == rest


def test_abort_returns_partial_results_and_what_has_not_begun_runs_on_the_new_version(
    settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(replace(settings, max_running=2))
    asked = [request(i, 60) for i in range(3)]
    old = fresh(settings, root / "base", *asked)
    assert (
        engine.push(root / "new", "v1", in_flight="abort", commit=False).result == "staged"
    )  # before anything could end
    engine.submit(*asked)
    engine.step(5)
    assert engine.commit("v1").result == "committed"
    engine.finish()
    for r in asked[:2]:
        tokens = engine.tokens(r.id)
        assert engine.said[r.id][-1].finish_reason == "abort" and 0 < len(tokens) < 60
        assert tokens == old[r.id][0][: len(tokens)] and engine.spans(r.id) == [
            ("initial", 0, len(tokens))
        ]
    assert engine.spans("r2") == [("v1", 0, 60)]
    assert (engine.tokens("r2"), engine.logprobs("r2")) == fresh(settings, root / "new", asked[2])[
        "r2"
    ]


def test_drain_lets_what_runs_end_and_new_requests_wait(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    first, second = request(0, 500), request(1, 10)
    engine.submit(first)
    engine.step(3)
    id = engine.send_push(root / "new", "v1", in_flight="drain")
    engine.until(lambda: engine.engine.gate.held_for(Reason.DRAINING), "hold")
    assert not engine.said["r0"][-1].finish_reason, "the push must be staged while the request runs"
    engine.submit(second)
    engine.step(3)
    assert "r1" not in engine.said and id not in engine.reports
    engine.finish()
    assert engine.report(id).result == "committed"
    assert engine.spans("r0") == [("initial", 0, 500)] and engine.spans("r1") == [("v1", 0, 10)]
    assert (engine.tokens("r0"), engine.logprobs("r0")) == fresh(settings, root / "base", first)[
        "r0"
    ]
    assert (engine.tokens("r1"), engine.logprobs("r1")) == fresh(settings, root / "new", second)[
        "r1"
    ]


def test_a_push_that_waits_for_the_drain_can_be_aborted(engine: Pushable, root: Path) -> None:
    engine.submit(request(0, 500))
    engine.step(3)
    id = engine.send_push(root / "new", "v1", in_flight="drain")
    engine.until(lambda: engine.engine.gate.held_for(Reason.DRAINING), "hold")
    engine.submit(request(1, 10))
    assert engine.abort("v1").result == "aborted" and engine.report(id).result == "conflict"
    engine.step(2)
    assert not engine.engine.gate.held_for(Reason.DRAINING) and "r1" in engine.said, (
        "what waited for the push goes on"
    )
    engine.finish()
    assert engine.spans("r0") == [("initial", 0, 500)] and engine.spans("r1") == [
        ("initial", 0, 10)
    ]


def test_a_rollback_may_drain_first(engine: Pushable, settings: EngineSettings, root: Path) -> None:
    engine.push(root / "new", "v1")
    engine.submit(request(0, 30))
    engine.step(3)
    id = engine.send_roll_back(in_flight="drain")
    engine.step(1)
    engine.submit(request(1, 10))
    assert (
        engine.push(root / "newer", "v2").result == "conflict"
        and engine.roll_back().result == "conflict"
    )
    engine.finish()
    assert engine.report(id).result == "rolled_back"
    assert engine.spans("r0") == [("v1", 0, 30)] and engine.spans("r1") == [("initial", 0, 10)]
    assert (engine.tokens("r1"), engine.logprobs("r1")) == fresh(
        settings, root / "base", request(1, 10)
    )["r1"]


def test_a_rollback_that_waits_can_be_aborted(engine: Pushable, root: Path) -> None:
    engine.push(root / "new", "v1")
    engine.submit(request(0, 500))
    engine.step(3)
    id = engine.send_roll_back(in_flight="drain")
    engine.until(lambda: engine.engine.gate.held_for(Reason.DRAINING), "hold")
    engine.submit(request(1, 10))
    engine.engine.send(Pause("p"))
    engine.step(2)
    refused = engine.push(root / "newer", "v2")
    assert (
        refused.result == "conflict"
        and refused.error is not None
        and "POST /weights/abort" in refused.error[1]
    )
    assert engine.abort("").result == "aborted" and engine.report(id).result == "conflict"
    engine.engine.send(Resume("r"))
    engine.step(2)
    assert not engine.engine.gate.held_for(Reason.DRAINING) and "r1" in engine.said, (
        "what waited for the rollback goes on"
    )
    assert engine.push(root / "newer", "v2", in_flight="recompute").result == "committed"
    engine.finish()
    assert [version for version, *_ in engine.spans("r0")] == ["v1", "v2"]


def test_a_paused_engine_takes_weights(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    engine.submit(request())
    engine.step(5)
    engine.engine.send(Pause("p"))
    assert engine.push(root / "new", "v1", in_flight="recompute").result == "committed"
    before = len(engine.tokens("r0"))
    engine.step(3)
    assert len(engine.tokens("r0")) == before
    engine.engine.send(Resume("r"))
    engine.finish()
    check_spans(engine, "r0", ["initial", "v1"])


def test_a_push_that_would_wait_for_what_is_paused_is_refused_unless_it_changes_nothing(
    engine: Pushable, root: Path
) -> None:
    sums = [
        {"name": name, "checksum": value}
        for name, value in engine.push(root / "new", "v0").checksums.items()
    ]
    assert engine.push(root / "new", "v1", in_flight="drain", tensors=sums).result == "committed"
    engine.submit(request())
    engine.step(5)
    engine.engine.send(Pause("p"))
    refused = engine.push(root / "newer", "v2", in_flight="drain")
    assert (
        refused.result == "conflict"
        and "resume it first" in refused.error[1]
        and refused.state.open == {}
    )  # type: ignore[index]
    assert engine.push(root / "new", "v1", in_flight="drain", tensors=sums).result == "unchanged"
    assert engine.push(root / "newer", "v2", in_flight="drain", commit=False).result == "staged"
    assert engine.commit("v2").result == "conflict"
    engine.engine.send(Resume("r"))
    assert engine.commit("v2").result == "committed"
    check_spans(engine, "r0", ["v1"])
    engine.submit(request(1))
    engine.step(5)
    engine.engine.send(Pause("p"))
    assert engine.push(root / "newer", "v2", in_flight="drain").result == "conflict"
    assert engine.commit("v2").result == "unchanged", (
        "what was refused before anything came of it takes nothing away"
    )


@pytest.mark.parametrize("in_flight", ["continue", "recompute", "abort", "drain"])
def test_the_prefix_index_is_never_stale(
    in_flight: str, engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    """Requests with one prompt before, during and after pushes and a rollback."""
    same = [request(0, 30, id=f"same{i}") for i in range(5)]
    old, new = (
        fresh(settings, root / "base", same[0])["same0"],
        fresh(settings, root / "new", same[0])["same0"],
    )
    engine.run(same[0])
    engine.submit(same[1])
    engine.step(6)
    assert engine.push(root / "new", "v1", in_flight=in_flight).result == "committed"
    engine.submit(same[2])
    engine.finish()
    # Recompute reads the prompt again, so its pages are of the new version.
    if in_flight != "recompute":
        assert engine.said["same2"][0].cached_tokens == 0
    assert (engine.tokens("same2"), engine.logprobs("same2")) == new
    engine.run(same[3])
    assert (
        engine.said["same3"][0].cached_tokens > 0
        and (engine.tokens("same3"), engine.logprobs("same3")) == new
    )
    assert engine.roll_back().result == "rolled_back"
    engine.run(same[4])
    assert (engine.tokens("same4"), engine.logprobs("same4")) == old
    assert engine.said["same4"][0].cached_tokens > 0, (
        "pages of a version that is live again serve again"
    )


def test_what_a_spanning_sequence_computed_serves_nobody_after_a_rollback(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    """The page keys begin with a version that is live again then, but the KV is not of that version
    alone.
    """
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    engine.submit(request(0, 60))
    engine.step(12)
    assert engine.commit("v1").result == "committed"
    engine.finish()
    check_spans(engine, "r0", ["initial", "v1"])
    assert engine.roll_back().result == "rolled_back"
    whole = request(0, 10, id="whole", token_ids=request(0).token_ids + engine.tokens("r0"))
    assert engine.run(whole) == fresh(settings, root / "base", whole)
    assert 0 < engine.said["whole"][0].cached_tokens <= len(request(0).token_ids) + 12


def test_a_drafter_that_borrows_the_embedding_follows_the_target(
    engine: Pushable, root: Path
) -> None:
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


def test_a_preempted_sequence_that_spans_versions_gets_its_own_kv_back(
    settings: EngineSettings, root: Path
) -> None:
    """Few pages make the young be preempted after the push; the kept KV must make the tokens that
    plenty of pages make.
    """
    asked = [request(i, 70) for i in range(4)]

    def run(pages: int) -> tuple[dict[str, list[int]], dict[str, list[float]], int]:
        engine = Pushable(replace(settings, pages=pages))
        assert engine.push(root / "new", "v1", commit=False).result == "staged"
        engine.submit(*asked)
        engine.step(12)
        assert engine.engine.scheduler.preemptions == 0
        assert engine.commit("v1").result == "committed"
        engine.finish()
        for r in asked:
            check_spans(engine, r.id, ["initial", "v1"])
        return (
            {r.id: engine.tokens(r.id) for r in asked},
            {r.id: engine.logprobs(r.id) for r in asked},
            engine.engine.scheduler.preemptions,
        )

    *plenty, preempted = run(64)
    assert preempted == 0
    *few, preempted = run(14)
    assert preempted > 0 and few == plenty


def test_rollback_restores_every_bit(engine: Pushable, root: Path) -> None:
    asked = request()
    sums, said = engine.checksums(), engine.run(asked)
    assert engine.roll_back().result == "conflict"
    engine.push(root / "new", "v1")
    assert engine.checksums() != sums and engine.run(asked) != said
    report = engine.roll_back("initial")
    assert (report.result, report.version, report.state.target) == (
        "rolled_back",
        "initial",
        "initial",
    )
    assert engine.checksums() == sums and engine.run(asked) == said
    assert engine.roll_back("initial").result == "unchanged", (
        "a repeated rollback is the same success"
    )
    assert engine.roll_back("v7").result == "conflict"


def test_a_push_of_the_drafter_keeps_what_the_target_was_before(
    settings: EngineSettings, root: Path
) -> None:
    engine, asked = Pushable(settings), request()
    said = engine.run(asked)
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
    assert (
        engine.roll_back("v1").result == "unchanged" and engine.roll_back("v2").result == "conflict"
    )
    report = engine.roll_back("initial")
    assert (report.role, report.state.target, report.state.drafter, report.state.previous) == (
        "drafter",
        "v1",
        "initial",
        {},
    )
    assert engine.checksums() == sums["v1"]
    assert engine.push(root / "base", "v3").result == "committed" and engine.run(asked) == said


def test_without_a_name_a_rollback_undoes_the_last_commit_alone(
    settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(settings)
    engine.push(root / "new", "v1")
    engine.push(root / "new-drafter", "d1", role="drafter")
    assert engine.roll_back().role == "drafter"
    engine.push(root / "new-drafter", "d1", role="drafter")
    report = engine.roll_back("initial")
    assert (report.role, report.state.target, report.state.drafter) == (
        "all",
        "initial",
        "initial",
    ), "all that was called so"


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
    assert (
        changed
        and all(name.startswith("draft.") for name in changed)
        and "draft.d2t" not in changed
    )
    assert engine.roll_back().result == "rolled_back" and engine.checksums() == before


def test_target_and_drafter_in_one_transaction(
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
    assert report.result == "weights_refused" and "norm.weight" in report.error[1]  # type: ignore[index]
    assert engine.checksums() == sums and report.state.target == report.state.drafter == "v1"


def test_pushes_while_speculating_equal_pushes_without(
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


def test_a_repeated_push_succeeds_and_other_content_under_the_same_version_is_a_conflict(
    engine: Pushable, root: Path
) -> None:
    first = engine.push(root / "new", "v1")
    again = engine.push(root / "new", "v1")
    assert (first.result, again.result) == (
        "committed",
        "unchanged",
    ) and again.checksums == first.checksums
    other = engine.push(root / "newer", "v1")
    assert (
        other.result == "conflict" and "'v1'" in other.error[1] and "new version" in other.error[1]
    )  # type: ignore[index]
    assert engine.push(root / "newer", "initial").result == "conflict", (
        "what the server was started with has a content, too"
    )
    assert engine.push(root / "newer", "v2").result == "committed"
    assert engine.push(root / "new", "v1").result == "committed", (
        "a version may come back, with the same bits"
    )
    unnamed = engine.push(root / "newer")
    assert (
        unnamed.version.startswith("newer@")
        and engine.push(root / "newer").version == unnamed.version
    )


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_versions_that_nobody_uses_are_freed_at_once_and_not_by_the_loop(
    settings: EngineSettings, root: Path, no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a push ends, no cycle keeps its network; what a commit or a rollback replaces is let
    go by a thread.
    """
    made: list[weakref.ref[Decoder]] = []
    blank, by = Decoder.blank, set[str]()

    def noted(model: Decoder) -> Decoder:
        network = blank(model)
        made.append(weakref.ref(network, lambda ref: by.add(threading.current_thread().name)))
        return network

    monkeypatch.setattr(Decoder, "blank", noted)
    engine = Pushable(settings)
    engine.submit(request())
    engine.step(3)
    for i in range(3):
        assert engine.push(root / "new", f"a{i}").result == "committed"
        assert engine.push(root / "newer", f"b{i}").result == "committed"
        assert engine.roll_back(f"a{i}").result == "rolled_back"
        assert engine.push(
            root / "newer",
            f"c{i}",
            tensors=[{"name": "model.norm.weight", "checksum": "mix64:" + "0" * 16}],
        ).error
        assert engine.push(root / "newer", f"d{i}", commit=False).result == "staged"
        assert engine.abort(f"d{i}").error is None
    engine.until(lambda: sum(ref() is not None for ref in made) <= 2, "end of the versions before")
    assert len(made) == 12 and by == {"free weights"}


def test_the_same_push_twice_at_once_is_one_push_and_another_is_a_conflict(
    engine: Pushable, root: Path
) -> None:
    ids = [engine.send_push(root / "new", "v1") for _ in range(2)]
    other = engine.send_push(root / "newer", "v2")
    assert [engine.report(id).result for id in (*ids, other)] == [
        "committed",
        "committed",
        "conflict",
    ]
    assert "'v1' is being pushed" in engine.report(other).error[1]  # type: ignore[index]
    assert (engine.report(other).role, engine.report(other).version) == ("target", "v2")


def test_a_staged_push_waits_for_its_commit_or_its_abort(engine: Pushable, root: Path) -> None:
    sums = engine.checksums()
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    assert engine.commit("v2").result == "not_found" and engine.checksums() == sums
    assert engine.abort("v1").result == "aborted" and engine.checksums() == sums
    assert engine.abort("v1").result == "not_found"
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    assert (
        engine.push(root / "newer", "v2").result == "conflict"
        and engine.roll_back().result == "conflict"
    )
    assert engine.commit("v1").result == "committed" and engine.checksums() != sums


def test_a_commit_may_be_asked_for_again(engine: Pushable, root: Path) -> None:
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    first, again = engine.send_commit("v1"), engine.send_commit("v1")
    assert [engine.report(id).result for id in (first, again)] == ["committed", "committed"]
    late = engine.commit("v1")
    assert (late.result, late.version, late.role, late.state.target) == (
        "unchanged",
        "v1",
        "target",
        "v1",
    )
    assert late.checksums == engine.report(first).checksums
    assert engine.push(root / "newer", "v2", commit=False).result == "staged"
    assert engine.commit("v1").result == "unchanged" and engine.commit("v2").result == "committed"
    assert engine.commit("v1").result == "not_found", "it is kept for a rollback, and is not live"
    assert engine.push(root / "new-drafter", "v2", role="drafter", commit=False).result == "staged"
    both = engine.commit("v2")
    assert (both.result, both.role) == ("committed", "drafter"), (
        "a push on its way comes before what is live by its name"
    )
    assert engine.commit("v2").role == "all" and engine.roll_back().result == "rolled_back"
    assert engine.commit("v2").result == "not_found", "the drafter's is not live any more"


def test_what_is_live_of_one_role_is_no_answer_for_a_push_of_the_other(
    kept: EngineSettings, root: Path
) -> None:
    engine = Pushable(kept)
    assert (
        engine.push(root / "new", "v1").result == "committed"
        and engine.commit("v1").result == "unchanged"
    )
    assert Pushable(kept).commit("v1").result == "unchanged", (
        "nor does a restart lose what was committed"
    )
    assert engine.push(root / "new-drafter", "v1", role="drafter", commit=False).result == "staged"
    assert engine.abort("v1").result == "aborted"
    assert engine.commit("v1").result == "not_found", "what was pushed last by this name is gone"
    assert (
        engine.push(root / "new", "v1").result == "unchanged"
        and engine.commit("v1").result == "unchanged"
    )


def test_a_commit_may_be_asked_for_again_whatever_came_since_as_long_as_it_is_live(
    engine: Pushable, root: Path
) -> None:
    assert engine.commit("").result == "not_found"
    assert (
        engine.push(root / "new", "v1").result
        == engine.push(root / "new-drafter", "d1", role="drafter").result
        == "committed"
    )
    assert [engine.commit(version).result for version in ("v1", "d1")] == ["unchanged", "unchanged"]
    assert (
        engine.push(root / "newer", "v2").result == "committed"
        and engine.commit("v1").result == "not_found"
    )
    assert engine.roll_back().result == "rolled_back"
    assert [engine.commit(version).result for version in ("v1", "d1", "v2")] == [
        "unchanged",
        "unchanged",
        "not_found",
    ]
    engine.engine.send(NameWeights("n", "r1", ""))
    assert engine.report("n").result == "named"
    assert [engine.commit(version).result for version in ("r1", "d1", "v1")] == [
        "unchanged",
        "unchanged",
        "not_found",
    ]


def test_memory_that_is_being_freed_is_waited_for(engine: Pushable, root: Path) -> None:
    """Push and sleep both wait; an abort ends the wait of a push."""
    freeing, go_on = engine.engine.pushes.transaction.cleanup._freeing, threading.Event()
    freeing.give(lambda: (go_on.wait(60), None)[1])
    id = engine.send_push(root / "new", "v1")
    engine.step(20)
    assert engine.engine.pushes.state().open["state"] == "staging" and id not in engine.reports
    assert engine.abort("v1").result == "aborted" and engine.report(id).result == "conflict"
    id = engine.send_push(root / "new", "v2")
    engine.step(20)
    assert id not in engine.reports
    go_on.set()
    assert engine.report(id).result == "committed"
    go_on.clear()
    freeing.give(lambda: (go_on.wait(60), None)[1])
    threading.Timer(0.5, go_on.set).start()
    engine.engine.send(Sleep("s", ["weights"]))
    engine.step()
    assert go_on.is_set() and engine.engine.control_reports()[0].error is None


def test_what_a_commit_has_dropped_is_let_go_before_the_loop_rests(
    engine: Pushable, root: Path
) -> None:
    for version in ("v1", "v2"):
        engine.push(root / "new", version)
    engine.engine.send(Pause("p"))
    engine.until(lambda: engine.engine.idle, "rest")
    assert not engine.engine.pushes.transaction.cleanup.due


def test_an_errand_that_fails_keeps_none_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    errands, done = Errands("fail"), list[str]()
    for errand in (lambda: done.append("a"), lambda: 1 / 0, lambda: done.append("b")):
        errands.give(errand)  # type: ignore[arg-type]
    assert (
        errands.mark().wait(60)
        and done == ["a", "b"]
        and "ZeroDivisionError" in capsys.readouterr().err
    )


def test_checksums_that_come_back_can_be_declared_with_the_next_push(
    engine: Pushable, root: Path
) -> None:
    report = engine.push(root / "new", "v1")
    tensors = [{"name": name, "checksum": value} for name, value in report.checksums.items()]
    assert engine.push(root / "new", "v1-again", tensors=tensors).result == "committed"
    refused = engine.push(root / "newer", "v2", tensors=tensors)
    assert refused.result == "weights_refused" and "checksum" in refused.error[1]  # type: ignore[index]


@pytest.mark.parametrize("kind", ["mix64", "sha256", "xxh3", "xxh3_128"])
def test_every_kind_of_checksum_can_be_declared(kind: str, engine: Pushable, root: Path) -> None:
    tensors = [
        {
            "name": name,
            "checksum": checksum(kind, tensor),
            "dtype": "float32",
            "shape": list(tensor.shape),
        }
        for name, tensor in load_file(root / "new" / "model.safetensors").items()
    ]
    assert engine.push(root / "new", "v1", tensors=tensors).result == "committed"


# -- restarts


@pytest.fixture
def kept(settings: EngineSettings, tmp_path: Path) -> Iterator[EngineSettings]:
    yield replace(settings, state_dir=str(tmp_path / "state"))


def test_a_restarted_engine_serves_exactly_what_was_committed(
    kept: EngineSettings, root: Path, tmp_path: Path
) -> None:
    work = perturbed(root / "base", root / "rewritten", 9)
    engine = Pushable(kept)
    engine.push(root / "new", "v1")
    assert (
        engine.push(work, "v2", role="all", drafter_path=str(root / "new-drafter")).result
        == "committed"
    )
    sums, said = engine.checksums(), engine.run(request())
    save_file(
        {name: tensor * 0 for name, tensor in load_file(work / "model.safetensors").items()},
        work / "model.safetensors",
    )  # in place
    shutil.rmtree(root / "rewritten")
    again = Pushable(kept)
    assert (again.info.weight_version, again.info.drafter_version) == ("v2", "v2")
    assert (
        again.checksums() == sums
        and again.run(request()) == said
        and again.spans("r0") == [("v2", 0, 40)]
    )
    assert again.push(root / "newer", "v2").result == "conflict", (
        "a restart remembers what the version holds"
    )


@pytest.mark.parametrize("links", [True, False])
def test_what_came_by_http_is_kept_by_a_second_name_where_it_is_one_roles(
    kept: EngineSettings, root: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*paths: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(checkpoint, "BUCKET_BYTES", 4096)  # so that a file comes in several batches
    if not links:
        monkeypatch.setattr(os, "link", refused)
    uploads = Path(kept.state_dir) / "uploads" / "v1"
    uploads.mkdir(parents=True)
    target, drafter = (
        load_file(root / "new" / "model.safetensors"),
        load_file(root / "new-drafter" / "model.safetensors"),
    )
    (last, tensor), *others = sorted(target.items())
    middle, prefixed = (
        len(others) // 2,
        {f"draft.{name}": tensor for name, tensor in drafter.items()},
    )
    parts = {
        "a": dict(others[:middle]),
        "b": dict(others[middle:]),
        "mixed": {last: tensor, **prefixed},
    }
    for name, tensors in parts.items():
        save_file(tensors, uploads / f"{name}.safetensors")
    engine = Pushable(replace(kept, weight_channels="disk,http"))
    named = [
        {"name": name, "checksum": checksum("xxh3_128", tensor)}
        for part in parts.values()
        for name, tensor in part.items()
    ]
    assert engine.push("v1", "v1", channel="http", role="all", tensors=named).result == "committed"
    (folder,) = (Path(kept.state_dir) / "weights").glob("push-*")
    same = {
        path.stem
        for path in uploads.iterdir()
        for other in folder.rglob("*.safetensors")
        if path.samefile(other)
    }
    assert same == ({"a", "b"} if links else set())
    sums, said = engine.checksums(), engine.run(request())
    shutil.rmtree(uploads)
    again = Pushable(kept)
    assert (again.info.weight_version, again.info.drafter_version) == ("v1", "v1")
    assert again.checksums() == sums and again.run(request()) == said


def test_a_restart_after_a_rollback_serves_what_was_rolled_back_to(
    kept: EngineSettings, root: Path
) -> None:
    engine = Pushable(kept)
    for path, version in (("new", "v1"), ("newer", "v2")):
        engine.push(root / path, version)
    engine.roll_back()
    sums = engine.checksums()
    again = Pushable(kept)
    assert again.info.weight_version == "v1" and again.checksums() == sums
    again.push(root / "newer", "v2")
    again.push(root / "new", "v3")
    folders = {path.name for path in (Path(kept.state_dir) / "weights").glob("push-*")}
    again.until(
        lambda: len(list((Path(kept.state_dir) / "weights").glob("push-*"))) <= 2,
        f"cleaning of {folders}",
    )


def test_a_restart_serves_a_target_that_was_rolled_back_behind_a_push_of_the_drafter(
    kept: EngineSettings, root: Path
) -> None:
    engine = Pushable(kept)
    for path, version, role in (
        ("new", "v1", "target"),
        ("newer", "v2", "target"),
        ("new-drafter", "d1", "drafter"),
    ):
        engine.push(root / path, version, role=role)
    assert engine.roll_back("v1").result == "rolled_back"
    sums = engine.checksums()
    again = Pushable(kept)
    assert (again.info.weight_version, again.look().state.drafter) == (
        "v1",
        "d1",
    ) and again.checksums() == sums


def test_a_commit_that_cannot_be_recorded_changes_nothing(kept: EngineSettings, root: Path) -> None:
    engine = Pushable(kept)
    spool = Path(kept.state_dir) / "weights"
    assert engine.push(root / "new", "v1").result == "committed"
    sums, said = engine.checksums(), engine.run(request())
    (spool / "current.json.new").mkdir()
    report = engine.push(root / "newer", "v2")
    assert report.result == "push_failed" and "state directory" in report.error[1]  # type: ignore[index]
    assert engine.roll_back().result == "push_failed"
    assert (
        engine.checksums() == sums
        and engine.run(request()) == said
        and engine.spans("r0")[0][0] == "v1"
    )
    (spool / "current.json.new").rmdir()
    assert Pushable(kept).checksums() == sums, "and a restart serves what is live"
    assert len(list(spool.glob("push-*"))) == 1, "nothing is left of what was not committed"
    assert engine.push(root / "newer", "v2").result == "committed"
    shutil.rmtree(spool)
    assert engine.push(root / "new", "v3").result == "push_failed"


def break_spooled(kept: EngineSettings, role: str) -> Path:
    (file,) = (Path(kept.state_dir) / "weights").glob(f"push-*/{role}/00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def test_a_name_that_cannot_be_recorded_leaves_the_record_of_what_is_staged(
    kept: EngineSettings, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Pushable(kept)
    assert engine.push(root / "new", "v1").result == "committed"
    for fails in ("fsync", "write"):
        assert engine.push(root / "newer", f"by {fails}", commit=False).result == "staged"
        with monkeypatch.context() as patched:
            if fails == "fsync":
                patched.setattr(os, "fsync", full)
            else:
                patched.setattr(msgspec.json, "encode", full)
            engine.engine.send(CommitWeights(fails, f"by {fails}", "another"))
            assert engine.report(fails).result == "push_failed"
        assert engine.commit(f"by {fails}").result == "committed"
        assert Pushable(kept).info.weight_version == f"by {fails}"


def full(*given: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_lost_version_is_named_and_the_model_directory_stands_in(
    kept: EngineSettings, root: Path
) -> None:
    Pushable(kept).push(root / "new", "v1")
    file = break_spooled(kept, "target")
    again = Pushable(kept)
    assert (
        again.info.weight_version == "initial"
        and again.info.spooled
        and list(again.info.lost) == ["target"]
    )
    assert (
        "'v1' of the target is lost" in again.info.lost["target"]
        and str(file.parents[2]) in again.info.lost["target"]
    )
    file.unlink()
    assert list(Pushable(kept).info.lost) == ["target"]
    (Path(kept.state_dir) / "weights" / "current.json").write_text("{")
    with pytest.raises(StartupError, match="current.json is damaged"):
        Pushable(kept)


def test_a_lost_version_stays_lost_until_its_role_is_pushed(
    kept: EngineSettings, root: Path
) -> None:
    Pushable(kept).push(root / "new", "v1")
    file = break_spooled(kept, "target")
    again = Pushable(kept)
    assert again.push(root / "new-drafter", "d1", role="drafter").result == "committed"
    again.roll_back()
    again.push(root / "new-drafter", "d2", role="drafter")
    again.until(
        lambda: len(list((Path(kept.state_dir) / "weights").glob("push-*"))) <= 3, "cleaning"
    )
    assert file.exists(), "what is lost may still be mended"
    after = Pushable(kept)
    assert list(after.info.lost) == ["target"] and after.info.drafter_version == "d2"
    assert after.push(root / "newer", "v2").result == "committed"
    last = Pushable(kept)
    assert not last.info.lost and (last.info.weight_version, last.info.drafter_version) == (
        "v2",
        "d2",
    )


def test_a_lost_drafter_is_named(kept: EngineSettings, root: Path) -> None:
    Pushable(kept).push(root / "new", "both", role="all", drafter_path=str(root / "new-drafter"))
    break_spooled(kept, "drafter")
    again = Pushable(kept)
    assert list(again.info.lost) == ["drafter"] and (
        again.info.weight_version,
        again.info.drafter_version,
    ) == ("both", "initial")


def test_the_name_of_what_is_live_stays_its_own_however_many_versions_of_the_other_role_come(
    engine: Pushable, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt_server.weights.names.REMEMBERED", 2)
    assert engine.push(root / "new-drafter", "d", role="drafter").result == "committed"
    for version in ("1", "2", "3"):
        assert (
            engine.push(root / ("new" if version != "2" else "base"), version).result == "committed"
        )
    other = engine.push(root / "drafter", "d", role="drafter")
    assert (
        other.result == "conflict"
        and "version 'd' of the drafter was pushed before with other content" in other.error[1]
    )  # type: ignore[index]


# -- what a manifest may say


def test_a_shape_is_refused_before_memory_is_taken_for_it(engine: Pushable, root: Path) -> None:
    tensors = [
        {"name": name, "shape": list(t.shape)}
        for name, t in load_file(root / "new" / "model.safetensors").items()
    ]
    for shape in ([2**40], [2**20, 2**20]):
        said = [
            entry | {"shape": shape} if entry["name"] == "model.norm.weight" else entry
            for entry in tensors
        ]
        report = engine.push(root / "new", "huge", tensors=said)
        assert (
            report.result == "weights_refused"
            and f"'model.norm.weight' has shape {shape}" in report.error[1]
        )  # type: ignore[index]
    assert engine.push(root / "new", "right", tensors=tensors).result == "committed"


def test_who_asks_for_sums_is_answered_when_they_cannot_be_made(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> str:
        raise RuntimeError("no memory")

    monkeypatch.setattr("tlt_server.weights.checksums.mix64", fails)
    engine.engine.send(LookAtWeights("look", checksums=True))
    report = engine.report("look")
    assert report.result == "push_failed" and "no memory" in report.error[1]  # type: ignore[index]
