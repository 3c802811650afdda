"""Sections about pushes of weights."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.markdown import Figures, table

ON_CPU = {
    "MB": "{mb:.0f}",
    "channel": "{channel}",
    "seconds": "{push_s:.2f}",
    "against a copy": "{ratio:.2f}x",
    "while decoding": "{push_while_decoding_s:.2f}",
    "longest pause, ms": "{longest_pause_ms:.2f}",
}
ON_GPU = {
    "channel": "{channel}",
    "GB": "{gb:.1f}",
    "staged, s": "{staged_s:.2f}",
    "GB/s": "{gb_per_s:.1f}",
    "live, s": "{push_s:.2f}",
    "pause at commit, ms": "{pause_ms:.1f}",
    "gap, ms": "{longest_gap_ms:.1f}",
    "token, ms": "{step_ms:.2f}",
    "token while staging, ms": "{step_while_staging_ms:.2f}",
}


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
    rows = (r for r in figures["rows"] if r["bytes"] == largest)
    yield table(ON_CPU, ({**r, "mb": r["bytes"] / 1e6} for r in rows))


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
    yield table(ON_GPU, ({**r, "gb": r["bytes"] / 1e9} for r in figures["rows"]))
