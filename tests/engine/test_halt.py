"""Pause and sleep in a whole engine: what runs ends, waits or goes on with the same bits; memory is
really given back.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from array import array
from dataclasses import replace
from pathlib import Path

import hypothesis
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable, perturbed
from tests.engine.tiny import VOCAB, write_eagle, write_target
from tlt_server.commands import (
    ClearCache,
    CommitWeights,
    ControlCommand,
    NameWeights,
    Pause,
    ReadWeights,
    Resume,
    SetPolicy,
    Sleep,
    WakeUp,
)
from tlt_server.engine import weight_reads
from tlt_server.engine.gate import Reason
from tlt_server.engine.halt import Pages
from tlt_server.engine.settings import EngineSettings
from tlt_server.events import ControlReport, WeightReport
from tlt_server.records import GenerateRequest, Sampling, Strategy

EAGLE = SetPolicy("fixed", Strategy("eagle", 4, 2, 8))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    write_target(root / "base")
    write_eagle(root / "drafter")
    perturbed(root / "base", root / "new", 1)
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


@pytest.fixture(scope="module")
def expected(settings: EngineSettings) -> dict[str, tuple[list[int], list[float]]]:
    return Pushable(settings).run(*(request(i) for i in range(3)))


@pytest.fixture
def engine(settings: EngineSettings) -> Pushable:
    engine = Pushable(settings)
    engine.engine.send(EAGLE)
    return engine


@pytest.fixture(scope="module")
def one_engine(settings: EngineSettings) -> Pushable:
    engine = Pushable(settings)
    engine.engine.send(EAGLE)
    return engine


def request(i: int = 0, max_tokens: int = 40) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(
        id=f"r{i}",
        token_ids=[(7 * i + 3 * p) % (VOCAB - 1) for p in range(21 + i)],
        sampling=sampling,
        seed=50 + i,
    )


def send(engine: Pushable, command: ControlCommand) -> ControlReport | None:
    """Return the command's report, if one came with the next step."""
    engine.engine.send(command)
    engine.step()
    return next(
        (report for report in engine.engine.control_reports() if report.id == command.id), None
    )


def done(engine: Pushable, command: ControlCommand) -> None:
    assert send(engine, command) == ControlReport(command.id)


def begun(engine: Pushable, steps: int = 4) -> None:
    engine.submit(*(request(i) for i in range(3)))
    engine.step(steps)


def bits(engine: Pushable) -> dict[str, tuple[list[int], list[float]]]:
    return {f"r{i}": (engine.tokens(f"r{i}"), engine.logprobs(f"r{i}")) for i in range(3)}


def resident_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) / 1024


@pytest.mark.parametrize("in_flight", ["continue", "recompute"])
def test_what_a_pause_stops_goes_on_with_the_same_bits(
    in_flight: str, engine: Pushable, expected: object
) -> None:
    begun(engine)
    done(engine, Pause("p", in_flight))  # type: ignore[arg-type]
    held = engine.engine.scheduler.pool.held
    assert (held == 0) == (in_flight == "recompute")
    before = bits(engine)
    engine.step(5)
    assert engine.engine.idle and bits(engine) == before
    done(engine, Resume("r"))
    engine.finish()
    assert bits(engine) == expected


def test_an_aborting_pause_gives_what_there_is_and_what_comes_later_waits(
    engine: Pushable, expected: dict[str, object]
) -> None:
    begun(engine)
    done(engine, Pause("p", "abort"))
    assert all(
        engine.said[f"r{i}"][-1].finish_reason == "abort" and 0 < len(engine.tokens(f"r{i}")) < 40
        for i in range(3)
    )
    engine.said.clear()
    engine.submit(request(1))
    engine.step(3)
    assert "r1" not in engine.said
    done(engine, Resume("r"))
    engine.finish()
    assert (engine.tokens("r1"), engine.logprobs("r1")) == expected["r1"]


