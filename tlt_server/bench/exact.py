"""`tlt bench exact`: the same seeded requests under every kind of strategy, batch, memory and
chunking; all bits must agree.

One reference run without speculation, then a pairwise covering array of the other settings. One
engine serves all runs of a batch, since a start takes longer than a run: between two runs it
forgets every prefix and text, and the next run has another policy, fewer pages, a smaller chunk.
Compared are the tokens and the bits of every log-prob, of prompts too where they are asked for.
Many requests have penalties, biases, min_tokens, prompt log-probs or one of two LoRA adapters.
`--plant-fault` moves logits
by one ulp in thirty steps of one run, to show that the check can fail. With `--numerics fast`,
which promises no such thing, the rate of differing tokens is reported and nothing fails. With
`--tensor-parallel` all runs have several ranks and take two versions in turns, by pushes and
rollbacks; the reference of each is an engine of one rank that starts with it. On a CPU the last
run is repeated with a rank that is killed halfway; the engine's next epoch resumes the requests.
With `--replicas` a fleet is compared with one server instead, under kills, drains and pushes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from tlt_server.bench.exact_plan import (
    PLANS,
    STARTED,
    VERSIONS,
    Configuration,
    ExactSize,
    Factors,
    covering_array,
    varied,
    with_length,
)
from tlt_server.bench.exact_runs import Bits, ExactEngines, digest_of, rollout
from tlt_server.bench.record import finish, progress_bar, wide_console
from tlt_server.bench.settings import described, settings_of
from tlt_server.bench.tables import show
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.config import ModelConfig
from tlt_server.models.split import auto_gpu_leaves
from tlt_server.wire.records import GenerateRequest

COLUMNS = {
    "requests": "{requests}",
    "tokens": "{tokens}",
    "passes": "{passes}",
    "preempted": "{preemptions}",
    "seconds": "{seconds:.1f}",
    "tokens differ": "{differing_tokens}",
    "log-prob bits differ": "{differing_logprobs}",
}


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
    killed: bool = False  # with its engine halfway

    @property
    def untested(self) -> bool:
        """Return True if pages should have run out and did not. A single sequence always fits."""
        scarce = self.configuration["pages"] == "scarce" and self.configuration["batch"] != 1
        return scarce and not self.preemptions

    @property
    def faults(self) -> list[str]:
        """Return everything that makes strict numerics red."""
        found = {
            f"{self.differing_tokens} tokens differ": self.differing_tokens,
            f"{self.differing_logprobs} bits of log-probs differ": self.differing_logprobs,
            "pages were to run out, and no request was preempted": self.untested,
        }
        return [text for text, count in found.items() if count]


def run(args: argparse.Namespace) -> int:
    """0 if nothing differs (and pages did run out where they were to), 1 otherwise; prints a table
    and one line of JSON.
    """
    from tlt_server.demo.workload import problems_as_requests

    plan = PLANS[args.device]
    size = plan.quick if args.quick else plan.full
    base = settings_of(args, plan.max_model_len)
    if base.tensor_parallel > 1 and base.reduction_leaves is None:
        base = replace(base, reduction_leaves=leaves_of(base))
    requests = [
        varied(with_length(request, i, size), i, adapters=base.tensor_parallel == 1)
        for i, request in enumerate(
            problems_as_requests(base.model, size.requests, group=8, seed=args.seed)
        )
    ]
    factors = factors_of(args, plan.factors)
    configurations = plan.in_order(covering_array(factors, args.seed))
    console, results = wide_console(), list[Result]()
    with progress_bar(console) as progress:
        kills = base.tensor_parallel > 1 and args.device == "cpu"
        task = progress.add_task("reference", total=len(configurations) + 1 + kills)

        def started(name: str, seconds: float, detail: str) -> None:
            progress.update(task, description=f"start: {name} took {seconds:.1f} s")

        engines = ExactEngines(base, started)
        references = {
            version: rollout(engines, plan.reference, requests, size, version=version)[0]
            for version in engines.versions
        }
        first, *others = references.values()
        assert all(bits != first for bits in others), "a version that changes nothing"
        for configuration in configurations:
            named = " ".join(map(str, configuration.values()))
            progress.update(task, advance=1, description=named)
            fault = args.plant_fault and not results
            results.append(
                compared(engines, configuration, requests, size, references, fault=fault)
            )
            differing = results[-1].differing_tokens + results[-1].differing_logprobs
            progress.update(task, description=f"{named}: {differing} differ")
        if kills:
            progress.update(task, advance=1, description="a rank is killed")
            results.append(killed_run(engines, configurations[-1], requests, size, references))
        progress.update(task, advance=1)
    settings = described(base, engines.fingerprint) | {"bits": digest_of(references[STARTED])}
    return report(console, results, settings, args)


def compared(
    engines: ExactEngines,
    configuration: Configuration,
    requests: list[GenerateRequest],
    size: ExactSize,
    references: dict[str, dict[str, Bits]],
    **how: Any,
) -> Result:
    """Run a configuration and compare it with the reference of its version."""
    version = str(configuration.get("version", STARTED))
    chosen = requests[: size.alone] if configuration["batch"] == 1 else requests
    began = time.perf_counter()
    found, counts = rollout(engines, configuration, chosen, size, version=version, **how)
    seconds = time.perf_counter() - began
    return compare(configuration, references[version], found, counts, seconds)


def killed_run(
    engines: ExactEngines,
    like: Configuration,
    requests: list[GenerateRequest],
    size: ExactSize,
    references: dict[str, dict[str, Bits]],
) -> Result:
    """Repeat a run over two epochs of an engine, with ample pages."""
    version, configuration = str(like["version"]), {**like, "pages": "ample"}
    chosen = requests[: size.alone] if configuration["batch"] == 1 else requests
    half = sum(len(references[version][request.id].tokens) for request in chosen) // 2
    found = compared(engines, configuration, requests, size, references, killed_after=half)
    shown = {**configuration, "version": f"{version}, killed"}
    return found._replace(killed=True, configuration=shown)


def factors_of(args: argparse.Namespace, factors: Factors) -> Factors:
    """Return the factors of a device's runs, modified by the flags."""
    if args.tensor_parallel > 1:
        factors = {**factors, "version": VERSIONS}
    return {**factors, "batch": (args.batch,)} if args.batch else factors


