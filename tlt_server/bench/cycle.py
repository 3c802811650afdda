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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import msgspec

from tlt_server.bench.columns import CYCLE
from tlt_server.bench.decode import LONG_NEW, NEW, PROMPT, longest
from tlt_server.bench.engines import LoadedOnce, release
from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.settings import described, settings_of
from tlt_server.bench.steps import random_requests, time_in_turn, time_steps
from tlt_server.bench.tables import show
from tlt_server.engine.loop import Engine
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.errors import StartupError
from tlt_server.samples.ring import make_ring
from tlt_server.wire.records import GenerateRequest, Strategy

TREE, CHAIN = Strategy("eagle", 7, 4, 32), Strategy("eagle", 7, 1, 8)
MAX_TREES = 2  # requests that the tree's rows are affordable for
PROFILED = 20  # steps
LONG_STEPS = 100  # after a long prompt
ANSWER = 256  # tokens of an answer, at most
PROBLEMS = 32
RING_BYTES, FEATURE_BYTES = 2**26, 2**32  # bounds of what is captured
QUICK_PROBLEMS = 4
PROBLEM: Literal["problem"] = "problem"
BY_CAPTURE = {**CYCLE, "captured": "{captured}"}


class CycleCase(NamedTuple):
    batch: int
    strategy: Strategy
    prompt: int | Literal["problem"] = PROMPT  # random tokens, or problems of the task

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {self.strategy.name}, prompt {self.prompt}"


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
    batches = args.batch or args.batches[args.quick]
    settings = settings_of(args)
    if settings.drafter_directory is None:
        raise StartupError(
            f"--drafter is {settings.drafter}; cycles are timed with an EAGLE-3 drafter: "
            "name its directory"
        )
    settings = replace(
        settings,
        max_running=max(batches),
        max_model_len=longest(settings.model, args.context),
        max_rows=4096 if args.device == "cuda" else 512,
    )
    cases = cases_of(batches, args.context)
    console = wide_console()
    total = (1 + bool(args.capture)) * (1 + len(cases))
    with steps(console, total) as step, TemporaryDirectory() as directory:
        kinds = [settings, *([capturing(settings, Path(directory))] if args.capture else [])]
        rows = [
            row
            for kind in kinds
            for row in measure(kind, cases, quick=args.quick, seed=args.seed, on_part=step)
        ]
    if args.capture:
        add_slowdown(rows)
    bench = "capture" if args.capture else "cycle"
    figures = {"bench": bench, "quick": bool(args.quick), **described(settings), "rows": rows}
    show(console, "tlt bench cycle: draft, verify, accept; medians", BY_CAPTURE, rows)
    finish(args, figures, on_gpu=args.device == "cuda")
    return 0


def capturing(settings: EngineSettings, directory: Path) -> EngineSettings:
    """Return the settings of an engine that captures, with rings that no process empties: what is
    timed ends before they are full.
    """
    samples, features = directory / "samples", directory / "features"
    make_ring(samples, RING_BYTES)
    make_ring(features, RING_BYTES)
    return replace(
        settings, sample_ring=samples, feature_ring=features, feature_bytes=FEATURE_BYTES
    )


def add_slowdown(rows: list[dict[str, Any]]) -> None:
    """Add to the rows with capture how much longer their cycles take than without."""
    plain = {(r["batch"], r["strategy"], r["prompt"]): r for r in rows if not r["captured"]}
    for row in rows:
        if row["captured"]:
            before_ms = plain[row["batch"], row["strategy"], row["prompt"]]["step_ms"]
            row["slowdown_percent"] = round(100 * (row["step_ms"] / before_ms - 1), 2)


def cases_of(batches: tuple[int, ...], context: int | None) -> list[CycleCase]:
    cases = [
        CycleCase(batch, strategy)
        for batch in batches
        for strategy in ((TREE, CHAIN) if batch <= MAX_TREES else (CHAIN,))
    ]
    cases += [CycleCase(1, TREE, PROBLEM), CycleCase(1, CHAIN, PROBLEM)]
    return cases + ([CycleCase(1, TREE, context), CycleCase(1, CHAIN, context)] if context else [])


def measure(
    settings: EngineSettings,
    cases: list[CycleCase],
    *,
    quick: bool = False,
    seed: int = 0,
    on_part: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    engine, info = assemble(settings, make_device=LoadedOnce().device)
    fingerprint = msgspec.structs.asdict(info.fingerprint)
    on_part(cases[0].name)
    rows = []
    for done, case in enumerate(cases):
        figures = _measured(engine, settings, case, quick=quick, seed=seed)
        captured = settings.feature_ring is not None
        named = {"prompt": case.prompt, "captured": captured, "fingerprint": fingerprint}
        rows.append({**named, **figures})
        on_part(cases[min(done + 1, len(cases) - 1)].name)
    del engine
    release()
    return rows


def _measured(
    engine: Engine, settings: EngineSettings, case: CycleCase, *, quick: bool, seed: int
) -> dict[str, Any]:
    max_steps = 60 if quick else 400
    if case.prompt == PROBLEM:
        problems = problems_of(settings.model, QUICK_PROBLEMS if quick else PROBLEMS, seed=seed)
        problems = [_recorded(each, settings) for each in problems]
        timed = time_in_turn(engine, problems, case.strategy, max_steps=max_steps)
    else:
        timed = time_steps(
            engine,
            [_recorded(each, settings) for each in _random(case, seed)],
            case.strategy,
            max_steps=max_steps if case.prompt == PROMPT else min(max_steps, LONG_STEPS),
        )
    figures = timed.figures()
    if settings.device == "cuda" and case.prompt != PROBLEM:
        from tlt_server.bench.device_time import profile

        figures |= profile(engine, _random(case, seed + 1), case.strategy, steps=PROFILED).figures()
    return figures


def _recorded(request: GenerateRequest, settings: EngineSettings) -> GenerateRequest:
    return msgspec.structs.replace(request, train=settings.feature_ring is not None)


def _random(case: CycleCase, seed: int) -> list[GenerateRequest]:
    assert isinstance(case.prompt, int)
    return random_requests(
        case.batch, case.prompt, NEW if case.prompt == PROMPT else LONG_NEW, seed=seed
    )


def problems_of(model: Path, count: int, *, seed: int) -> list[GenerateRequest]:
    """Problems of the task, answered to their end."""
    from tlt_server.demo.workload import problems_as_requests

    return problems_as_requests(model, count, group=1, seed=seed, max_tokens=ANSWER)