def test_a_draining_pause_is_answered_when_all_has_ended(
    engine: Pushable, expected: object
) -> None:
    begun(engine)
    assert send(engine, Pause("p", "drain")) is None
    reports: list[ControlReport] = []
    while not reports:
        engine.step()
        reports = engine.engine.control_reports()
    assert (
        reports == [ControlReport("p")]
        and engine.engine.gate.by_operator
        and bits(engine) == expected
    )
    engine.submit(request(1))
    engine.said.clear()
    engine.step(3)
    assert not engine.said


def test_a_resume_answers_a_pause_that_still_waits(engine: Pushable) -> None:
    begun(engine)
    assert send(engine, Pause("p", "drain")) is None
    engine.engine.send(Resume("r"))
    engine.step()
    told = {report.id: report.error for report in engine.engine.control_reports()}
    assert told["r"] is None and told["p"] is not None and told["p"][0] == "conflict"
    engine.finish()


@pytest.mark.parametrize("memory", [["kv_cache"], ["weights"], ["weights", "kv_cache"]])
def test_what_slept_goes_on_with_the_same_bits(
    memory: list[str], engine: Pushable, expected: object
) -> None:
    sums = engine.checksums()
    begun(engine)
    assert any(output.drafted for said in engine.said.values() for output in said), (
        "the drafter must be at work"
    )
    done(engine, Sleep("s", memory))  # type: ignore[arg-type]
    assert engine.engine.scheduler.pool.held == 0
    engine.step(3)
    for memory_kind in memory:
        assert engine.engine.gate.by_operator
        done(engine, WakeUp("w", [memory_kind]))  # type: ignore[list-item]
    engine.finish()
    assert bits(engine) == expected and engine.checksums() == sums
    assert sum(output.accepted for said in engine.said.values() for output in said[5:]) > 0, (
        "the drafter is back"
    )


def test_sleep_gives_memory_back_and_waking_takes_it_again(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "base", tmp_path / "base")
    engine = Pushable(replace(settings, kv_memory_mb=256, model=str(tmp_path / "base")))
    cache = engine.engine.runner._cache  # type: ignore[attr-defined]
    cache.k.fill_(1.0)
    cache.v.fill_(1.0)
    network = engine.engine.pushes.transaction.versions.live.target.network
    full = [
        float(tensor.abs().sum())
        for tensor in network.parameters().values()
        if tensor.numel() >= 3000
    ]
    before, size = resident_mb(), 2 * cache.k.nbytes / 2**20
    assert size > 90
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    assert resident_mb() < before - 0.9 * size
    large = [tensor for tensor in network.parameters().values() if tensor.numel() >= 3000]
    assert sum(float(tensor.abs().sum()) for tensor in large) < 0.9 * sum(full), (
        "whole pages are gone"
    )
    done(engine, WakeUp("w", ["weights", "kv_cache"]))
    assert [float(tensor.abs().sum()) for tensor in large] == full
    assert float(cache.k.abs().sum()) < 0.001 * cache.k.numel(), (
        "but for what shares a page with other data"
    )
    assert engine.run(request(0)) == Pushable(settings).run(request(0))


def test_weights_that_sleep_take_no_push_and_pages_that_sleep_do(
    engine: Pushable, settings: EngineSettings, root: Path
) -> None:
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    refused = engine.push(root / "new", "v1")
    assert (
        refused.result == "conflict" and refused.error is not None and "wake_up" in refused.error[1]
    )
    done(engine, WakeUp("w", ["weights"]))
    assert engine.push(root / "new", "v1").result == "committed"
    done(engine, WakeUp("w", ["kv_cache"]))
    fresh = Pushable(replace(settings, model=str(root / "new")))
    assert engine.run(request(0)) == fresh.run(request(0))
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    done(engine, WakeUp("w", ["weights", "kv_cache"]))
    assert engine.roll_back().result == "rolled_back", "the version before slept and came back, too"
    assert engine.run(request(0)) == Pushable(settings).run(request(0))