def leaves_of(settings: EngineSettings) -> int:
    """Return the default number of reduction segments of these ranks; the reference has the
    same.
    """
    if settings.device == "cpu":
        return settings.tensor_parallel
    return auto_gpu_leaves(ModelConfig.read(settings.model), settings.tensor_parallel)


def compare(
    configuration: Configuration,
    reference: dict[str, Bits],
    found: dict[str, Bits],
    counts: dict[str, float],
    seconds: float,
) -> Result:
    pairs = [(bits, reference[id]) for id, bits in found.items()]
    tokens = [differing(np.array(mine.tokens), np.array(its.tokens)) for mine, its in pairs]
    logprobs = [
        differing(*(np.frombuffer(bits.logprobs, np.uint32) for bits in pair)) for pair in pairs
    ]
    return Result(
        configuration,
        len(found),
        sum(len(b.tokens) for b in found.values()),
        int(counts["passes"]),
        int(counts["preemptions"]),
        seconds,
        sum(tokens),
        sum(logprobs),
        sum(map(bool, tokens)),
    )


def differing(found: NDArray[Any], expected: NDArray[Any]) -> int:
    """Count the differences of two series; the surplus of the longer one counts too."""
    common = min(len(found), len(expected))
    return int((found[:common] != expected[:common]).sum()) + abs(len(found) - len(expected))


def report(
    console: Console, results: list[Result], settings: dict[str, object], args: argparse.Namespace
) -> int:
    strict = args.numerics == "strict"
    title = f"tlt bench exact, {args.numerics}: against one run without speculation"
    levels = {name: f"{{{name}}}" for name in results[0].configuration}
    rows = [{**r._asdict(), **r.configuration} for r in results]
    show(console, title, {**levels, **COLUMNS}, rows)
    red_runs = [r for r in results if strict and r.faults]
    for r in red_runs:
        name = " ".join(map(str, r.configuration.values()))
        console.print(f"{name}: {', '.join(r.faults)}", style="bold red", highlight=False)
    tokens, differing = sum(r.tokens for r in results), sum(r.differing_tokens for r in results)
    summary = {
        "bench": "exact",
        "quick": bool(args.quick),
        **settings,
        "configurations": len(results),
        "requests": sum(r.requests for r in results),
        "tokens": tokens,
        "preemptions": sum(r.preemptions for r in results),
        "seconds": round(sum(r.seconds for r in results), 1),
        "scarce_without_preemption": sum(r.untested for r in results),
        "differing_tokens": differing,
        "differing_logprob_bits": sum(r.differing_logprobs for r in results),
        "differing_responses": sum(r.differing_responses for r in results),
        "kills": sum(r.killed for r in results),
        "differing_token_rate": round(differing / max(1, tokens), 6),
    }
    finish(args, summary)
    return 1 if red_runs else 0
