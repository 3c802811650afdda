"""Plots of a replay (PNG): the course of the rollout under each policy, and how reliable predicted
survivals were.

matplotlib is optional; only `--plots` needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tlt_server.bench.replaying.simulated import ReplayResult
from tlt_server.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOWS = 120  # over which tokens per second are averaged
DEPTHS = 7  # curves of one drafter, at most


def check_plots() -> None:
    """Refuse what cannot be drawn before a replay takes its time."""
    if find_spec("matplotlib") is None:
        raise StartupError(
            "--plots needs matplotlib, which is not installed; install it with pip install "
            "matplotlib, or leave the flag out"
        )


def draw(found: Mapping[str, ReplayResult], directory: Path) -> list[Path]:
    """Draw all policies; return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, replayed in found.items():
        slug = re.sub(r"[^a-z0-9]+", "-", name)
        files.append(_course(name, replayed, directory / f"rollout-{slug}.png"))
        if replayed.reliability.drafters:
            files.append(_reliability(name, replayed, directory / f"reliability-{slug}.png"))
    return files


def _course(name: str, replayed: ReplayResult, file: Path) -> Path:
    """Draw batch size, strategy, rows and tokens per second over the rollout."""
    cycles = [each.cycle for each in replayed.cycles]
    seconds_C = np.array([cycle.step_s for cycle in cycles])
    end_C = np.cumsum(seconds_C)
    start_C = end_C - seconds_C
    shapes = sorted({cycle.strategy.shape for cycle in cycles}, key=lambda s: (s != "off", s))
    shape_C = np.array([shapes.index(cycle.strategy.shape) for cycle in cycles])
    figure, axes = _subplots(4, 1, figsize=(10, 8), sharex=True)
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
    return _saved(figure, title, file)


def _reliability(name: str, replayed: ReplayResult, file: Path) -> Path:
    """Draw the share of nodes that were accepted over their predicted survival."""
    known = replayed.reliability
    errors = known.errors()
    figure, axes = _subplots(1, len(errors), figsize=(5 * len(errors), 4.8), squeeze=False)
    for axis, (drafter, error) in zip(axes[0], errors.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="grey", linewidth=1)
        curves = [*known.curves(drafter)]
        for at in sorted({*np.linspace(0, len(curves) - 1, DEPTHS).astype(int)} if curves else ()):
            curve = curves[at]
            label = f"depth {curve.depth}, {curve.nodes_B.sum():.0f} nodes"
            axis.plot(curve.predicted_B, curve.accepted_B, marker="o", markersize=3, label=label)
        axis.set_title(f"{drafter}: mean error {error:.1%}")
        axis.set_xlabel("predicted survival")
        axis.set_ylabel("share accepted")
        if curves:
            axis.legend(frameon=False, fontsize=8)
    return _saved(figure, f"Reliability of survivals, {name}", file)


def _subplots(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, layout="constrained", **options)
    return figure, axes


def _saved(figure: Any, title: str, file: Path) -> Path:
    from matplotlib import pyplot

    figure.suptitle(title)
    axis: Axes
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return file
