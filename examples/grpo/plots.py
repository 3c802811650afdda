"""Plot accept length, reward and seconds per step of runs, from their `steps.jsonl`.

python -m examples.grpo.plots build/grpo/off build/grpo/adaptive --out runs.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TIMES = ("rollout_s", "push_s", "drafter_s", "drafter_push_s", "policy_s")


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Return a run's steps. `ValueError`: it has none."""
    path = run / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        raise ValueError(f"{run} has no steps; name a directory of examples.grpo.train")
    return lines


def plot(runs: list[Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (lengths, rewards, seconds) = pyplot.subplots(1, 3, figsize=(15, 4))
    for run in runs:
        lines = lines_of(run)
        steps = [line["step"] + 1 for line in lines]
        if any(line["accept_length"] is not None for line in lines):
            lengths.plot(steps, [line["accept_length"] for line in lines], label=run.name)
        rewards.plot(steps, [line["reward"] for line in lines], label=run.name, alpha=0.7)
        times = [sum(line.get(name, 0.0) for name in TIMES) for line in lines]
        seconds.plot(steps, times, label=run.name)
    for axes, name in (
        (lengths, "accept length"),
        (rewards, "mean reward"),
        (seconds, "seconds, all parts"),
    ):
        axes.set_xlabel("RL step")
        axes.set_title(name)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.grpo.plots", description="Plot runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    asked = parser.parse_args()
    plot(asked.runs, asked.out)