def test_a_change_that_drains_is_refused_where_what_runs_is_paused(
    engine: Pushable, root: Path
) -> None:
    assert engine.push(root / "new", "v1").result == "committed"
    assert engine.push(root / "base", "v2", in_flight="drain", commit=False).result == "staged"
    begun(engine)
    done(engine, Pause("p"))
    report = engine.commit("v2")
    assert (report.state.open["state"], report.state.target) == ("staged", "v1")
    assert engine.abort("v2").result == "aborted"
    for refused in (
        report,
        engine.push(root / "base", "v3", in_flight="drain"),
        engine.roll_back(in_flight="drain"),
    ):
        said = refused.error[1] if refused.error else ""
        assert (
            refused.result == "conflict"
            and "drain" in said
            and "POST /resume" in said
            and "another in_flight" in said
        )
    assert engine.push(root / "base", "v3").result == "committed", "any other in_flight goes on"
    assert engine.roll_back(in_flight="recompute").result == "rolled_back"
    done(engine, Resume("r"))
    engine.finish()
    done(engine, Pause("q"))
    assert engine.push(root / "base", "v4", in_flight="drain").result == "committed", "nothing runs"


def test_sleeping_twice_and_waking_twice_change_nothing(engine: Pushable, expected: object) -> None:
    begun(engine)
    for _ in range(2):
        done(engine, Sleep("s", ["weights", "kv_cache"]))
    for _ in range(2):
        done(engine, WakeUp("w", ["weights", "kv_cache"]))
    engine.finish()
    assert bits(engine) == expected


def test_kv_of_two_versions_sleeps_and_is_not_computed_again(
    settings: EngineSettings, root: Path
) -> None:
    def run(*, sleeping: bool) -> dict[str, tuple[list[int], list[float]]]:
        engine = Pushable(settings)
        engine.push(root / "new", "v1", commit=False)
        begun(engine, 6)
        engine.commit("v1")
        engine.step(2)
        if sleeping:
            assert all(len(engine.spans(f"r{i}")) == 2 for i in range(3)), (
                "their KV is of two versions"
            )
            done(engine, Sleep("s", ["weights", "kv_cache"]))
            done(engine, WakeUp("w", ["weights", "kv_cache"]))
        engine.finish()
        return bits(engine)

    assert run(sleeping=True) == run(sleeping=False)


