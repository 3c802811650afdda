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
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from rich.console import Console

from tlt_server.bench.adapters import RANK, load_adapters, write_adapters
from tlt_server.bench.engines import LoadedOnce, ReadyFor, adopt, release
from tlt_server.bench.exact_kill import Bits, SaidBits, digest_of, run_until_killed
from tlt_server.bench.exact_plan import (
    ADAPTERS,
    PLANS,
    PUSHED,
    STARTED,
    VERSIONS,
    Configuration,
    ExactSize,
    Factors,
    covering_array,
    pages_for,
    varied,
    with_length,
)
from tlt_server.bench.exact_versions import bring, write_pushed
from tlt_server.bench.faults import planted
from tlt_server.bench.record import finish, progress_bar, wide_console
from tlt_server.bench.settings import at_most_what_it_takes, described, settings_of
from tlt_server.bench.tables import show
from tlt_server.engine.devices import Device, make_device
from tlt_server.engine.loop import Engine
from tlt_server.engine.phases import OnPhase
from tlt_server.engine.settings import DecidedSettings, EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.models.config import ModelConfig
from tlt_server.models.split import auto_gpu_leaves
from tlt_server.wire.commands import ClearCache, SetPolicy, Submit
from tlt_server.wire.fingerprint import Fingerprint
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
        """Pages were to run out and did not. A sequence alone always fits."""
        scarce = self.configuration["pages"] == "scarce" and self.configuration["batch"] != 1
        return scarce and not self.preemptions

    @property
    def faults(self) -> list[str]:
        """Say all that makes strict numerics red."""
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
    base = settings_of(args)
    if base.tensor_parallel > 1 and base.reduction_leaves is None:
        base = replace(base, reduction_leaves=leaves_of(base))
    if plan.max_model_len:
        base = replace(base, max_model_len=at_most_what_it_takes(base.model, plan.max_model_len))
    requests = [
        varied(with_length(request, i, size), i, adapters=base.tensor_parallel == 1)
        for i, request in enumerate(
            problems_as_requests(base.model, size.requests, group=8, seed=args.seed)
        )
    ]
    factors = factors_of(args, plan.factors)
    configurations = plan.in_order(covering_array(factors, args.seed))
    console = wide_console()
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
        progress.update(task, advance=1)
        results: list[Result] = []
        for configuration in configurations:
            version = str(configuration.get("version", STARTED))
            described_as = " ".join(str(level) for level in configuration.values())
            progress.update(task, description=described_as)
            chosen = requests[: size.alone] if configuration["batch"] == 1 else requests
            began = time.perf_counter()
            fault = args.plant_fault and not results
            found, counts = rollout(
                engines, configuration, chosen, size, fault=fault, version=version
            )
            seconds = time.perf_counter() - began
            results.append(compare(configuration, references[version], found, counts, seconds))
            differing = results[-1].differing_tokens + results[-1].differing_logprobs
            progress.update(task, advance=1, description=f"{described_as}: {differing} differ")
        if kills:
            progress.update(task, description="a rank is killed")
            results.append(killed_run(engines, configurations[-1], requests, size, references))
            progress.update(task, advance=1)
    settings = described(base, engines.fingerprint) | {"bits": digest_of(references[STARTED])}
    return report(console, results, settings, args)


def killed_run(
    engines: ExactEngines,
    like: Configuration,
    requests: list[GenerateRequest],
    size: ExactSize,
    references: dict[str, dict[str, Bits]],
) -> Result:
    """Repeat a run over two epochs of an engine, with ample pages."""
    version, configuration = str(like["version"]), {**like, "pages": "ample"}
    expected = references[version]
    chosen = requests[: size.alone] if configuration["batch"] == 1 else requests
    half = sum(len(expected[request.id].tokens) for request in chosen) // 2
    began = time.perf_counter()
    found, counts = rollout(
        engines, configuration, chosen, size, version=version, killed_after=half
    )
    seconds = time.perf_counter() - began
    shown = {**configuration, "version": f"{version}, killed"}
    return compare(shown, expected, found, counts, seconds)._replace(killed=True)


def factors_of(args: argparse.Namespace, factors: Factors) -> Factors:
    """Return the factors of a device's runs, as changed by the flags."""
    if args.tensor_parallel > 1:
        factors = {**factors, "version": VERSIONS}
    return {**factors, "batch": (args.batch,)} if args.batch else factors


def leaves_of(settings: EngineSettings) -> int:
    """Return the default leaves of these ranks; the reference has as many."""
    if settings.device == "cpu":
        return settings.tensor_parallel
    return auto_gpu_leaves(ModelConfig.read(settings.model), settings.tensor_parallel)


