"""Plots of a replay (PNG): the course of the rollout under each policy.

matplotlib is optional; only `--plots` needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tlt_server.bench.replaying.simulated import ReplayResult
from tlt_server.errors import StartupError

WINDOWS = 120  # over which tokens per second are averaged


def check_plots() -> None:
    """Raise `StartupError` early if plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise StartupError(
            "--plots needs matplotlib, which is not installed; install it with pip install "
            "matplotlib, or leave the flag out"
        )


def draw(found: Mapping[str, ReplayResult], directory: Path) -> list[Path]:
    """Draw all policies; return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    slugs = {name: re.sub(r"[^a-z0-9]+", "-", name) for name in found}
    return [
        _course(name, replayed, directory / f"rollout-{slugs[name]}.png")
        for name, replayed in found.items()
    ]


def _course(name: str, replayed: ReplayResult, file: Path) -> Path:
    """Draw batch size, strategy, rows and tokens per second over the rollout."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cycles = [each.cycle for each in replayed.cycles]
    seconds_C = np.array([cycle.step_s for cycle in cycles])
    end_C = np.cumsum(seconds_C)
    start_C = end_C - seconds_C
    shapes = sorted({cycle.strategy.shape for cycle in cycles}, key=lambda s: (s != "off", s))
    shape_C = np.array([shapes.index(cycle.strategy.shape) for cycle in cycles])
    figure, axes = pyplot.subplots(4, 1, figsize=(10, 8), sharex=True, layout="constrained")
    batch, strategy, rows, rate = axes
    batch.step(start_C, [cycle.context.decoding for cycle in cycles], where="post")
    batch.set_ylabel("sequences that decode")
    strategy.hlines(shape_C, start_C, end_C, linewidth=6)
    strategy.set_yticks(range(len(shapes)), shapes)
    strategy.set_ylim(len(shapes) - 0.5, -0.5)
    strategy.set_ylabel("strategy")
    rows.step(start_C, [cycle.rows for cycle in cycles], where="post", label="read")
    rows.step(start_C, [cycle.drafted for cycle in cycles], where="post", label="of drafts")
    rows.legend(frameon=False)
    rows.set_ylabel("rows of a step")
    edges = np.linspace(0, end_C[-1], WINDOWS + 1)
    known = np.interp(edges, [0, *end_C], [0, *np.cumsum([cycle.emitted for cycle in cycles])])
    rate.stairs(np.diff(known) / np.diff(edges), edges)
    rate.set_ylabel("tokens/s")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("seconds, by the cost model")
    title = f"{name}: {end_C[-1]:.3f} s, {replayed.tokens / end_C[-1]:.0f} tokens/s"
    figure.suptitle(title)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return file
