"""Plot accept length, reward, seconds and acceptance by draft position of runs, from their
`steps.jsonl`.

python -m examples.grpo.plots build/grpo/off build/grpo/adaptive --out runs.png
"""

from __future__ import annotations

import argparse
import json
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

ENDS = 5  # steps at a run's begin and end whose acceptance by position is shown
TIMES = ("rollout_s", "push_s", "drafter_s", "drafter_push_s", "policy_s")


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Return a run's steps. `ValueError`: it has none."""
    path = run / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        raise ValueError(f"{run} has no steps; name a directory of examples.grpo.train")
    return lines


def by_position(lines: list[dict[str, Any]]) -> list[float]:
    """Return the share of cycles that accept each draft position, the mean over steps."""
    rows = [line["accepted_at_depth"] for line in lines if line["accepted_at_depth"]]
    return [fmean(shares) for shares in zip_longest(*rows, fillvalue=0.0)]


def plot(runs: list[Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes_22 = pyplot.subplots(2, 2, figsize=(12, 7))
    lengths, rewards, seconds, positions = axes_22.flat
    for run in runs:
        lines = lines_of(run)
        steps = [line["step"] + 1 for line in lines]
        if any(line["accept_length"] is not None for line in lines):
            lengths.plot(steps, [line["accept_length"] for line in lines], label=run.name)
        rewards.plot(steps, [line["reward"] for line in lines], label=run.name, alpha=0.7)
        times = [sum(line.get(name, 0.0) for name in TIMES) for line in lines]
        (drawn,) = seconds.plot(steps, times, label=run.name)
        for part, style, when in ((lines[:ENDS], "--", "first"), (lines[-ENDS:], "-", "last")):
            accepted = by_position(part)
            positions.plot(
                range(1, len(accepted) + 1),
                accepted,
                style,
                color=drawn.get_color(),
                label=f"{run.name}, {when} {len(part)} steps",
            )
    for axes, name, unit in (
        (lengths, "accept length", "RL step"),
        (rewards, "mean reward", "RL step"),
        (seconds, "seconds, all parts", "RL step"),
        (positions, "share of cycles that accept", "draft position"),
    ):
        axes.set_xlabel(unit)
        axes.set_title(name)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=80)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.grpo.plots", description="Plot runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    asked = parser.parse_args()
    plot(asked.runs, asked.out)
