"""The calibration tables of recorded trees: a bounded file, and tables that are held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tlt_server.samples import tables
from tlt_server.samples.tables import TableFile, drafter_of, read_tables, table_file
from tlt_server.speculation.calibration import Calibration


def table(value: float) -> np.ndarray:
    return np.full(4, value, np.float32)


def test_the_newest_tables_are_read_back_by_version(
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
def test_a_file_that_is_none_of_tables_has_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tables"
    if content is not None:
        path.write_bytes(content)
    assert read_tables(path) == {}


def test_where_no_file_can_be_written_versions_are_still_given(tmp_path: Path) -> None:
    kept = TableFile(tmp_path / "missing" / "tables")
    assert kept.add("a", table(0.5)).startswith("a#") and not (tmp_path / "missing").exists()


def test_a_held_table_changes_when_it_is_renewed_alone() -> None:
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
