"""Times of engine steps, as the host sees them, for the benches whose engine runs in this process.

Requests go straight into the loop. Full-batch decode steps are timed from the end of one to the end
of the next, with all that the loop does in between; the figure is their median. Text, HTTP and the
link to a server's other process are not in it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from tlt_server.bench.device_time import DeviceTime, device_time, on_device
from tlt_server.bench.engines import LoadedOnce, release
from tlt_server.bench.record import steps, wide_console
from tlt_server.bench.settings import at_most_what_it_takes
from tlt_server.demo.workload import problems_as_requests
from tlt_server.engine.loop import Engine
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.errors import EngineFailed
from tlt_server.speculation.policies.fixed import Fixed
from tlt_server.wire.commands import Abort, Submit
from tlt_server.wire.records import OFF, Cycle, GenerateRequest, Sampling, Strategy

SETTLE = 8  # steps at full batch before any is timed
BRIEFLY = 3  # the same where requests take turns
PROMPT, NEW = 128, 512  # tokens
LONG_NEW, LONG_STEPS = 200, 100  # tokens and timed steps after a long prompt
STEPS, QUICK_STEPS = 400, 60  # timed
REACHABLE = 5120  # tokens of the longest of these requests, which bounds the tables
PROBLEMS, QUICK_PROBLEMS, ANSWER = 32, 4, 256  # demo problems, and tokens of an answer
PROFILED = 20  # steps
PROBLEM: Literal["problem"] = "problem"
PREFILLS, QUICK_PREFILLS = 5, 2  # rounds; the median counts
FIRST_IDS = 512  # random prompts use the first token ids, which every vocabulary has
Row = dict[str, Any]


class Timed(NamedTuple):
    """Steps of one batch under one strategy."""

    batch: int
    strategy: str
    context: int  # tokens of a request when timing started
    steps: int
    step_ms: float  # median
    quartiles_ms: tuple[float, float]
    rate: float  # tokens per second of the whole batch, over all timed steps
    accept_length: float  # tokens per request and step

    def figures(self) -> Row:
        """Return the figures in the form of a bench's row."""
        low, high = self.quartiles_ms
        return {
            "batch": self.batch,
            "strategy": self.strategy,
            "context": self.context,
            "steps": self.steps,
            "step_ms": round(self.step_ms, 4),
            "quartiles_ms": [round(low, 4), round(high, 4)],
            "tokens_per_s": round(self.rate, 1),
            "accept_length": round(self.accept_length, 3),
        }


class StepCase(NamedTuple):
    """A batch under one strategy, after random prompts or with problems of the demo task."""

    batch: int
    strategy: Strategy = OFF
    prompt: int | Literal["problem"] = PROMPT  # tokens

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {self.strategy.name}, prompt {self.prompt}"


def measure(
    args: argparse.Namespace,
    kinds: Sequence[tuple[Row, EngineSettings]],
    cases: Sequence[StepCase],
    prefills: Sequence[tuple[int, int]] = (),
) -> tuple[list[Row], list[Row]]:
    """Time all cases, then prefills (number of prompts, tokens of each), on one engine per kind;
    return the rows of both, each with the kind's name and fingerprint.
    """
    rows, read = list[Row](), list[Row]()
    with steps(wide_console(), len(kinds) * (1 + len(cases) + len(prefills))) as step:
        for named, settings in kinds:
            engine, info = assemble(settings, make_device=LoadedOnce().device)
            about = {**named, "fingerprint": msgspec.structs.asdict(info.fingerprint)}
            for case in cases:
                step(case.name)
                figures = _figures(engine, settings, case, quick=args.quick, seed=args.seed)
                rows.append({**about, "prompt": case.prompt, **figures})
            for prompts, length in prefills:
                step(f"prefill {prompts} x {length}")
                rounds = QUICK_PREFILLS if args.quick else PREFILLS
                rate = time_prefill(engine, prompts, length, rounds=rounds, seed=args.seed)
                size = {"prompts": prompts, "length": length, "tokens_per_s": round(rate, 1)}
                read.append({**about, **size})
            step("load")
            del engine
            release()
    return rows, read


