"""Compare GRPO runs bit by bit, and their times step by step.

    python -m examples.grpo.compare --steps 5 --out build/grpo
    python -m examples.grpo.compare build/7b/off build/7b/frozen --from-step 10

Without runs it makes them first, below `--out`: one for each `--speculation`, with the options of
`examples.grpo.train`; those that were stopped go on. Exit status 1 where a token, a log-prob, a
reward or a weight differs. Times are those of rollout and pushes, without the policy's update, the
drafter's training and padding. `ratio` is the first run's time over another's at the same step, the
median over steps, with the interval that holds 90 % of medians over resampled steps.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.grpo.adapt import ADAPTATIONS
from examples.grpo.record import differences
from examples.grpo.train import arguments, train
from tlt_server.bench.record import entry_of, without_folder, write_entry

PARTS = ("rollout_s", "push_s", "drafter_push_s")
RESAMPLES = 2000


def made(asked: argparse.Namespace) -> list[Path]:
    """Run the steps once with each kind of speculation; return the directories."""
    root, runs, asked.resume = asked.out, [], True
    for asked.speculation in ADAPTATIONS:
        asked.out = root / asked.speculation
        print(f"speculation {asked.speculation}, into {asked.out}", flush=True)
        train(asked)
        runs.append(asked.out)
    return runs


def times(runs: Sequence[Path], first_step: int) -> list[dict[str, Any]]:
    """Return a row per run. `ValueError` if a run lacks such steps, or has other steps than the
    others.
    """
    steps = [[line for line in lines_of(run) if line["step"] >= first_step] for run in runs]
    if len(set(map(len, steps))) > 1 or not steps[0]:
        raise ValueError(f"runs have {[*map(len, steps)]} steps from {first_step} on; all need one")
    total_S = [np.array([sum(line[part] for part in PARTS) for line in lines]) for lines in steps]
    rows = []
    for run, lines, own_S in zip(runs, steps, total_S, strict=True):
        ratio_S = total_S[0] / own_S
        drawn_NS = np.random.default_rng(0).choice(ratio_S, (RESAMPLES, len(ratio_S)))
        interval = np.quantile(np.median(drawn_NS, axis=1), [0.05, 0.95])
        names = (*PARTS, "policy_s", "drafter_s", "accept_length")
        row = {
            "run": run.name,
            "steps": len(lines),
            **{name: median(lines, name) for name in names},
            "total_s": round(float(np.median(own_S)), 4),
            "ratio": round(float(np.median(ratio_S)), 3),
            "interval": [round(float(end), 3) for end in interval],
        }
        rows.append(row)
    return rows


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Return a run's steps. `ValueError` if it has none."""
    path = run / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        raise ValueError(f"{run} has no steps; name a directory of examples.grpo.train")
    return lines


def median(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line[name] is not None]
    return round(float(np.median(values)), 4) if values else None


def parsed(flags: Sequence[str]) -> argparse.Namespace:
    parser = arguments(needs_out=False)
    parser.prog, parser.description = "python -m examples.grpo.compare", __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="[default: made here]")
    parser.add_argument("--from-step", type=int, default=0, help="first step that counts")
    parser.add_argument("--json", type=Path, help="also write a file like those of tlt bench")
    parser.add_argument("--commit", help="of the code that runs [default: what git says]")
    parser.add_argument("--note", help="what a reader has to know of the runs")
    asked = parser.parse_args(flags)
    if bool(asked.runs) == bool(asked.out):
        parser.error("name runs to compare, or a directory for new ones by --out")
    return asked


def main(flags: Sequence[str]) -> int:
    asked = parsed(flags)
    runs = asked.runs or made(asked)
    found = {run: differences(runs[0], run) for run in runs[1:]}
    for run, differing in found.items():
        print(f"{runs[0]} and {run}: {', '.join(differing[:8]) or 'the same bits'}")
    rows = times(runs, asked.from_step)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if asked.json:
        figures = {"bench": "grpo", "first_step": asked.from_step, "rows": rows}
        words = ["python", "-m", "examples.grpo.compare", *map(without_folder, flags)]
        entry = entry_of(figures, shlex.join(words), on_gpu=True, commit=asked.commit)
        write_entry(asked.json, entry | ({"note": asked.note} if asked.note else {}))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