def disk_full(**options: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_leaves_the_weights_awake(
    engine: Pushable, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(engine)
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", disk_full)
        report = send(engine, Sleep("s", ["weights", "kv_cache"]))
    assert (
        report is not None
        and report.error is not None
        and report.error[0] == "storage_failed"
        and "No space" in report.error[1]
    )
    engine.finish()
    assert bits(engine) == expected


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize("place", ["pages", "weights"])
def test_a_waking_that_fails_leaves_everything_asleep_and_can_be_repeated(
    place: str, engine: Pushable, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full by now, so the weights could not be put away again."""
    begun(engine)
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    halt = engine.engine.halt
    taken: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", disk_full)
        pages = Counted(halt._pages, taken, fails=place == "pages")
        patched.setattr(halt, "_pages", pages)
        if place == "weights":
            patched.setattr(halt._dormant, "bring_back", out_of_memory)
        report = send(engine, WakeUp("w", ["weights", "kv_cache"]))
    assert (
        report is not None
        and report.error is not None
        and report.error[0] == "unavailable"
        and "sleeps on" in report.error[1]
    )
    assert taken == (["reclaimed", "freed"] if place == "weights" else []), (
        "what was taken is given back"
    )
    assert engine.push("new", "v1").result == "conflict", "the weights still sleep"
    done(engine, WakeUp("w", ["weights", "kv_cache"]))
    engine.finish()
    assert bits(engine) == expected


class Counted:
    """Pages that tell what was done with them."""

    def __init__(self, pages: Pages, told: list[str], *, fails: bool) -> None:
        self._pages, self._told, self._fails = pages, told, fails

    def reclaim(self) -> None:
        if self._fails:
            out_of_memory()
        self._told.append("reclaimed")
        self._pages.reclaim()

    def free(self) -> None:
        self._told.append("freed")
        self._pages.free()


def test_a_sleep_that_waits_comes_after_the_end_of_what_runs(
    engine: Pushable, expected: object
) -> None:
    begun(engine)
    assert send(engine, Sleep("s", ["weights", "kv_cache"], "drain")) is None
    reports: list[ControlReport] = []
    while not reports:
        engine.step()
        reports = engine.engine.control_reports()
    assert (
        reports == [ControlReport("s")]
        and engine.engine.gate.by_operator
        and bits(engine) == expected
    )
    done(engine, WakeUp("w", ["weights", "kv_cache"]))
    begun(engine)
    engine.engine.send(Sleep("s", ["kv_cache"], "drain"))
    engine.engine.send(WakeUp("w", ["kv_cache"]))
    engine.step()
    told = {report.id: report.error for report in engine.engine.control_reports()}
    assert told["w"] is None and told["s"] is not None and told["s"][0] == "conflict", (
        "it was woken before it slept"
    )


def test_a_sleep_that_fails_aborts_nothing(engine: Pushable, root: Path, expected: object) -> None:
    begun(engine)
    id = engine.send_push(root / "base", "v1", commit=False)
    report = send(engine, Sleep("s", ["weights"], "abort"))
    assert report is not None and report.error is not None and report.error[0] == "conflict"
    engine.report(id)
    engine.finish()
    assert bits(engine) == expected


IN_FLIGHT = st.sampled_from(["continue", "recompute", "abort", "drain"])
MEMORY = st.sampled_from([["weights"], ["kv_cache"], ["weights", "kv_cache"]])
COMMANDS = st.one_of(
    st.builds(lambda how: Pause("", how), IN_FLIGHT),
    st.just(Resume("")),
    st.builds(lambda memory, how: Sleep("", memory, how), MEMORY, IN_FLIGHT),
    st.builds(lambda m: WakeUp("", m), MEMORY),
)


@given(
    st.lists(
        st.tuples(
            COMMANDS,
            st.sampled_from(["", "", "disk full", "no pages", "no room"]),
            st.integers(0, 3),
        ),
        max_size=8,
    )
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_halts_in_any_order_with_failures_are_what_their_answers_say(
    one_engine: Pushable,
    expected: dict[str, object],
    commands: list[tuple[ControlCommand, str, int]],
) -> None:
    engine, halt = one_engine, one_engine.engine.halt
    paused, asleep, sent, answers = False, set(), {}, {}
    engine.said.clear()
    begun(engine, 2)

    def told() -> None:
        nonlocal paused, asleep
        for report in engine.engine.control_reports():
            command = sent.pop(report.id)
            answers[report.id] = report.error
            if report.error is None:
                paused = isinstance(command, Pause) or (paused and not isinstance(command, Resume))
                asleep |= {*command.memory} if isinstance(command, Sleep) else set()
                asleep -= {*command.memory} if isinstance(command, WakeUp) else set()
        assert engine.engine.gate.by_operator == (
            paused or bool(asleep)
        ) and engine.engine.gate.held_for(Reason.WEIGHTS_ASLEEP) == ("weights" in asleep)

    for i, (command, failure, steps) in enumerate(
        [*commands, (Resume(""), "", 1), (WakeUp("", ["weights", "kv_cache"]), "", 1)]
    ):
        sent[f"c{i}"] = msgspec.structs.replace(command, id=f"c{i}")
        with pytest.MonkeyPatch.context() as patched:
            if failure == "disk full":
                patched.setattr(tempfile, "TemporaryFile", disk_full)
            elif failure == "no pages":
                patched.setattr(halt, "_pages", Counted(halt._pages, [], fails=True))
            elif failure == "no room":
                patched.setattr(halt._dormant, "bring_back", out_of_memory)
            engine.engine.send(sent[f"c{i}"])
            engine.step()
        told()
        engine.step(steps)
        told()
    assert not sent and not paused and not asleep, (
        "each is answered once, and the last two end every halt"
    )
    engine.finish()
    assert all(engine.said[id][-1].finish_reason in ("length", "abort") for id in expected)
    assert engine.run(*(request(i) for i in range(3))) == expected


def test_what_is_live_can_be_named(settings: EngineSettings, root: Path, tmp_path: Path) -> None:
    kept = replace(settings, state_dir=str(tmp_path))
    engine = Pushable(kept)
    begun(engine)

    ids = (f"n{i}" for i in itertools.count())

    def name(version: str) -> WeightReport:
        id = next(ids)
        engine.engine.send(NameWeights(id, version))
        return engine.report(id)

    assert name("first").result == "named" and name("first").result == "unchanged"
    engine.finish()
    assert [version for version, _, _ in engine.spans("r0")] == ["initial", "first"]
    assert engine.push(root / "new", "v1").result == "committed"
    refused = name("first")
    assert (
        refused.result == "conflict"
        and refused.error is not None
        and "other content" in refused.error[1]
    )
    assert engine.push(root / "base", "first").result == "committed", (
        "the same content under its name"
    )
    assert name("second").state.target == "second"
    assert Pushable(kept).info.weight_version == "second", "a restart knows the name"


def test_a_staged_push_is_committed_under_the_name_given_last(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    kept = replace(settings, state_dir=str(tmp_path))
    engine = Pushable(kept)
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    engine.engine.send(CommitWeights("c", "v1", "one"))
    report = engine.report("c")
    assert (report.result, report.version, report.state.target) == ("committed", "one", "one")
    assert engine.push(root / "base", "one").result == "conflict"
    assert Pushable(kept).info.weight_version == "one"


def test_weights_stay_while_a_push_is_staged_in_a_thread(engine: Pushable, root: Path) -> None:
    id = engine.send_push(root / "new", "v1")
    engine.engine.send(Sleep("s", ["weights"]))
    engine.step()
    [report] = engine.engine.control_reports()
    assert report.error is not None and report.error[0] == "conflict"
    assert engine.report(id).result == "committed"


def test_cached_prefixes_are_forgotten_on_demand(engine: Pushable) -> None:
    engine.run(request(0))
    assert engine.engine.scheduler.pool.cached > 0
    begun(engine)
    refused = send(engine, ClearCache("c", unless_held=True))
    assert refused is not None and refused.error is not None and refused.error[0] == "conflict"
    engine.finish()
    done(engine, ClearCache("c", unless_held=True))
    assert engine.engine.scheduler.pool.cached == 0


def flushed(engine: Pushable) -> bool:
    report = send(engine, ClearCache("c", unless_held=True))
    assert report is not None and (report.error is None or report.error[0] == "conflict")
    return report.error is None


@pytest.mark.parametrize("in_flight", ["continue", "recompute", "abort"])
def test_a_pause_that_leaves_no_kv_can_be_flushed_in(
    in_flight: str, engine: Pushable, expected: dict[str, object]
) -> None:
    """Sequences that wait do not matter: those given up, and those that came meanwhile."""
    engine.run(request(3))
    begun(engine)
    done(engine, Pause("p", in_flight))  # type: ignore[arg-type]
    engine.submit(request(4))
    engine.step()
    pool, waiting = engine.engine.scheduler.pool, engine.engine.scheduler.gauges()["waiting"]
    assert waiting == {"continue": 1, "recompute": 4, "abort": 1}[in_flight]
    cached = pool.cached
    assert flushed(engine) == (in_flight != "continue")
    assert pool.cached == (cached if in_flight == "continue" else 0)
    done(engine, Resume("r"))
    engine.finish()
    assert engine.said["r4"][-1].finish_reason == "length"
    assert in_flight == "abort" or bits(engine) == expected


def test_a_flush_leaves_a_sequence_of_two_versions_what_it_has_saved(
    settings: EngineSettings, root: Path
) -> None:
    def run(*, flush: bool) -> dict[str, tuple[list[int], list[float]]]:
        engine = Pushable(settings)
        engine.push(root / "new", "v1", commit=False)
        begun(engine, 6)
        engine.commit("v1")
        engine.step(2)
        if flush:
            assert not flushed(engine), "they run"
            done(engine, Pause("p", "recompute"))
            assert engine.engine.scheduler.gauges()["spanning"] == 3 and flushed(engine)
            done(engine, Resume("r"))
        engine.finish()
        return bits(engine)

    assert run(flush=True) == run(flush=False)


def test_what_runs_through_a_flush_goes_on_and_serves_nobody(
    engine: Pushable, expected: object
) -> None:
    begun(engine)
    done(engine, ClearCache("c"))
    engine.finish()
    assert bits(engine) == expected and engine.engine.scheduler.pool.cached == 0
    engine.run(request(0))
    assert engine.said["r0"][0].cached_tokens == 0 and engine.engine.scheduler.pool.cached > 0


def test_rows_of_a_live_tensor_can_be_read(engine: Pushable) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    engine.engine.send(ReadWeights("a", name, 2))
    engine.engine.send(ReadWeights("b", "draft.norm.weight", 3))
    engine.engine.send(ReadWeights("c", "no.such", 2))
    rows, vector, missing = (engine.report(id) for id in "abc")
    live = engine.engine.pushes.transaction.versions.live.target.network.parameters()[name]
    assert array("f", rows.values).tolist() == live[:2].flatten().tolist() and rows.shape == [
        2,
        *live.shape[1:],
    ]
    assert len(array("f", vector.values)) == 3 and vector.shape == [3]
    assert missing.error is not None and missing.error[0] == "not_found"


def read(engine: Pushable, name: str, rows: int) -> WeightReport:
    engine.engine.send(ReadWeights("read", name, rows))
    engine.reports.pop("read", None)
    return engine.report("read")


def test_no_more_numbers_are_read_than_the_limit(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = engine.engine.pushes.transaction.versions.live.target.network.parameters()[
        "model.embed_tokens.weight"
    ]
    monkeypatch.setattr(weight_reads, "MAX_NUMBERS", 4 * live.shape[1])
    assert read(engine, "model.embed_tokens.weight", 4).result == "looked"
    refused = read(engine, "model.embed_tokens.weight", 5)
    assert refused.error is not None and refused.error[0] == "invalid_request"
    assert f"limit is {4 * live.shape[1]}: ask for at most 4 (truncate_size)" in refused.error[1]


def test_a_tensor_is_read_beside_the_loop(
    engine: Pushable, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop steps on while a reader is slow, and what would change the weights waits for it."""
    go_on = threading.Event()
    tensor = engine.engine.pushes.transaction.versions.live.target.network.parameters()[
        "model.norm.weight"
    ]
    monkeypatch.setattr(
        weight_reads.WeightReads, "_readable", lambda *_, changing: Slow(go_on, tensor)
    )
    engine.engine.send(ReadWeights("slow", "model.norm.weight", 4))
    begun(engine)
    refused = send(engine, Sleep("s", ["weights"]))
    assert refused is not None and refused.error is not None and refused.error[0] == "conflict"
    engine.finish()
    assert bits(engine) == expected and "slow" not in engine.reports
    go_on.set()
    assert engine.report("slow").values == tensor.numpy().tobytes()


class Slow:
    """A tensor whose device is busy until it is told to go on."""

    def __init__(self, go_on: threading.Event, tensor: torch.Tensor) -> None:
        self._go_on, self._tensor, self.shape = go_on, tensor, tensor.shape

    def float(self) -> torch.Tensor:
        assert self._go_on.wait(60)
        return self._tensor.float()


def test_weights_that_change_in_place_or_sleep_are_not_read(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    engine, name = (
        Pushable(replace(settings, weight_staging="none", weight_root="/")),
        "model.norm.weight",
    )

    def refused(why: str) -> None:
        report = read(engine, name, 4)
        assert (
            report.error is not None
            and report.error[0] == "conflict"
            and why in report.error[1]
            and not report.values
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            engine.engine.pushes.transaction, "start", lambda: None
        )  # it is about to write
        id = engine.send_push(root / "new", "v1")
        refused("about to change")
    assert engine.report(id).result == "committed" and read(engine, name, 4).result == "looked"
    torn = load_file(shutil.copytree(root / "base", tmp_path / "torn") / "model.safetensors")
    torn["model.norm.weight"][3] = float("nan")
    save_file(torn, tmp_path / "torn" / "model.safetensors")
    assert engine.push(tmp_path / "torn", "v2").state.quarantined
    refused("push that version, or another")
    assert (
        engine.push(root / "base", "v3").result == "committed"
        and read(engine, name, 4).result == "looked"
    )
    done(engine, Sleep("s", ["weights"]))
    refused("the weights sleep")