def _figures(
    engine: Engine, settings: EngineSettings, case: StepCase, *, quick: bool, seed: int
) -> Row:
    most, capturing = QUICK_STEPS if quick else STEPS, settings.feature_ring is not None

    def requests(seed: int) -> list[GenerateRequest]:
        if case.prompt == PROBLEM:
            count = QUICK_PROBLEMS if quick else PROBLEMS
            found = problems_as_requests(
                settings.model, count, group=1, seed=seed, max_tokens=ANSWER
            )
        else:
            new = NEW if case.prompt == PROMPT else LONG_NEW
            found = random_requests(case.batch, case.prompt, new, seed=seed)
        return [msgspec.structs.replace(each, train=capturing) for each in found]

    if case.prompt == PROBLEM:
        return time_in_turn(engine, requests(seed), case.strategy, max_steps=most).figures()
    most = most if case.prompt == PROMPT else min(most, LONG_STEPS)
    figures = time_steps(engine, requests(seed), case.strategy, max_steps=most).figures()
    if settings.device == "cuda" and case.strategy != OFF:
        figures |= profile(engine, requests(seed + 1), case.strategy, steps=PROFILED).figures()
    return figures


def longest(model: Path, context: int | None) -> int:
    """Return the max_model_len of an engine for these requests. If the model has fewer positions,
    its start raises `StartupError`.
    """
    needed = (context or 0) + 2 * LONG_NEW
    return needed if needed > REACHABLE else at_most_what_it_takes(model, REACHABLE)


def in_turns(
    engine: Engine,
    ways: Mapping[str, list[GenerateRequest]],
    strategy: Strategy,
    rounds: int,
    **how: int,
) -> dict[str, list[Timed]]:
    """Time batches in turns, after one run of each that compiles and captures graphs."""
    for requests in ways.values():
        time_steps(engine, requests, strategy, **how)
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, requests in ways.items():
            found[name].append(time_steps(engine, requests, strategy, **how))
    return found


def ratio(found: Sequence[Timed], base: Sequence[Timed], of: Callable[[Timed], float]) -> float:
    """Return the median over rounds of the ratio of a figure to a base's."""
    pairs = zip(found, base, strict=True)
    return statistics.median(of(one) / of(other) for one, other in pairs)


class _Steps(NamedTuple):
    durations: list[float]  # s
    tokens: int
    context: int


def random_requests(count: int, prompt: int, new: int, *, seed: int) -> list[GenerateRequest]:
    """Return requests for exactly `new` tokens, each after a prompt of its own."""
    draw = np.random.default_rng(seed)
    return [
        GenerateRequest(
            id=f"random-{seed}-{i}",
            token_ids=draw.integers(1, FIRST_IDS, prompt).tolist(),
            seed=i + 1,
            sampling=Sampling(max_tokens=new, ignore_eos=True),
            group_id=f"{seed}-{i}",
        )
        for i in range(count)
    ]


def time_steps(
    engine: Engine,
    requests: list[GenerateRequest],
    strategy: Strategy = OFF,
    *,
    max_steps: int = STEPS,
    settle: int = SETTLE,
) -> Timed:
    """Run these requests as one batch until the first ends or `max_steps` are timed, then abort."""
    return _timed(len(requests), strategy, [_steps(engine, requests, strategy, max_steps, settle)])


def time_in_turn(
    engine: Engine, requests: list[GenerateRequest], strategy: Strategy, *, max_steps: int = STEPS
) -> Timed:
    """Time the same at batch 1, one request after another, each to its own end."""
    found: list[_Steps] = []
    for request in requests:
        left = max_steps - sum(len(steps.durations) for steps in found)
        if left > 0:
            found.append(_steps(engine, [request], strategy, left, BRIEFLY))
    return _timed(1, strategy, found)


