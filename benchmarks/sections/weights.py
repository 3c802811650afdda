"""Sections about pushes of weights."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.markdown import table
from benchmarks.sections.figures import Figures


def weights(figures: Figures) -> Iterator[str]:
    """Tabulate the pushes of the largest checkpoint; the file has all."""
    largest = max(r["bytes"] for r in figures["rows"])
    yield (
        f"Medians of {figures['rounds']} interleaved rounds, from the trainer's call until the "
        "weights are live, spooled and synced (`--state-dir`). The copy is of the same bytes on "
        "the same disk, synced."
    )
    yield (
        f"Last two columns: {figures['rounds']} more such rounds while {figures['requests']} "
        "requests decode on the same cores; the pause is the longest time at a commit in which no "
        "step could start."
    )
    yield table(
        ("MB", "channel", "seconds", "against a copy", "while decoding", "longest pause, ms"),
        (
            (
                f"{r['bytes'] / 1e6:.0f}",
                r["channel"],
                f"{r['push_s']:.2f}",
                f"{r['ratio']:.2f}x",
                f"{r['push_while_decoding_s']:.2f}",
                f"{r['longest_pause_ms']:.2f}",
            )
            for r in figures["rows"]
            if r["bytes"] == largest
        ),
    )


def weights_gpu(figures: Figures) -> Iterator[str]:
    spooling = (
        "With `--state-dir`, so every push is also spooled and synced."
        if figures.get("spooled")
        else "Without `--state-dir`, so nothing is spooled."
    )
    yield (
        f"Medians of {figures['rounds']} pushes out of a trainer's GPU memory, while "
        f"{figures['rows'][0]['requests']:.0f} requests decode. {spooling} By ipc trainer and "
        "engine share a GPU, by nccl each has one. Staged: from the first byte until every tensor "
        "has been checked. The gap is the longest wait for a token of any request at these commits."
    )
    headings = (
        "channel",
        "GB",
        "staged, s",
        "GB/s",
        "live, s",
        "pause at commit, ms",
        "gap, ms",
        "token, ms",
        "token while staging, ms",
    )
    yield table(
        headings,
        (
            (
                r["channel"],
                f"{r['bytes'] / 1e9:.1f}",
                f"{r['staged_s']:.2f}",
                f"{r['gb_per_s']:.1f}",
                f"{r['push_s']:.2f}",
                f"{r['pause_ms']:.1f}",
                f"{r['longest_gap_ms']:.1f}",
                f"{r['step_ms']:.2f}",
                f"{r['step_while_staging_ms']:.2f}",
            )
            for r in figures["rows"]
        ),
    )
