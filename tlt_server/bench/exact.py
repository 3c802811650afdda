"""`tlt bench exact`: the same seeded requests under every kind of strategy, batch, memory and
chunking; all bits must agree.

One reference run without speculation, then a pairwise covering array of the other settings.
Compared are the tokens and the bits of every log-prob, of prompts too where they are asked for.
Many requests have penalties, biases, min_tokens or prompt log-probs. `--plant-fault` moves logits
by one ulp in thirty steps of one run, to show that the check can fail. With `--numerics fast`,
which promises no such thing, the rate of differing tokens is reported and nothing fails.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from tlt_server.bench.covering import Configuration, covering_array
from tlt_server.bench.engines import LoadedOnce, release
from tlt_server.bench.faults import planted
from tlt_server.bench.record import finish, progress_bar, wide_console
from tlt_server.bench.settings import at_most_what_it_takes, described, settings_of
from tlt_server.commands import Submit
from tlt_server.engine.assembly import assemble
from tlt_server.engine.settings import EngineSettings
from tlt_server.records import GenerateRequest, Strategy
from tlt_server.shared_settings import PolicyName

Arms = Mapping[str, tuple[PolicyName, Strategy | None]]  # name -> policy, its one strategy
Factors = Mapping[str, tuple[object, ...]]


class ExactSize(NamedTuple):
    requests: int
    max_tokens: int
    long: int  # requests that may take long_tokens
    long_tokens: int
    alone: int  # requests at batch 1


class Plan(NamedTuple):
    """The comparisons made on a kind of device."""

    arms: Arms
    factors: Factors
    reference: Configuration
    full: ExactSize
    quick: ExactSize
    max_model_len: int  # 0: the model's own


ON_CPU: Arms = {
    "off": ("off", None),
    "eagle small": ("fixed", Strategy("eagle", 3, 2, 4)),
    "eagle medium": ("fixed", Strategy("eagle", 7, 4, 16)),
    "eagle large": ("fixed", Strategy("eagle", 10, 6, 48)),
    "history": ("fixed", Strategy("history", 8, 3, 12)),
    "beg": ("beg", None),
    "goodput": ("goodput", None),
}
ON_GPU: Arms = {
    "off": ("off", None),
    "eagle chain": ("fixed", Strategy("eagle", 7, 1, 8)),
    "eagle tree": ("fixed", Strategy("eagle", 7, 4, 32)),
    "eagle large": ("fixed", Strategy("eagle", 10, 8, 64)),
    "history": ("fixed", Strategy("history", 12, 2, 16)),
    "beg": ("beg", None),
    "goodput": ("goodput", None),
}
PLANS = {
    "cpu": Plan(
        ON_CPU,
        {
            "arm": tuple(ON_CPU),
            "batch": (1, 7, 64),
            "pages": ("ample", "scarce"),
            "chunk": (16, 512),
        },
        {"arm": "off", "batch": 64, "pages": "ample", "chunk": 512},
        ExactSize(512, 256, 16, 2000, 32),
        ExactSize(48, 48, 2, 256, 6),
        0,
    ),
    # The smaller chunk leaves 16 prompt rows next to a full batch; the full size takes minutes
    # for a 7B model.
    "cuda": Plan(
        ON_GPU,
        {
            "arm": tuple(ON_GPU),
            "batch": (1, 7, 64),
            "pages": ("ample", "scarce"),
            "chunk": (80, 1024),
        },
        {"arm": "off", "batch": 64, "pages": "ample", "chunk": 1024},
        ExactSize(192, 128, 4, 600, 12),
        ExactSize(48, 48, 2, 256, 6),
        2048,
    ),
}
PLANS["interpreter"] = PLANS["cuda"]


# The requests take these in turn. They are seven, so that long requests are of different kinds.
KINDS: tuple[dict[str, object], ...] = (
    {},
    {"repetition_penalty": 1.05, "presence_penalty": 0.1},
    {"prompt_logprobs": 0},
    {},
    {"frequency_penalty": 0.2, "temperature": 0.0},
    {"logit_bias": dict.fromkeys(range(8), 0.5), "min_tokens": 24},
    {"presence_penalty": -0.3, "top_p": 0.95, "min_tokens": 12, "prompt_logprobs": 2},
)


class Bits(NamedTuple):
    """The output of one request in one run."""

    tokens: list[int]
    logprobs: bytes  # float32; those of the prompt come first


class Result(NamedTuple):
    configuration: Configuration
    requests: int
    tokens: int
    passes: int
    preemptions: int
    seconds: float
    differing_tokens: int
    differing_logprobs: int
    differing_responses: int

    @property
    def scarce(self) -> bool:
        """Pages were to run out: a sequence alone always fits."""
        return self.configuration["pages"] == "scarce" and self.configuration["batch"] != 1


def run(args: argparse.Namespace) -> int:
    """0 if nothing differs (and pages did run out where they were to), 1 otherwise; prints a table
    and one line of JSON.
    """
    from tlt_server.demo.workload import problems_as_requests

    plan = PLANS[args.device]
    size = plan.quick if args.quick else plan.full
    base = settings_of(args)
    if plan.max_model_len:
        base = replace(base, max_model_len=at_most_what_it_takes(base.model, plan.max_model_len))
    requests = [
        varied(with_length(request, i, size), i)
        for i, request in enumerate(
            problems_as_requests(base.model, size.requests, group=8, seed=args.seed)
        )
    ]
    configurations = covering_array(plan.factors, args.seed)
    source = LoadedOnce()
    console = wide_console()
    with progress_bar(console) as progress:
        task = progress.add_task("reference", total=len(configurations) + 1)
        reference, _ = rollout(base, plan.reference, requests, size, source=source)
        progress.update(task, advance=1)
        results = []
        for i, configuration in enumerate(configurations):
            progress.update(
                task, description=" ".join(str(level) for level in configuration.values())
            )
            chosen = requests[: size.alone] if configuration["batch"] == 1 else requests
            fault = args.plant_fault and i == 0
            started = time.perf_counter()
            found, counts = rollout(base, configuration, chosen, size, fault=fault, source=source)
            results.append(
                compare(configuration, reference, found, counts, time.perf_counter() - started)
            )
            progress.update(task, advance=1)
    return report(console, results, base, args)


def with_length(request: GenerateRequest, i: int, size: ExactSize) -> GenerateRequest:
    """One request in requests / long writes all of `long_tokens`, so that long ones run side by
    side and press on the pages.
    """
    is_long = i % (size.requests // size.long) == 0
    changed = msgspec.structs.replace(
        request.sampling,
        max_tokens=size.long_tokens if is_long else size.max_tokens,
        ignore_eos=is_long,
    )
    return msgspec.structs.replace(request, sampling=changed)


def varied(request: GenerateRequest, i: int) -> GenerateRequest:
    """Return the request with the edits of logits and the scores that its turn has."""
    changed = msgspec.structs.replace(request.sampling, **KINDS[i % len(KINDS)])
    return msgspec.structs.replace(request, sampling=changed)


def pages_for(
    configuration: Configuration, requests: list[GenerateRequest], size: ExactSize, page_size: int
) -> int | None:
    """Return the number of pages. Ample: None, the engine's own choice. Scarce: the longest request
    fits, but a full batch of them does not.
    """
    if configuration["pages"] == "ample":
        return None
    longest = -(-max(len(r.token_ids) + r.sampling.max_tokens for r in requests) // page_size)
    usual = -(-(max(len(r.token_ids) for r in requests) + size.max_tokens // 4) // page_size)
    return max(longest, usual * int(str(configuration["batch"])) // 5)


def rollout(
    base: EngineSettings,
    configuration: Configuration,
    requests: list[GenerateRequest],
    size: ExactSize,
    *,
    fault: bool = False,
    source: LoadedOnce | None = None,
) -> tuple[dict[str, Bits], dict[str, float]]:
    """Run all requests on a fresh engine of this process; return each output and the run's counts.
    `source` holds the weights that engines share.
    """
    policy, strategy = PLANS[str(base.device)].arms[str(configuration["arm"])]
    settings = replace(
        base,
        policy=policy,
        sd_strategy=strategy.name if strategy is not None else "",
        max_running=int(str(configuration["batch"])),
        max_rows=int(str(configuration["chunk"])),
        pages=pages_for(configuration, requests, size, base.page_size),
        graphs=base.graphs and not fault,  # a captured step cannot be told to err
    )
    release()
    engine, _ = assemble(settings, make_device=(source or LoadedOnce()).device)
    engine.send(Submit(requests))
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    logprobs: dict[str, list[float]] = {r.id: [] for r in requests}
    passes = 0
    with planted(engine) if fault else nullcontext():
        while not engine.idle:
            for output in engine.step():
                assert output.error is None, f"{output.id}: {output.error}"
                scored = [each for each in output.prompt_logprobs or [] if each is not None]
                tokens[output.id] += output.token_ids
                logprobs[output.id] += [*(each.logprobs[0] for each in scored), *output.logprobs]
            passes += engine.last_cycle is not None
    engine.scheduler.check()
    found = {i: Bits(tokens[i], np.array(logprobs[i], np.float32).tobytes()) for i in tokens}
    return found, {"passes": passes, "preemptions": engine.scheduler.preemptions}


def compare(
    configuration: Configuration,
    reference: dict[str, Bits],
    found: dict[str, Bits],
    counts: dict[str, float],
    seconds: float,
) -> Result:
    differing_tokens = differing_logprobs = differing_responses = 0
    for i, bits in found.items():
        expected = reference[i]
        differing_responses += bits.tokens != expected.tokens
        differing_tokens += sum(
            a != b for a, b in zip(bits.tokens, expected.tokens, strict=False)
        ) + abs(len(bits.tokens) - len(expected.tokens))
        mine, theirs = (np.frombuffer(b.logprobs, np.uint32) for b in (bits, expected))
        common = min(len(mine), len(theirs))
        differing_logprobs += int((mine[:common] != theirs[:common]).sum()) + abs(
            len(mine) - len(theirs)
        )
    return Result(
        configuration,
        len(found),
        sum(len(b.tokens) for b in found.values()),
        int(counts["passes"]),
        int(counts["preemptions"]),
        seconds,
        differing_tokens,
        differing_logprobs,
        differing_responses,
    )


def report(
    console: Console, results: list[Result], base: EngineSettings, args: argparse.Namespace
) -> int:
    strict = args.numerics == "strict"
    table = Table(title=f"tlt bench exact, {args.numerics}: against one run without speculation")
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
        red = (
            "bold red"
            if strict
            and (r.differing_tokens or r.differing_logprobs or (r.scarce and not r.preemptions))
            else ""
        )
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
    tokens, differing = sum(r.tokens for r in results), sum(r.differing_tokens for r in results)
    summary = {
        "bench": "exact",
        "quick": bool(args.quick),
        **described(base),
        "configurations": len(results),
        "requests": sum(r.requests for r in results),
        "tokens": tokens,
        "preemptions": sum(r.preemptions for r in results),
        "seconds": round(sum(r.seconds for r in results), 1),
        "scarce_without_preemption": sum(r.scarce and not r.preemptions for r in results),
        "differing_tokens": differing,
        "differing_logprob_bits": sum(r.differing_logprobs for r in results),
        "differing_responses": sum(r.differing_responses for r in results),
        "differing_token_rate": round(differing / max(1, tokens), 6),
    }
    finish(args, summary, on_gpu=args.device == "cuda")
    found = (
        summary["differing_tokens"]
        or summary["differing_logprob_bits"]
        or summary["scarce_without_preemption"]
    )
    return 1 if strict and found else 0
