"""The knowledge that a restarted engine finds: used if it fits, else named and made again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_goodput import PROFILED, cpu_seconds, trees
from tlt_server.engine.knowledge_file import MAX_BYTES, NAME, KnowledgeFile, profile_in
from tlt_server.speculation.cost import KNOTS, Measured
from tlt_server.speculation.knowledge import Knowledge

MADE_BY = {"processor": "one", "model": "two layers"}


def learnt() -> Knowledge:
    knowledge = Knowledge(("eagle",))
    knowledge.cost.profile(Measured(load, cpu_seconds(load)) for load in PROFILED)
    knowledge.outlooks["eagle"].see(trees(np.random.default_rng(1), 64, 7, 0.5), 64)
    knowledge.outlooks["eagle"].verified(4.0, 2.0)
    return knowledge


def kept(folder: Path) -> Path:
    KnowledgeFile(folder, MADE_BY).save(learnt())
    return folder / NAME


def test_a_restarted_engine_knows_what_it_knew(tmp_path: Path) -> None:
    path, found, before = kept(tmp_path), Knowledge(("eagle", "history")), learnt()
    assert path.stat().st_mode & 0o777 == 0o600
    assert KnowledgeFile(tmp_path, MADE_BY).load(found) == str(path)
    assert found.cost.trained
    assert all(found.cost.predict(load) == before.cost.predict(load) for load in PROFILED)
    nodes = np.array([0.5, 3.0, 7.0])
    eagle = found.outlooks["eagle"].gain(7, 1, nodes)
    np.testing.assert_array_equal(eagle, before.outlooks["eagle"].gain(7, 1, nodes))


def test_the_profile_in_use_is_told_with_what_made_it(tmp_path: Path) -> None:
    assert profile_in(None).startswith("none is kept (--state-dir keeps it)")
    assert profile_in(tmp_path) == f"none yet in {tmp_path}: measured at the next start"
    path = kept(tmp_path)
    os.utime(path, (0, 43200))
    assert re.fullmatch(
        rf"{path}, made 1970-01-0[12] \d\d:\d\d by one, two layers; used where .*",
        profile_in(tmp_path),
    )
    path.write_bytes(b"{")
    assert f"{path} cannot be read, and will be made again" in profile_in(tmp_path)


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("made_by", "processor", value="another"), "processor 'another', now 'one'"),
        (_set("made_by", value={}), "processor 'unknown'"),
        (_set("knowledge", "cost", "extend", value=[1.0]), "numbers of seconds"),
        (_set("knowledge", "cost", "extend", value=[0.0] * len(KNOTS)), "take 0 seconds"),
        (_set("knowledge", "cost", "linear", value=[-1.0, 0.0, 0.0]), "numbers of seconds"),
        (_set("knowledge", "outlooks", "eagle", "curves", value=[]), "outlook"),
        (_set("knowledge", "outlooks", "eagle", "depths", value=[9]), "outlook"),
        (_set("knowledge", "outlooks", "eagle", "ratio", value="a"), "float"),
        (_set("other", value=1), "unknown field"),
    ],
)
def test_a_file_that_does_not_fit_is_named_and_not_used(
    change: Callable[[dict[str, Any]], None],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, found = kept(tmp_path), Knowledge(("eagle",))
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert KnowledgeFile(tmp_path, MADE_BY).load(found) == "" and not found.cost.trained
    said = capsys.readouterr().err
    assert str(path) in said and says in said and "made again" in said
    assert found.outlooks["eagle"].record() == Knowledge(("eagle",)).outlooks["eagle"].record()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 100, b" " * (MAX_BYTES + 10)])
def test_a_damaged_file_is_not_used(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    assert KnowledgeFile(tmp_path, MADE_BY).load(Knowledge(("eagle",))) == ""


def test_without_a_directory_or_room_nothing_is_kept_and_nothing_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = KnowledgeFile(None, MADE_BY)
    nowhere.save(learnt())
    assert nowhere.load(Knowledge(())) == ""
    KnowledgeFile(tmp_path / "gone", MADE_BY).save(learnt())
    assert "cannot be written" in capsys.readouterr().err


def test_it_is_written_now_and_then(tmp_path: Path) -> None:
    now = [0.0]
    file = KnowledgeFile(tmp_path, MADE_BY, lambda: now[0])
    file.save_now_and_then(learnt())
    assert not (tmp_path / NAME).exists()
    now[0] = 61.0
    file.save_now_and_then(learnt())
    assert (tmp_path / NAME).exists()
