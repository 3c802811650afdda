"""`tlt bench cycle`: cycles of drafting, verifying and accepting; milliseconds, tokens per second,
accept length, idle GPU.

Cycles are timed after random prompts of 128 tokens, up to 512 tokens later, as in `tlt bench
decode`; acceptance there says little. A drafter's worth is timed on the demo task, at batch 1: one
problem after another, each to its end, without the prompt and the first cycles. `--context` adds
one request after a long prompt. `--capture` times all of it again on an engine that captures the
states of these requests for a trainer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tlt_server.bench.record import finish, wide_console
from tlt_server.bench.settings import heading, own, settings_of
from tlt_server.bench.steps import PROBLEM, Row, StepCase, longest, measure
from tlt_server.bench.tables import CYCLE, show
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.samples.ring import make_ring
from tlt_server.wire.records import Strategy

TREE, CHAIN = Strategy("eagle", 7, 4, 32), Strategy("eagle", 7, 1, 8)
MAX_TREES = 2  # requests that the tree's rows are affordable for
RING_BYTES, FEATURE_BYTES = 2**26, 2**32  # bounds of the captured states
BY_CAPTURE = {**CYCLE, "captured": "{captured}"}


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
    batches = args.batch or args.batches[args.quick]
    settings = settings_of(args, max_running=max(batches))
    if settings.drafter_directory is None:
        raise StartupError(
            f"--drafter is {settings.drafter}; cycles are timed with a network: name its directory"
        )
    settings = replace(
        settings,
        max_model_len=longest(settings.model, args.context),
        max_rows=4096 if args.device == "cuda" else 512,
    )
    cases = [
        case._replace(strategy=own(case.strategy, settings))
        for case in cases_of(batches, args.context)
    ]
    with TemporaryDirectory() as directory:
        kinds: list[tuple[Row, EngineSettings]] = [({"captured": False}, settings)]
        if args.capture:
            kinds.append(({"captured": True}, capturing(settings, Path(directory))))
        rows, _ = measure(args, kinds, cases)
    if args.capture:
        add_slowdown(rows)
    bench = "capture" if args.capture else "cycle"
    figures = heading(args, bench, settings) | {"rows": rows}
    title = "tlt bench cycle: draft, verify, accept; medians"
    show(wide_console(), title, BY_CAPTURE, rows)
    finish(args, figures)
    return 0


def cases_of(batches: tuple[int, ...], context: int | None) -> list[StepCase]:
    cases = [
        StepCase(batch, strategy)
        for batch in batches
        for strategy in ((TREE, CHAIN) if batch <= MAX_TREES else (CHAIN,))
    ]
    alone = (PROBLEM, context) if context else (PROBLEM,)
    return cases + [StepCase(1, strategy, prompt) for prompt in alone for strategy in (TREE, CHAIN)]


def capturing(settings: EngineSettings, directory: Path) -> EngineSettings:
    """Return the settings of an engine that captures into rings without a reader: the timing ends
    before they are full.
    """
    samples, features = directory / "samples", directory / "features"
    make_ring(samples, RING_BYTES)
    make_ring(features, RING_BYTES)
    return replace(
        settings, sample_ring=samples, feature_ring=features, feature_bytes=FEATURE_BYTES
    )


def add_slowdown(rows: list[Row]) -> None:
    """Add the slowdown by capture to the rows with capture."""
    plain, captured = ([r for r in rows if r["captured"] == kind] for kind in (False, True))
    for before, row in zip(plain, captured, strict=True):
        row["slowdown_percent"] = round(100 * (row["step_ms"] / before["step_ms"] - 1), 2)
