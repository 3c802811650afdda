"""The knowledge that a restarted engine finds: used if it fits, else named and made again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_goodput import PROFILED, cpu_seconds, trees
from tlt_server.engine.knowledge_file import MAX_BYTES, NAME, KnowledgeFile, profile_in
from tlt_server.speculation.branches import prior as trust
from tlt_server.speculation.calibration import BUCKETS, PHASES, RANKS, Calibration, OnlineTable
from tlt_server.speculation.cost import KNOTS, Measured
from tlt_server.speculation.drafters.history import prior
from tlt_server.speculation.knowledge import KEPT_WEIGHTS, Knowledge, WeightsInUse
from tlt_server.speculation.learnt import DOUBT

MADE_BY = {"processor": "one", "model": "two layers"}


def fresh(weights: WeightsInUse, drafters: tuple[str, ...] = ("eagle",)) -> Knowledge:
    """Return the knowledge of an engine that starts with these weights."""
    knowledge = Knowledge(drafters)
    knowledge.weights, knowledge.tables = weights, {"eagle": Calibration()}
    return knowledge


def learnt() -> Knowledge:
    knowledge = fresh(WeightsInUse("t", "d"))
    knowledge.cost.profile(Measured(load, cpu_seconds(load)) for load in PROFILED)
    knowledge.estimates["eagle"].see(trees(np.random.default_rng(1), 64, 7, 0.5), 64)
    knowledge.estimates["eagle"].verified(4.0, 2.0)
    teach(knowledge, 8, hits=6)
    return knowledge


def teach(knowledge: Knowledge, nodes: int, hits: int) -> None:
    """Let the tables observe nodes of one cell, some of them accepted."""
    table = knowledge.tables["eagle"]
    assert isinstance(table, Calibration)
    accepted_N = (np.arange(nodes) < hits).astype(np.int8)
    table.observe(np.full(nodes, 3, np.int32), np.full(nodes, -1, np.int32), accepted_N)


def kept(folder: Path) -> Path:
    KnowledgeFile(folder, MADE_BY).save(learnt())
    return folder / NAME


def test_restarted_engine_keeps_its_step_times_and_estimates(tmp_path: Path) -> None:
    path, before = kept(tmp_path), learnt()
    found = fresh(WeightsInUse("t", "d"), ("eagle", "history"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert KnowledgeFile(tmp_path, MADE_BY).load(found) == str(path)
    assert found.cost.trained
    assert all(found.cost.predict(load) == before.cost.predict(load) for load in PROFILED)
    nodes = np.array([0.5, 3.0, 7.0])
    eagle = found.estimates["eagle"].gain(7, 1, nodes)
    np.testing.assert_array_equal(eagle, before.estimates["eagle"].gain(7, 1, nodes))


def test_restart_keeps_estimates_of_earlier_weights(tmp_path: Path) -> None:
    before, file = learnt(), KnowledgeFile(tmp_path, MADE_BY)
    first = before.record().learnt[-1]
    before.renew(WeightsInUse("t", "worse"))
    before.estimates["eagle"].verified(4.0, 0.0)
    teach(before, 40, hits=0)
    second = before.record().learnt[-1]
    file.save(before)

    for drafter, expected in (("worse", second), ("d", first)):
        found = fresh(WeightsInUse("t", drafter))
        assert file.load(found) and found.record().learnt[-1] == expected
    for earlier, expected in (("d", first), ("worse", second)):
        found.renew(WeightsInUse("t", earlier))
        assert found.record().learnt[-1] == expected

    found = fresh(WeightsInUse("new", "d"))
    assert file.load(found)
    doubted = found.record().learnt[-1]
    assert doubted.tables["eagle"].trials[3] == 8 // DOUBT, "of this drafter, and another target"
    assert doubted.estimates["eagle"].requests == first.estimates["eagle"].requests / DOUBT

    found = fresh(WeightsInUse("new", "new"))
    assert file.load(found)
    doubted = found.record().learnt[-1]
    assert not any(doubted.tables["eagle"].trials), "another drafter has its own calibration"
    assert doubted.estimates["eagle"].requests == second.estimates["eagle"].requests / DOUBT


def test_counts_for_a_different_calibration_are_not_loaded(tmp_path: Path) -> None:
    kept(tmp_path)
    found = fresh(WeightsInUse("t", "d"))
    found.tables = {"eagle": Calibration(np.full((PHASES, RANKS, BUCKETS), 0.5, np.float32))}
    assert KnowledgeFile(tmp_path, MADE_BY).load(found)
    assert not any(found.tables["eagle"].record().trials)


def test_consecutive_unused_weights_are_discounted_once() -> None:
    knowledge = learnt()
    before = knowledge.estimates["eagle"].record().requests
    for target in ("t1", "t2", "t3"):
        knowledge.renew(WeightsInUse(target, "d"))
    assert knowledge.estimates["eagle"].record().requests == before / DOUBT
    assert knowledge.tables["eagle"].record().trials[3] == 8 // DOUBT


def test_estimates_of_returning_weights_have_not_aged(tmp_path: Path) -> None:
    """Steps without drafts age only the estimates of the weights in use."""
    knowledge, nodes = learnt(), np.array([7.0])
    gain = knowledge.estimates["eagle"].gain(7, 1, nodes)
    knowledge.renew(WeightsInUse("other", "d"))
    for _ in range(4_000):
        knowledge.estimates["eagle"].unseen()
    knowledge.renew(WeightsInUse("t", "d"))
    for _ in range(16):
        knowledge.estimates["eagle"].unseen()
    assert knowledge.estimates["eagle"].gain(7, 1, nodes) < 1.2 * gain


def test_knowledge_file_size_is_bounded(tmp_path: Path) -> None:
    """The numbers have as many digits as they can have."""
    knowledge = Knowledge(("eagle", "history"), "cuda")
    knowledge.cost.profile(Measured(load, cpu_seconds(load)) for load in PROFILED)
    rng = np.random.default_rng(1)
    tables = {"eagle": Calibration(), "history": OnlineTable(prior()), "both": OnlineTable(trust())}
    knowledge.tables = tables
    for version in range(3 * KEPT_WEIGHTS):
        knowledge.renew(WeightsInUse("t" * 200, f"{version:0200}"))
        for estimate in knowledge.estimates.values():
            estimate.see(trees(rng, 64, 7, 0.5), 64)
        for table in tables.values():
            trials_K = rng.uniform(0, 4096, len(table.prior_K))
            table.count(trials_K / 3, trials_K)
    file = KnowledgeFile(tmp_path, MADE_BY)
    file.save(knowledge)
    assert len(knowledge.record().learnt) == KEPT_WEIGHTS + 1
    assert (tmp_path / NAME).stat().st_size < MAX_BYTES
    assert file.load(Knowledge(("eagle", "history"), "cuda"))


def test_profile_description_names_its_file_and_origin(tmp_path: Path) -> None:
    assert profile_in(None).startswith("none is kept (--state-dir keeps it)")
    assert profile_in(tmp_path) == f"none yet in {tmp_path}: measured at the next start"
    path = kept(tmp_path)
    os.utime(path, (0, 43200))
    made = rf"{path}, made 1970-01-0[12] \d\d:\d\d by one, two layers; used where .*"
    assert re.fullmatch(made, profile_in(tmp_path))
    path.write_bytes(b"{")
    assert f"{path} cannot be read, and will be made again" in profile_in(tmp_path)


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


_cost = partial(_set, "knowledge", "cost")
_estimate = partial(_set, "knowledge", "learnt", 0, "outlooks", "eagle")
_table = partial(_set, "knowledge", "learnt", 0, "tables", "eagle")


def _as_before(content: dict[str, Any]) -> None:
    """Turn the content into that of earlier versions, which kept nothing of earlier weights."""
    knowledge = content["knowledge"]
    knowledge["outlooks"] = knowledge.pop("learnt")[0]["outlooks"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("made_by", "processor", value="another"), "processor 'another', now 'one'"),
        (_set("made_by", value={}), "processor 'unknown'"),
        (_cost("extend", value=[1.0]), "numbers of seconds"),
        (_cost("extend", value=[0.0] * len(KNOTS)), "must take more than 0 seconds"),
        (_cost("extend", value=[*range(len(KNOTS), 0, -1)]), "must not fall with"),
        (_cost("start", "other", value=[0.1] * len(KNOTS)), "parts for each drafter"),
        (_cost("linear", value=[-1.0, 0.0, 0.0]), "numbers of seconds"),
        (_set("knowledge", "learnt", value=[]), "length >= 1"),
        (_estimate("curves", value=[]), "acceptance estimate"),
        (_estimate("depths", value=[9]), "acceptance estimate"),
        (_estimate("ratio", value="a"), "float"),
        (_estimate("ratio", value=9.0), "acceptance estimate"),
        (_estimate("rate", value=1.0), "acceptance estimate"),
        (_estimate("curves", 1, value=99.0), "acceptance estimate"),
        (_table("hits", value=[1]), "counts of a table"),
        (_table("hits", 3, value=9), "counts of a tabl"),
        (_table("trials", 3, value=1e9), "counts of a "),
        (_table("trials", 3, value=None), "float"),
        (_as_before, "unknown field `outlooks`"),
        (_set("other", value=1), "unknown field"),
    ],
)
def test_mismatched_knowledge_file_is_named_and_not_used(
    change: Callable[[dict[str, Any]], None],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, found = kept(tmp_path), fresh(WeightsInUse("t", "d"))
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert KnowledgeFile(tmp_path, MADE_BY).load(found) == "" and not found.cost.trained
    said = capsys.readouterr().err
    assert str(path) in said and says in said and "made again" in said
    assert found.record().learnt == fresh(WeightsInUse("t", "d")).record().learnt


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 100, b" " * (MAX_BYTES + 10)])
def test_damaged_knowledge_file_is_not_used(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    assert KnowledgeFile(tmp_path, MADE_BY).load(Knowledge(("eagle",))) == ""


def test_missing_directory_or_space_only_disables_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = KnowledgeFile(None, MADE_BY)
    nowhere.save(learnt())
    assert nowhere.load(Knowledge(())) == ""
    KnowledgeFile(tmp_path / "gone", MADE_BY).save(learnt())
    assert "cannot be written" in capsys.readouterr().err


def test_knowledge_file_is_saved_periodically(tmp_path: Path) -> None:
    now = [0.0]
    file = KnowledgeFile(tmp_path, MADE_BY, lambda: now[0])
    file.save_now_and_then(learnt())
    assert not (tmp_path / NAME).exists()
    now[0] = 61.0
    file.save_now_and_then(learnt())
    assert (tmp_path / NAME).exists()
