"""Pushes into a running engine: each mode for running requests, exact spans, no stale KV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.pushing import Pushable, why
from tests.engine.weight_cases import check_spans, continued, engine, fresh, request, root, settings
from tlt_server.engine.gate import Reason
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import Pause, Resume

__all__ = ["engine", "root", "settings"]  # fixtures


def said(engine: Pushable, id: str) -> tuple[list[int], list[float]]:
    return engine.tokens(id), engine.logprobs(id)


def test_requests_after_a_commit_match_a_fresh_engine(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    asked = [request(i) for i in range(3)]
    before = engine.run(*asked)
    report = engine.push(root / "new", "v1")
    assert (report.result, report.role) == ("committed", "target")
    assert report.version == report.state.target == "v1"
    assert set(report.phases) >= {"open", "read", "check", "fill", "wait", "commit"}
    assert 0 < report.pause_ms < 1000
    after = engine.run(*asked)
    assert after == fresh(settings, root / "new", *asked) != before
    assert all(engine.spans(r.id) == [("v1", 0, 40)] for r in asked)
    found = engine.checksums()
    drafts = {name: value for name, value in found.items() if name.startswith("draft.")}
    assert found == report.checksums | drafts


def test_continue_keeps_kv_and_marks_the_token_of_the_change(
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
    kept = {i: engine.logprobs(i)[engine.spans(i)[1][1] :] for i in recomputed}
    assert any(recomputed[i][1] != kept[i] for i in kept), "kept KV must be of the old version"


def test_recompute_continues_as_the_new_version_would(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    asked = [request(i) for i in range(3)]
    # Before anything could end.
    assert engine.push(root / "new", "v1", in_flight="recompute", commit=False).result == "staged"
    engine.submit(*asked)
    engine.step(8)
    assert engine.commit("v1").result == "committed"
    engine.finish()
    for r in asked:
        (_, change) = check_spans(engine, r.id, ["initial", "v1"])
        rest = fresh(settings, root / "new", continued(r, engine.tokens(r.id)[:change]))[r.id]
        assert (engine.tokens(r.id)[change:], engine.logprobs(r.id)[change:]) == rest


def test_commit_abort_returns_partials_and_runs_waiting_requests(
    settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(replace(settings, max_running=2))
    asked = [request(i, 60) for i in range(3)]
    old = fresh(settings, root / "base", *asked)
    # Before anything could end.
    assert engine.push(root / "new", "v1", in_flight="abort", commit=False).result == "staged"
    engine.submit(*asked)
    engine.step(5)
    assert engine.commit("v1").result == "committed"
    engine.finish()
    for r in asked[:2]:
        tokens = engine.tokens(r.id)
        assert engine.said[r.id][-1].finish_reason == "abort" and 0 < len(tokens) < 60
        assert tokens == old[r.id][0][: len(tokens)]
        assert engine.spans(r.id) == [("initial", 0, len(tokens))]
    assert engine.spans("r2") == [("v1", 0, 60)]
    assert said(engine, "r2") == fresh(settings, root / "new", asked[2])["r2"]


def test_drain_finishes_running_and_delays_new_requests(
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
    assert said(engine, "r0") == fresh(settings, root / "base", first)["r0"]
    assert said(engine, "r1") == fresh(settings, root / "new", second)["r1"]


def test_draining_push_can_be_aborted(engine: Pushable, root: Path) -> None:
    engine.submit(request(0, 500))
    engine.step(3)
    id = engine.send_push(root / "new", "v1", in_flight="drain")
    engine.until(lambda: engine.engine.gate.held_for(Reason.DRAINING), "hold")
    engine.submit(request(1, 10))
    assert engine.abort("v1").result == "aborted" and engine.report(id).result == "conflict"
    engine.step(2)
    assert not engine.engine.gate.held_for(Reason.DRAINING)
    assert "r1" in engine.said, "what waited for the push goes on"
    engine.finish()
    assert engine.spans("r0") == [("initial", 0, 500)]
    assert engine.spans("r1") == [("initial", 0, 10)]


def test_rollback_may_drain_running_requests_first(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    engine.push(root / "new", "v1")
    engine.submit(request(0, 30))
    engine.step(3)
    id = engine.send_roll_back(in_flight="drain")
    engine.step(1)
    engine.submit(request(1, 10))
    assert engine.push(root / "newer", "v2").result == "conflict"
    assert engine.roll_back().result == "conflict"
    engine.finish()
    assert engine.report(id).result == "rolled_back"
    assert engine.spans("r0") == [("v1", 0, 30)] and engine.spans("r1") == [("initial", 0, 10)]
    assert said(engine, "r1") == fresh(settings, root / "base", request(1, 10))["r1"]


def test_waiting_rollback_can_be_aborted(engine: Pushable, root: Path) -> None:
    engine.push(root / "new", "v1")
    engine.submit(request(0, 500))
    engine.step(3)
    id = engine.send_roll_back(in_flight="drain")
    engine.until(lambda: engine.engine.gate.held_for(Reason.DRAINING), "hold")
    engine.submit(request(1, 10))
    engine.engine.send(Pause("p"))
    engine.step(2)
    refused = engine.push(root / "newer", "v2")
    assert refused.result == "conflict" and "POST /weights/abort" in why(refused)
    assert engine.abort("").result == "aborted" and engine.report(id).result == "conflict"
    engine.engine.send(Resume("r"))
    engine.step(2)
    assert not engine.engine.gate.held_for(Reason.DRAINING)
    assert "r1" in engine.said, "what waited for the rollback goes on"
    assert engine.push(root / "newer", "v2", in_flight="recompute").result == "committed"
    engine.finish()
    assert [version for version, *_ in engine.spans("r0")] == ["v1", "v2"]


def test_paused_engine_accepts_a_push(
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


@pytest.mark.parametrize("in_flight", ["continue", "recompute", "abort", "drain"])
def test_the_prefix_index_is_never_stale(
    in_flight: str, engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    """Requests with one prompt before, during and after pushes and a rollback."""
    same = [request(0, 30, id=f"same{i}") for i in range(5)]
    old = fresh(settings, root / "base", same[0])["same0"]
    new = fresh(settings, root / "new", same[0])["same0"]
    engine.run(same[0])
    engine.submit(same[1])
    engine.step(6)
    assert engine.push(root / "new", "v1", in_flight=in_flight).result == "committed"
    engine.submit(same[2])
    engine.finish()
    # Recompute reads the prompt again, so its pages are of the new version.
    if in_flight != "recompute":
        assert engine.said["same2"][0].cached_tokens == 0
    assert said(engine, "same2") == new
    engine.run(same[3])
    assert engine.said["same3"][0].cached_tokens > 0
    assert said(engine, "same3") == new
    assert engine.roll_back().result == "rolled_back"
    engine.run(same[4])
    assert said(engine, "same4") == old
    cached = engine.said["same4"][0].cached_tokens
    assert cached > 0, "pages of a version that is live again serve again"


def test_mixed_version_kv_is_not_reused_after_a_rollback(
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


def test_preempted_mixed_version_sequence_gets_its_kv_back(
    settings: EngineSettings, root: Path
) -> None:
    """Few pages make the young be preempted after the push; the kept KV must make the tokens that
    plenty of pages make.
    """
    asked = [request(i, 70) for i in range(4)]

    def run(pages: int) -> tuple[list[tuple[list[int], list[float]]], int]:
        engine = Pushable(replace(settings, pages=pages))
        assert engine.push(root / "new", "v1", commit=False).result == "staged"
        engine.submit(*asked)
        engine.step(12)
        assert engine.engine.scheduler.preemptions == 0
        assert engine.commit("v1").result == "committed"
        engine.finish()
        for r in asked:
            check_spans(engine, r.id, ["initial", "v1"])
        return [said(engine, r.id) for r in asked], engine.engine.scheduler.preemptions

    plenty, preempted = run(64)
    assert preempted == 0
    few, preempted = run(14)
    assert preempted > 0 and few == plenty