class ExactEngines:
    """The engine of one batch after another, in this process; they share their weights."""

    def __init__(
        self, base: EngineSettings, on_phase: OnPhase = lambda name, seconds, detail: None
    ) -> None:
        self.base, self.plan, self._on_phase = base, PLANS[str(base.device)], on_phase
        self._source = LoadedOnce(self.plan.strategies)
        self._engine: Engine | None = None
        self._root = TemporaryDirectory(prefix="tlt-exact-")
        self.shared = base.tensor_parallel > 1
        self.versions = VERSIONS if self.shared else (STARTED,)
        if self.shared:
            write_pushed(Path(base.model), Path(self._root.name), on_gpu=base.device == "cuda")
        else:
            write_adapters(Path(base.model), Path(self._root.name))
        self._of: tuple[int, bool, str] | None = None
        self.fingerprint: Fingerprint | None = None  # the last engine's

    def _ready(self, settings: DecidedSettings) -> Device:
        return ReadyFor(make_device(settings), self.plan.strategies)

    def engine(self, batch: int, *, fault: bool, reference: str = "") -> Engine:
        """Return the engine that runs up to `batch` requests at once. One that is to err captures
        nothing; the reference of a version has an engine to itself, which starts with it and
        without speculation.
        """
        if self._engine is None or self._of != (batch, fault, reference):
            self.end()
            root = Path(self._root.name)
            settings = replace(
                self.base,
                policy="off" if reference else self.plan.starts,
                max_running=batch,
                max_rows=self.plan.max_rows,
                graphs=self.base.graphs and not fault,
                model=root / PUSHED if reference == PUSHED else self.base.model,
                weight_root=None if reference and self.shared else root,
                max_loras=0 if self.shared else len(ADAPTERS) - 1,
                max_lora_rank=RANK,
                tensor_parallel=1 if reference else self.base.tensor_parallel,
            )
            device = self._ready if self.shared else self._source.device
            self._engine, info = assemble(settings, self._on_phase, make_device=device)
            assert self.fingerprint in (None, info.fingerprint), "runs of different numerics"
            self.fingerprint = info.fingerprint
            if not self.shared:
                load_adapters(self._engine)
            self._of = batch, fault, reference
        return self._engine

    def end(self) -> None:
        """End the engine that there is; its weights go with it, where it has its own."""
        self._engine = self._of = None
        release()


def rollout(
    engines: ExactEngines,
    configuration: Configuration,
    requests: list[GenerateRequest],
    size: ExactSize,
    *,
    fault: bool = False,
    version: str = STARTED,
    killed_after: int = 0,
) -> tuple[dict[str, Bits], dict[str, float]]:
    """Run all requests on an engine that has forgotten what it ran before, with a version of the
    target; return each output and the run's counts. `killed_after`: tokens before a rank is killed
    and the requests are resumed by another engine; 0: none is.
    """
    batch, reference = int(str(configuration["batch"])), configuration is engines.plan.reference
    said, preemptions = SaidBits(requests), 0
    if killed_after:
        engine = engines.engine(batch, fault=False)
        prepare(engines, engine, configuration, requests, size, version)
        before = engine.scheduler.preemptions
        engine.send(Submit(requests))
        run_until_killed(engine, said, killed_after)
        preemptions += engine.scheduler.preemptions - before
        del engine
        engines.end()
    engine = engines.engine(batch, fault=fault, reference=version if reference else "")
    kept_back = prepare(
        engines, engine, configuration, requests, size, "" if reference else version
    )
    before = engine.scheduler.preemptions
    engine.send(Submit(said.rest()))
    with planted(engine) if fault else nullcontext():
        said.run(engine)
    engine.scheduler.pool.release(kept_back)
    engine.scheduler.check()
    preemptions += engine.scheduler.preemptions - before
    return said.bits(), {"passes": said.passes, "preemptions": preemptions}


def prepare(
    engines: ExactEngines,
    engine: Engine,
    configuration: Configuration,
    requests: list[GenerateRequest],
    size: ExactSize,
    version: str,
) -> list[int]:
    """Let an idle engine forget what it ran, and take the settings of a run and a version; empty:
    the one that it has. Return the pages that it is to do without.
    """
    if version:
        bring(engine, version)
    policy, strategy = engines.plan.arms[str(configuration["arm"])]
    adopt(engine, SetPolicy(policy, strategy))
    engine.send(ClearCache("exact"))
    engine.step()
    assert [report.error for report in engine.control_reports()] == [None]
    engine.scheduler.max_rows = int(str(configuration["chunk"]))
    pool = engine.scheduler.pool
    pages = pages_for(configuration, requests, size, pool.page_size)
    kept_back = pool.allocate(max(0, pool.pages - pages)) if pages is not None else []
    assert kept_back is not None, "an idle engine holds no pages"
    return kept_back


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
    finish(args, summary, on_gpu=args.device == "cuda")
    return 1 if red_runs else 0
