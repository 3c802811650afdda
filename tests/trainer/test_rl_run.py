"""The record of an RL run: replayed, it gives the server's own counts again, and the table of
frozen, adaptive and late drafters.

40 GRPO steps of the demo's target, norms alone trained, 24 responses each, under one chain of 8
rows. `tests/trainer/small_record.py` keeps such a run. Each adaptive drafter was trained on the ten
steps before and adopted without a test, the late one at the end on the last 25 steps. The start is
in-domain, so there is nothing to gain.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.small_record import drafter_of, target_of
from tlt_server.__main__ import main
from tlt_server.demo.workload import DRAFTER

RECORD = Path(__file__).parent / "rl_run"
TABLE = json.loads((RECORD / "table.json").read_text())
STEPS = [int(step) for step in TABLE["cycles"]]
REPLAYED = (15, 39)
TRAINED = {"adaptive-10": 10, "adaptive-20": 20, "adaptive-30": 30}  # before which step
NAMES = ["frozen", *TRAINED, "late"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """The report of `tlt drafter evaluate --self-check` for each step."""
    root, found = tmp_path_factory.mktemp("rl"), {}
    drafters = [DRAFTER] + [drafter_of(RECORD, name, root / name) for name in NAMES[1:]]
    for step in REPLAYED:
        target, out = target_of(RECORD, step, root / f"target-{step}"), root / f"{step}.json"
        flags = ["--record", RECORD, "--target", target, "--version", f"rl-{step}", "--self-check"]
        flags += ["--width", 1, "--rows", 8, "--threads", 1, "--device", "cpu", "--json", out]
        for drafter in drafters:
            flags += ["--drafter", drafter]
        assert main(["drafter", "evaluate", *map(str, flags)]) == 0
        found[step] = json.loads(out.read_text())["figures"]
    return found


def test_replay_reproduces_the_servers_accepted_counts(reports: dict[int, dict]) -> None:
    checks = [report["self_check"] for report in reports.values()]
    assert sum(check["different"] for check in checks) == 0
    assert sum(check["cycles"] for check in checks) > 500
    others = {"computed by another version of the target"}
    assert all(set(check["not_compared"]) == others for check in checks)


def test_results_table_matches_the_recorded_table(reports: dict[int, dict]) -> None:
    for step, report in reports.items():
        cycles = [row["cycles"] for row in report["rows"]]
        assert cycles[0] == TABLE["cycles"][str(step)][0]
        # Weights of the others are multiplied out here; a last bit may differ by machine.
        assert cycles == pytest.approx(TABLE["cycles"][str(step)], rel=0.01)
