"""Exports that hang, fail or were cut off leave nothing."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tlt_server.config import ResolvedConfig
from tlt_server.errors import Conflict, TltError, Unavailable
from tlt_server.frontend.weights import adoption as module
from tlt_server.frontend.weights.adoption import EXPORTS, Adoption, DrafterExports
from tlt_server.wire.events import WeightReport, WeightState


class FakeAdoption:
    async def write(self, directory: Path) -> WeightReport:
        (directory / "drafter").mkdir(parents=True)
        return WeightReport(id="1", state=WeightState(target="v1", drafter="d1"), result="looked")


def exports_of(state: Path) -> DrafterExports:
    config = SimpleNamespace(state_dir=state, model=state, api_key_variable="KEY")
    return DrafterExports(cast(ResolvedConfig, config), cast(Adoption, FakeAdoption()))


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("import time; time.sleep(60)", Unavailable, "within 0.5 s"),
        ("raise SystemExit('does not fit')", Conflict, "does not fit"),
    ],
)
def test_hung_or_failed_export_is_an_error_and_leaves_no_file(
    code: str, error: type[TltError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPORT_S", 0.5 if error is Unavailable else 60)
    draft = "import os, sys; place = sys.argv[sys.argv.index('--out') + 1]"
    draft += "; os.mkdir(os.path.dirname(place) + '/.one.part')"
    monkeypatch.setattr(module, "EXPORTER", (sys.executable, "-c", f"{draft}; {code}"))
    with pytest.raises(error, match=said):
        asyncio.run(exports_of(tmp_path).write("one", "eagle3"))
    assert not [*(tmp_path / EXPORTS).iterdir()]


def test_export_files_left_by_a_crash_are_removed(tmp_path: Path) -> None:
    for name in ("one", ".export-xyz", ".two.part"):
        (tmp_path / EXPORTS / name / "live").mkdir(parents=True)
    asyncio.run(exports_of(tmp_path).clear())
    assert [path.name for path in (tmp_path / EXPORTS).iterdir()] == ["one"]
