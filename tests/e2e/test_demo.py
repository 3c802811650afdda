"""`tlt demo --quick`, as anyone would run it, from a directory that is not the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_quick_demo_prints_its_table_and_every_round_has_the_same_tokens(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-m", "tlt_server", "demo", "--quick", "--json", str(tmp_path / "figures.json")], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for part in ("load model", "tokens identical", "fixed EAGLE", "history", "beg", "length p50", "curl -sN"):
        assert part in done.stdout
    rounds = json.loads((tmp_path / "figures.json").read_text())["rounds"]
    assert [turn["name"] for turn in rounds] == ["off", "fixed EAGLE", "history", "beg"]
    assert all(turn["responses_differing"] == 0 and turn["reward"] == rounds[0]["reward"] for turn in rounds)
    assert rounds[0]["accept_length"] is None and rounds[1]["accept_length"] > 1
    assert rounds[1]["passes"] < rounds[0]["passes"]
