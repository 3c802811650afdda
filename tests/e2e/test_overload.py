"""A real server asked for three times what it can do, in the short form of `tlt bench overload`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_bench import bench


@pytest.mark.long
def test_overload_ends_every_request_once(tmp_path: Path) -> None:
    said = bench("overload", tmp_path / "overload.json")
    assert said["exactly_one_end"]
    assert said["sent"] == sum(said["ended"].values()) + sum(said["refused"].values())
    assert (said["open_sequences"], said["pages_held"], said["untyped_sheds"]) == (0, 0, 0)
    peak, over = said["peak"], said["3x"]
    assert set(over["ends"]) <= {"completed", "late", "overloaded", "queue_full"}
    assert set(peak["ends"]) == {"completed"}
    assert over["ends"]["overloaded"] > 0 and over["ends"]["completed"] > 0 and peak["goodput"] > 0
    assert over["frontend_mib"][-1] - peak["frontend_mib"][0] < 64
    assert over["engine_mib"][-1] - over["engine_mib"][0] < 64