def time_prefill(engine: Engine, prompts: int, length: int, *, rounds: int, seed: int = 0) -> float:
    """Return prompt tokens per second of `prompts` new prompts at once, from their submission to
    their first tokens; the median round.
    """
    engine.choice.policy = Fixed(OFF)
    rates = []
    for turn in range(rounds + 1):
        started = time.perf_counter()
        engine.send(Submit(random_requests(prompts, length, 1, seed=10_000 * (seed + 1) + turn)))
        finish(engine)
        rates.append(prompts * length / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def finish(engine: Engine) -> None:
    """Step until the engine is idle."""
    while not engine.idle:
        _step(engine)


def whole_cycles(
    engine: Engine, requests: list[GenerateRequest], strategy: Strategy
) -> Iterator[Cycle]:
    """Run the requests as one batch and yield each cycle of all of them together; end when there
    are fewer. A caller that stops early aborts them.
    """
    engine.choice.policy = Fixed(strategy)
    engine.send(Submit(requests))
    started = False
    while not engine.idle:
        cycle = _step(engine)
        if cycle is None:
            continue
        if (
            cycle.context.decoding == len(requests)
            and not cycle.context.prefill_rows
            and cycle.emitted
        ):
            started = True
            yield cycle
        elif started:
            break


def profile(
    engine: Engine, requests: list[GenerateRequest], strategy: Strategy, *, steps: int
) -> DeviceTime:
    """Profile `steps` whole-batch steps of these requests, which must last that long, on a GPU."""
    cycles = whole_cycles(engine, requests, strategy)
    settled = sum(1 for _ in islice(cycles, SETTLE))
    with profiler(activities=[ProfilerActivity.CUDA]):
        torch.cuda.synchronize()  # the profiler has started before a gap is measured
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        done = sum(1 for _ in islice(cycles, steps))
        torch.cuda.synchronize()
    abort_all(engine)
    events = on_device(found)
    if settled < SETTLE or done < steps or not events:
        raise EngineFailed(
            f"the profiler saw {len(events)} events on the GPU in {done} of {steps} steps: "
            "the driver may forbid profiling"
        )
    return device_time(events, done)


def abort_all(engine: Engine) -> None:
    engine.send(Abort([], all=True))
    finish(engine)


def _steps(
    engine: Engine, requests: list[GenerateRequest], strategy: Strategy, max_steps: int, settle: int
) -> _Steps:
    durations: list[float] = []
    tokens = context = 0
    last = 0.0
    with _nothing_to_collect():
        for seen, cycle in enumerate(whole_cycles(engine, requests, strategy)):
            now = time.perf_counter()
            if seen >= settle:
                durations.append(now - last)
                tokens += cycle.emitted
                context = context or int(cycle.context.mean_context)
            last = now
            if len(durations) == max_steps:
                break
    abort_all(engine)
    return _Steps(durations, tokens, context)


@contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """Freeze the collector, as the engine's own process does: a full collection takes longer than
    many steps.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _step(engine: Engine) -> Cycle | None:
    for output in engine.step():
        if output.error is not None:
            raise EngineFailed(
                f"request {output.id} of the bench ended with an error, "
                f"{output.error[0]}: {output.error[1]}"
            )
    return engine.last_cycle


def _timed(batch: int, strategy: Strategy, found: list[_Steps]) -> Timed:
    durations = [duration for steps in found for duration in steps.durations]
    assert len(durations) > 1, f"a batch of {batch} hardly decoded as a whole: give longer requests"
    low, middle, high = statistics.quantiles(durations, n=4)
    tokens = sum(steps.tokens for steps in found)
    context = next(steps.context for steps in found if steps.durations)
    return Timed(
        batch,
        strategy.name,
        context,
        len(durations),
        middle * 1e3,
        (low * 1e3, high * 1e3),
        tokens / sum(durations),
        tokens / batch / len(durations),
    )
