"""Run by itself, without Triton's interpreter: names the kernel variants that steps need and that
neither a start nor a preparation of their policy has loaded, as JSON. No GPU.

Launches are only listed, so nothing is compiled or run, and the engine computes nonsense of the
right shapes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tlt_kernels.gpu import gemm, gemm_stream
from tlt_kernels.gpu.variants import Variant, listed
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.engine.gpu.device import Interpreted
from tlt_server.engine.gpu.passes import Passes
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.gpu.start import preparing
from tlt_server.engine.gpu.start.compiling import Compiled
from tlt_server.engine.gpu.start.preparing import rehearse
from tlt_server.engine.gpu.start.strategy_kernels import StrategyKernels
from tlt_server.engine.gpu.steps.buckets import CAPTURED, Shapes
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, StructuredExtend
from tlt_server.engine.gpu.steps.reports import MIN_BEST
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.speculation.policies import Policy
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import OFF, Pin, StepContext, Strategy, parse_strategy

MAX_ROWS = 4096  # per step, as on a GPU
PROMPT_ROWS = (1, 120, 500, 1000, 4000)


class Hopper:
    """The answers that Triton needs of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Pretended(Interpreted):
    """Steps are shaped as on a GPU."""

    prompts = CAPTURED


VARIANTS = ((), ("filtered",), ("edited",), ("structured",))
ADAPTED = (*VARIANTS, ("adapted",))  # the others change nothing in the layers


def reachable(shapes: Shapes, policy: Policy) -> Iterator[tuple[DraftKey | None, ExtendKey]]:
    """Yield the passes of steps under a policy's strategies: steps without prompts, with one, and
    with more than a captured step has.
    """
    for decoding, chunks in product(
        range(shapes.max_running + 1), (0, 1, shapes.prompts.chunks + 1)
    ):
        if not 0 < decoding + chunks <= shapes.max_running:
            continue
        strategies = {
            key: strategy
            for strategy in (
                policy.strategies(range(decoding, decoding + 1), prompts=chunks > 0)
                if decoding
                else [OFF]
            )
            for key in shapes.step(decoding, strategy, chunks, chunks)[1:]
        }
        for strategy, rows, variant in product(
            dict.fromkeys(strategies.values()),
            PROMPT_ROWS if chunks else (0,),
            ADAPTED if shapes.adapters else VARIANTS,
        ):
            prompt_rows = max(chunks, rows) if chunks else 0
            flags = dict.fromkeys(variant, True)
            context = StepContext(decoding, prompt_rows, 0.0, decoding, chunks=chunks, **flags)
            shape = shapes.shape(context, strategy)
            yield shape.draft, shape.extend


class Ahead:
    """Stands for the processes that compile and for what brings kernels onto a GPU."""

    def compiler(self, variants: Sequence[Variant]) -> Ahead:
        self.count = len(variants)
        return self

    def end(self, on_progress: Callable[[int, int], None]) -> Compiled:
        return Compiled(self.count, "")

    def remember(self, found: Mapping[Variant, str]) -> None:
        pass

    def stop(self) -> None:
        raise AssertionError("nothing fails")


FEW = "eagle:7x4x16", "eagle:12x8x33", "history:7x4x16"
MANY = (
    *FEW,
    *(f"{name}:{tree}" for name in ("eagle", "history") for tree in ("1x1x64", "3x8x9", "12x3x64")),
    "history:64x32x256",  # the largest
)


def commands(names: Iterable[str], max_running: int) -> list[SetPolicy]:
    """Return policies that a start is not prepared for."""
    inner = max(1, max_running - 1)
    return [
        *(SetPolicy("fixed", parse_strategy(name)) for name in names),
        SetPolicy("off", pins=(Pin(inner, inner, Strategy("eagle", 5, 2, 7)),)),
        SetPolicy("beg"),
        SetPolicy("goodput"),
    ]


def launch_all(passes: Passes, policy: Policy) -> None:
    """Launch all that steps under a policy launch."""
    passed: set[DraftKey | ExtendKey | None] = {None}
    for draft, key in dict.fromkeys(reachable(passes.shapes, policy)):
        extend = passes.extend(key)
        if not key.plain:
            extend.select(None)
        if draft is not None:
            drafted = passes.draft(draft)
            if draft not in passed:
                passes.work(drafted)()
                passes.cap_rows(draft)
            extend.select(drafted.nodes, drafted.own_columns)
            passes.learn(extend, drafted)
        if key not in passed:
            passes.work(extend)()
            if isinstance(extend, StructuredExtend):
                extend.run_second()
            for best in (0, MIN_BEST, 8 * MIN_BEST):
                extend.report(torch.zeros(1, dtype=torch.int32), best, raw=True)
                extend.score_prompt(0, 3 * best + 1, best)
        passed |= {draft, key}


def lacking(passes: Passes, policy: Policy, ready: Iterable[Variant]) -> list[str]:
    with listed() as found:
        launch_all(passes, policy)
    return [f"{each.kernel} {each.specialization}" for each in found.keys() - {*ready}]


def settings_of(drafter: str, policy: str, max_running: int, max_loras: int) -> EngineSettings:
    return EngineSettings(
        model=str(TARGET),
        drafter=str(DRAFTER) if drafter == "eagle" else drafter,
        policy=policy,
        device="interpreter",
        dtype="bfloat16",
        max_running=max_running,
        max_loras=max_loras,
        max_lora_rank=8 if max_loras else 0,
        max_rows=MAX_ROWS,
        kv_memory_mb=64,
    )


def main(drafter: str, policy: str, max_running: int, max_loras: int, sets: list[str]) -> None:
    driver.set_active(Hopper())
    gemm._hindrance = lambda dtype, device: (
        "" if dtype == torch.bfloat16 else f"the type is {dtype}"
    )
    gemm_stream.multiprocessors = lambda device: 132
    ready: dict[Variant, None] = {}
    preparing.load = lambda variant: ready.setdefault(variant)
    with listed():
        settings = settings_of(drafter, policy, max_running, max_loras)
        engine, _ = assemble(settings, make_device=Pretended)
    runner = engine.runner
    assert isinstance(runner, GpuRunner)
    shapes, passes, told = runner.shapes, runner.passes, dict[str, dict[str, Any]]()
    with torch.inference_mode():
        keys = shapes.at_start(MAX_ROWS, engine.choice.policy.strategies)
        with listed() as found:
            rehearse(runner, keys)
        ready |= found
        told["start"] = {"ready": len(ready), "lacks": lacking(passes, engine.choice.policy, ready)}
        strategies = StrategyKernels(runner, Ahead(), keys)
        for command in commands(sets, max_running) if sets else ():
            asked, before = engine.choice.changes._make_policy(command), len(ready)
            preparation = strategies(asked.strategies)
            while preparation and not preparation.advance():
                pass
            told[f"{command.policy} {command.strategy and command.strategy.name}"] = {
                "ready": len(ready) - before,
                "lacks": lacking(passes, asked, ready),
                "again": strategies(asked.strategies) is not None,
            }
    print(json.dumps(told))


if __name__ == "__main__":
    main(
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
        {"few": [*FEW], "many": [*MANY]}.get(sys.argv[5], []),
    )
