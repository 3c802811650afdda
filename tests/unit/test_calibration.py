"""Calibration tables: their file, loading, cells, healing when stale, and drift on a device."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tlt_client.channels.checkpoint import CALIBRATION
from tlt_kernels.cpu.growth import calibration_cell
from tlt_kernels.gpu.tensors import CalibrationTable
from tlt_server.engine.gpu.steps.drafts.tables import EVERY, Drift
from tlt_server.errors import ModelError
from tlt_server.samples import tables
from tlt_server.samples.tables import TableFile, drafter_of, read_tables, table_file
from tlt_server.speculation.calibration import (
    BUCKETS,
    DEFAULT_EDGES,
    RANKS,
    Calibration,
    CalibrationSettings,
    OnlineTable,
    default_acceptance,
)
from tlt_server.speculation.learnt import DOUBT


def test_default_table_falls_with_rank_and_follows_the_gap():
    table = default_acceptance()
    assert ((table > 0) & (table < 1)).all()
    assert (np.diff(table[:, 0], axis=-1) >= 0).all()  # a wider gap makes the best child surer
    assert (np.diff(table[:, 1:], axis=-1) <= 0).all()
    assert (np.diff(table, axis=1) <= 0).all()


def test_cells_agree_between_kernel_and_twin():
    calibration = Calibration()
    gaps = [0.0, 1e-9, *DEFAULT_EDGES, *(e + 1e-4 for e in DEFAULT_EDGES), 50.0, float("inf")]
    for phase in (0, 1):
        for rank in (0, 1, 6, 7, 8, 30):
            for gap in np.array(gaps, np.float32):
                assert calibration_cell(
                    phase, rank, gap, calibration.gap_edges
                ) == calibration.cell(phase, rank, gap)


def test_saved_calibration_is_read_back(tmp_path):
    table = np.random.default_rng(0).random((2, RANKS, BUCKETS)).astype(np.float32)
    edges = np.arange(BUCKETS - 1, dtype=np.float32)
    Calibration(table, edges).save(tmp_path)
    loaded = Calibration.load(tmp_path)
    assert np.array_equal(loaded.acceptance, table) and np.array_equal(loaded.gap_edges, edges)


def test_missing_calibration_is_the_default_table(tmp_path):
    assert np.array_equal(Calibration.load(tmp_path).acceptance, default_acceptance())


EDGES, CHANCES = list(range(BUCKETS - 1)), np.full((2, RANKS, BUCKETS), 0.5).tolist()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("junk", "not a calibration table"),
        ("[" * 9000, "not a calibration table"),
        ({"survival": CHANCES}, "not a calibration table.*gap_edges"),
        ({"survival": CHANCES, "gap_edges": EDGES, "more": 1}, "not a calibration table.*more"),
        ({"survival": [[[0.5], [0.5, 0.5]]], "gap_edges": EDGES}, "not a calibration table"),
        ({"survival": [["NaN"]], "gap_edges": EDGES}, "not a calibration table"),
        ({"survival": CHANCES, "gap_edges": [0.0] * 10**5}, "not a calibration table.*limit"),
        ({"survival": [[[0.5]]], "gap_edges": EDGES}, "survival must be"),
        ({"survival": CHANCES, "gap_edges": EDGES[::-1]}, "must ascend"),
        ({"survival": CHANCES, "gap_edges": [*EDGES[:-1], 1e39]}, "must ascend"),
    ],
)
def test_invalid_calibration_is_refused_by_fault(content, why, tmp_path):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / CALIBRATION).write_text(text)
    with pytest.raises(ModelError, match=rf"{CALIBRATION}.*{why}"):
        Calibration.load(tmp_path)


def observe_slowly(calibration, cells, parents, accepted, hits, trials):
    for n, cell in enumerate(cells):
        if accepted[n] >= 0 and (parents[n] < 0 or accepted[parents[n]] == 1):
            if trials[cell] >= calibration.settings.limit:
                hits[cell] /= 2
                trials[cell] /= 2
            hits[cell] += accepted[n]
            trials[cell] += 1
    weight = calibration.settings.prior_weight
    return (weight * calibration.prior_K + hits) / (weight + trials)


def test_calibration_observes_like_its_twin():
    random = np.random.default_rng(1)
    calibration = Calibration(settings=CalibrationSettings(limit=20))
    hits, trials = np.zeros(256), np.zeros(256)
    for _ in range(100):
        cells = random.integers(0, 12, 9).astype(np.int32)
        parents = np.array([random.integers(-1, n) if n else -1 for n in range(9)], np.int32)
        accepted = random.integers(-1, 2, 9).astype(np.int8)
        calibration.observe(cells, parents, accepted)
        expected = observe_slowly(calibration, cells, parents, accepted, hits, trials)
        np.testing.assert_allclose(calibration.acceptance_K, expected, rtol=1e-6)
    assert calibration.trials_K.max() <= 20


def test_stale_calibration_follows_changing_acceptance():
    random = np.random.default_rng(2)
    calibration = Calibration(settings=CalibrationSettings(limit=512))
    cell, parent = np.array([5], np.int32), np.array([-1], np.int32)
    for truth in (0.9, 0.1, 0.9):
        for _ in range(3000):
            calibration.observe(cell, parent, np.array([random.random() < truth], np.int8))
        # Prior of 64 of at least 320 trials, and 3 sigma of 256 samples.
        assert abs(calibration.acceptance_K[5] - truth) < 0.12
    assert calibration.gauges()["calibration_observed_nodes"] == 9000


def taught(calibration=None):
    calibration = calibration or Calibration()
    cells, parents = np.full(40, 5, np.int32), np.full(40, -1, np.int32)
    calibration.observe(cells, parents, (np.arange(40) < 10).astype(np.int8))
    return calibration


def test_calibration_resumes_from_a_record_of_the_same_table():
    before, found = taught(), Calibration()
    found.check(before.record())
    found.restore(before.record())
    assert np.array_equal(found.acceptance, before.acceptance)
    assert found.record() == before.record()
    for other in (Calibration(CHANCES), Calibration(gap_edges=np.array(EDGES) * 2)):
        untouched = other.acceptance.copy()
        other.restore(before.record())
        assert np.array_equal(other.acceptance, untouched), "of another table, or other buckets"


def test_discounted_calibration_nears_prior_and_learns_faster():
    calibration = taught()
    before = calibration.drift
    calibration.forget()
    assert 0 < calibration.drift < before
    assert (calibration.hits_K[5], calibration.trials_K[5]) == (10 // DOUBT, 40 // DOUBT)


def test_adopted_calibration_has_no_observations():
    calibration, other = taught(), Calibration(CHANCES, np.array(EDGES) * 2)
    calibration.adopt(other)
    assert np.array_equal(calibration.acceptance, other.acceptance) and calibration.drift == 0
    assert calibration.record() == other.record()
    taught(calibration)
    assert np.array_equal(other.acceptance.reshape(-1), other.prior_K), "it is a table of its own"


class Later:
    """An event that passes when the test says so."""

    passed = False

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_device_calibration_is_read_without_waiting() -> None:
    host = OnlineTable(np.linspace(0.1, 0.9, 7, dtype=np.float32))
    table = CalibrationTable.of(torch.from_numpy(host.prior_K))
    drift: Any = Drift(table)
    drift._event = Later()
    host.acceptance_K[:] = [0.2, 0.1, 0.5, 0.4, 0.9, 0.8, 0.7]
    host.trials_K[:] = [3, 0, 10, 1, 0, 7, 2]
    table.acceptance_Z.copy_(torch.from_numpy(host.acceptance_K))
    table.trials_Z.copy_(torch.from_numpy(host.trials_K))
    for _ in range(EVERY - 1):
        drift.observed()
    drift._event.passed = True
    assert drift.value == 0.0, "nothing has been read"
    drift.observed()
    assert drift.value == 0.0, "it is on its way"
    drift._event.passed = True
    assert abs(drift.value - host.drift) < 1e-6 and host.drift > 0.01


def test_unused_calibration_has_no_drift() -> None:
    drift = Drift(CalibrationTable.of(torch.full((5,), 0.5)))
    for _ in range(EVERY):
        drift.observed()
    assert drift.value == 0.0


def table(value: float) -> np.ndarray:
    return np.full(4, value, np.float32)


def test_newest_calibrations_are_read_back_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "KEPT", 3)
    path = table_file(tmp_path / "ring")
    kept = TableFile(path)
    names = [kept.add("a#b", table(n / 8)) for n in range(4)]
    assert kept.add("a#b", table(1 / 8)) == names[1]
    names.append(TableFile(path).add("c", table(0.5)))  # an engine that starts again
    found = read_tables(path)
    assert len(names) == len({*names}) == 5 and len(found) == 3 and names[0] not in found
    assert found[names[4]].tolist() == [0.5] * 4
    assert [drafter_of(name) for name in names[3:]] == ["a#b", "c"]
    assert drafter_of("initial") == "initial" and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [None, b"", b"\x81\xa1a", b"\x93\1\2\3", b"\x81\xa1a\xc4\3abc"])
def test_missing_or_foreign_file_has_no_tables(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tables"
    if content is not None:
        path.write_bytes(content)
    assert read_tables(path) == {}


def test_unwritable_table_file_still_gives_table_versions(tmp_path: Path) -> None:
    kept = TableFile(tmp_path / "missing" / "tables")
    assert kept.add("a", table(0.5)).startswith("a#") and not (tmp_path / "missing").exists()


def test_held_calibration_changes_only_when_renewed() -> None:
    plain, held = Calibration(), Calibration()
    held.hold()
    shipped = held.acceptance_K.copy()
    cell_N, parent_N = np.array([3, 3], np.int32), np.array([-1, -1], np.int32)
    for _ in range(50):
        for each in (plain, held):
            each.observe(cell_N, parent_N, np.array([1, 0], np.int8))
    assert np.array_equal(held.acceptance_K, shipped)
    assert np.array_equal(held.renew(), plain.acceptance_K)
    assert (
        np.array_equal(held.acceptance_K, plain.acceptance_K) and held.acceptance_K[3] != shipped[3]
    )
    held.observe(cell_N, parent_N, np.array([1, 1], np.int8))
    held.forget()  # weights have changed: at once
    plain.observe(cell_N, parent_N, np.array([1, 1], np.int8))
    plain.forget()
    assert np.array_equal(held.acceptance_K, plain.acceptance_K)
