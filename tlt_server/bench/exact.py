"""`tlt bench exact`: the same seeded requests under every kind of strategy, batch, memory and chunking; all bits must agree.

One reference run without speculation, then a pairwise covering array of the other settings. Compared are the tokens and
the bits of every log-prob. `--plant-fault` moves one logit by one ulp in thirty steps of one run, to show that the check can fail.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tlt_server.bench.covering import Configuration, covering_array
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.environment import library_environment
from tlt_server.records import GenerateRequest, Strategy, Submit

ARMS: dict[str, tuple[str, Strategy | None]] = {
    "off": ("off", None),
    "eagle small": ("fixed", Strategy("eagle", 3, 2, 4)),
    "eagle medium": ("fixed", Strategy("eagle", 7, 4, 16)),
    "eagle large": ("fixed", Strategy("eagle", 10, 6, 48)),
    "history": ("fixed", Strategy("history", 8, 3, 12)),
    "beg": ("beg", None),
}
FACTORS: dict[str, tuple[object, ...]] = {"arm": tuple(ARMS), "batch": (1, 7, 64), "pages": ("ample", "scarce"), "chunk": (16, 512)}
REFERENCE: Configuration = {"arm": "off", "batch": 64, "pages": "ample", "chunk": 512}


class Size(NamedTuple):
    requests: int
    max_tokens: int
    long: int  # of the requests, so many may take long_tokens
    long_tokens: int
    alone: int  # requests at batch 1


FULL = Size(512, 256, 16, 2000, 32)
QUICK = Size(48, 48, 2, 256, 6)


class Bits(NamedTuple):
    """What a run said of one request."""

    tokens: list[int]
    logprobs: bytes  # float32


class Result(NamedTuple):
    configuration: Configuration
    requests: int
    tokens: int
    passes: int
    preemptions: int
    seconds: float
    differing_tokens: int
    differing_logprobs: int

    @property
    def scarce(self) -> bool:
        """Pages were to run out: a sequence alone always fits."""
        return self.configuration["pages"] == "scarce" and self.configuration["batch"] != 1


def run(args: argparse.Namespace) -> int:
    """0 if nothing differs (and pages did run out where they were to), 1 otherwise; prints a table and one line of JSON."""
    os.environ.update(library_environment())  # before torch is imported
    from tlt_server.demo.workload import problems_as_requests

    size = QUICK if args.quick else FULL
    base = settings_of(args)
    requests = [
        with_length(request, i, size)
        for i, request in enumerate(problems_as_requests(base.model, size.requests, group=8, seed=args.seed))
    ]
    configurations = covering_array(FACTORS, args.seed)
    console = wide_console()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("reference", total=len(configurations) + 1)
        reference, _ = rollout(base, REFERENCE, requests, size)
        progress.advance(task)
        results = []
        for i, configuration in enumerate(configurations):
            progress.update(task, description=" ".join(str(level) for level in configuration.values()))
            chosen = requests[: size.alone] if configuration["batch"] == 1 else requests
            fault = args.plant_fault and i == 0
            started = time.perf_counter()
            found, counts = rollout(base, configuration, chosen, size, fault=fault)
            results.append(compare(configuration, reference, found, counts, time.perf_counter() - started))
            progress.advance(task)
    return report(console, results, args)


def settings_of(args: argparse.Namespace) -> EngineSettings:
    from tlt_server.demo.workload import DRAFTER, TARGET

    threads = args.threads or len(os.sched_getaffinity(0))
    on_gpu = args.device == "cuda"
    return EngineSettings(
        model=str(args.model or TARGET), drafter=str(args.drafter or DRAFTER), threads=threads, device=args.device,
        dtype=args.dtype or ("bfloat16" if on_gpu else "float32"), attention="triton" if on_gpu else "cpu", numerics=args.numerics,
        kv_memory_mb=0 if on_gpu else 2048)


def wide_console() -> Console:
    """The terminal, or 150 columns where output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


