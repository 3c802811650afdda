"""Compare the times of runs that made the same tokens, step by step: rollout and pushes, without
the policy's update, the drafter's training and padding.

    python -m examples.grpo.speedup build/runs/off build/runs/frozen build/runs/adaptive

Ratios are of the first run's time to another's at the same step: their median, with the interval
that holds 90 % of medians over resampled steps.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.grpo.plots import lines_of
from examples.grpo.record import differences
from tlt_server.bench.record import entry_of, without_folder, write_entry

PARTS = ("rollout_s", "push_s", "drafter_push_s")
RESAMPLES = 2000


def compare(runs: Sequence[Path], first_step: int) -> list[dict[str, Any]]:
    """Return a row per run. `ValueError` where two runs differ in a bit, or have no such step."""
    steps = [[line for line in lines_of(run) if line["step"] >= first_step] for run in runs]
    if len(set(map(len, steps))) > 1 or not steps[0]:
        raise ValueError(f"runs have {[*map(len, steps)]} steps from {first_step} on; all need one")
    for run in runs[1:]:
        if found := differences(runs[0], run):
            raise ValueError(f"{runs[0]} and {run} differ: {', '.join(found[:4])}")
    total_S = [np.array([sum(line[part] for part in PARTS) for line in lines]) for lines in steps]
    rows = []
    for run, lines, own_S in zip(runs, steps, total_S, strict=True):
        ratio_S = total_S[0] / own_S
        drawn_NS = np.random.default_rng(0).choice(ratio_S, (RESAMPLES, len(ratio_S)))
        low, high = np.quantile(np.median(drawn_NS, axis=1), [0.05, 0.95])
        rows.append(
            {
                "run": run.name,
                "steps": len(lines),
                **{part: median(lines, part) for part in (*PARTS, "policy_s", "drafter_s")},
                "accept_length": median(lines, "accept_length"),
                "total_s": round(float(np.median(own_S)), 4),
                "ratio": round(float(np.median(ratio_S)), 3),
                "interval": [round(float(low), 3), round(float(high), 3)],
            }
        )
    return rows


def median(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line[name] is not None]
    return round(float(np.median(values)), 4) if values else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo.speedup", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--from-step", type=int, default=0, help="first step that counts")
    parser.add_argument("--json", type=Path, help="also write a file like those of tlt bench")
    parser.add_argument("--commit", help="of the code that runs [default: what git says]")
    parser.add_argument("--note", help="what a reader has to know of the runs")
    asked = parser.parse_args()
    found = compare(asked.runs, asked.from_step)
    for row in found:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if asked.json:
        figures = {"bench": "grpo", "first_step": asked.from_step, "rows": found}
        flags = [without_folder(argument) for argument in sys.argv[1:]]
        command = shlex.join(["python", "-m", "examples.grpo.speedup", *flags])
        entry = entry_of(figures, command, on_gpu=True, commit=asked.commit)
        write_entry(asked.json, entry | ({"note": asked.note} if asked.note else {}))