def with_length(request: GenerateRequest, i: int, size: Size) -> GenerateRequest:
    """One request in requests / long writes all of `long_tokens`, so that long ones run side by side and press on the pages."""
    is_long = i % (size.requests // size.long) == 0
    changed = msgspec.structs.replace(request.sampling, max_tokens=size.long_tokens if is_long else size.max_tokens, ignore_eos=is_long)
    return msgspec.structs.replace(request, sampling=changed)


def pages_for(configuration: Configuration, requests: list[GenerateRequest], size: Size, page_size: int) -> int:
    """Ample: 0, the engine's own choice. Scarce: the longest request fits, but a full batch of them does not."""
    if configuration["pages"] == "ample":
        return 0
    longest = -(-max(len(r.token_ids) + r.sampling.max_tokens for r in requests) // page_size)
    usual = -(-(max(len(r.token_ids) for r in requests) + size.max_tokens // 4) // page_size)
    return max(longest, usual * int(str(configuration["batch"])) // 5)


def rollout(
    base: EngineSettings, configuration: Configuration, requests: list[GenerateRequest], size: Size, *, fault: bool = False
) -> tuple[dict[str, Bits], dict[str, float]]:
    """Run all requests on a fresh engine of this process; what each said, and the run's counts."""
    from tlt_server.engine.assembly import assemble

    policy, strategy = ARMS[str(configuration["arm"])]
    engine, _ = assemble(
        msgspec.structs.replace(
            base,
            policy=policy,
            strategy=strategy,
            max_running=int(str(configuration["batch"])),
            max_rows=int(str(configuration["chunk"])),
            pages=pages_for(configuration, requests, size, base.page_size),
        )
    )
    if fault:
        engine.runner.sample = one_ulp_off(engine.runner.sample)  # type: ignore[attr-defined]
    engine.send(Submit(requests))
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    logprobs: dict[str, list[float]] = {r.id: [] for r in requests}
    passes = 0
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, f"{output.id}: {output.error}"
            tokens[output.id] += output.token_ids
            logprobs[output.id] += output.logprobs
        passes += engine.last_cycle is not None
    engine.scheduler.check()
    found = {i: Bits(tokens[i], np.array(logprobs[i], np.float32).tobytes()) for i in tokens}
    return found, {"passes": passes, "preemptions": engine.scheduler.preemptions}


def one_ulp_off(sample: Callable[..., Any]) -> Callable[..., Any]:
    """The sampler behind a fault: in thirty calls the logit of row 0's token is one ulp higher than the model said.

    Row 0 is a root, so its token is always emitted. Thirty, because a single ulp may vanish when the log-prob is rounded.
    """
    calls = 0

    def faulty(logits_SV: Any, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if 10 <= calls < 40 and len(logits_SV):
            token = int(sample(logits_SV, *rest).token_S[0])
            logits_SV[0, token] = float(np.nextafter(np.float32(logits_SV[0, token]), np.float32(np.inf)))
        return sample(logits_SV, *rest)

    return faulty


def compare(
    configuration: Configuration, reference: dict[str, Bits], found: dict[str, Bits], counts: dict[str, float], seconds: float
) -> Result:
    differing_tokens = differing_logprobs = 0
    for i, bits in found.items():
        expected = reference[i]
        differing_tokens += sum(a != b for a, b in zip(bits.tokens, expected.tokens, strict=False)) + abs(
            len(bits.tokens) - len(expected.tokens)
        )
        mine, theirs = (np.frombuffer(b.logprobs, np.uint32) for b in (bits, expected))
        common = min(len(mine), len(theirs))
        differing_logprobs += int((mine[:common] != theirs[:common]).sum()) + abs(len(mine) - len(theirs))
    return Result(
        configuration,
        len(found),
        sum(len(b.tokens) for b in found.values()),
        int(counts["passes"]),
        int(counts["preemptions"]),
        seconds,
        differing_tokens,
        differing_logprobs,
    )


def report(console: Console, results: list[Result], args: argparse.Namespace) -> int:
    table = Table(title="tlt bench exact: against one run without speculation")
    for heading in (
        "strategy",
        "batch",
        "pages",
        "chunk",
        "requests",
        "tokens",
        "passes",
        "preempted",
        "seconds",
        "tokens differ",
        "log-prob bits differ",
    ):
        table.add_column(heading, justify="left" if heading in ("strategy", "pages") else "right")
    for r in results:
        red = "bold red" if r.differing_tokens or r.differing_logprobs or (r.scarce and not r.preemptions) else ""
        table.add_row(
            *(str(level) for level in r.configuration.values()),
            str(r.requests),
            str(r.tokens),
            str(r.passes),
            str(r.preemptions),
            f"{r.seconds:.1f}",
            str(r.differing_tokens),
            str(r.differing_logprobs),
            style=red,
        )
    console.print(table)
    summary = {
        "bench": "exact",
        "quick": bool(args.quick),
        "configurations": len(results),
        "requests": sum(r.requests for r in results),
        "tokens": sum(r.tokens for r in results),
        "preemptions": sum(r.preemptions for r in results),
        "seconds": round(sum(r.seconds for r in results), 1),
        "scarce_without_preemption": sum(r.scarce and not r.preemptions for r in results),
        "differing_tokens": sum(r.differing_tokens for r in results),
        "differing_logprob_bits": sum(r.differing_logprobs for r in results),
    }
    line = msgspec.json.encode(summary).decode()
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return 1 if summary["differing_tokens"] or summary["differing_logprob_bits"] or summary["scarce_without_preemption"] else 0
