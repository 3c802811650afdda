"""Run by itself, without Triton's interpreter: names the kernel variants that steps need and start
has not loaded, as JSON. No GPU.

Triton tells its cache hook of every variant that is launched; the hook says that it has been seen
to, so nothing is compiled or run, and the engine computes nonsense of the right shapes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tlt_kernels.gpu import gemm, gemm_stream
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.engine.assembly import assemble
from tlt_server.engine.devices.interpreter import Interpreted
from tlt_server.engine.gpu.buckets import CAPTURED, Shapes
from tlt_server.engine.gpu.drafts import DraftKey
from tlt_server.engine.gpu.extend import ExtendKey
from tlt_server.engine.gpu.preparing import rehearse
from tlt_server.engine.gpu.reports import MIN_BEST
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.settings import EngineSettings
from tlt_server.records import OFF
from tlt_server.speculation.policies import Policy

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
            shape = shapes.step(decoding, strategy, prompt_rows, chunks, **flags)
            yield shape.draft, shape.extend


def main(drafter: str, max_running: int, max_loras: int, dtype: str) -> None:
    found: dict[str, None] = {}

    def see(**told: Any) -> bool:
        found[f"{told['fn'].name} {told['key']}"] = None
        return True

    driver.set_active(Hopper())
    triton.knobs.runtime.jit_cache_hook = see
    gemm._hindrance = lambda dtype, device: (
        "" if dtype == torch.bfloat16 else f"the type is {dtype}"
    )
    gemm_stream.multiprocessors = lambda device: 132
    settings = EngineSettings(
        model=str(TARGET),
        drafter=str(DRAFTER) if drafter == "eagle" else drafter,
        device="interpreter",
        dtype=dtype,
        max_running=max_running,
        max_loras=max_loras,
        max_lora_rank=8 if max_loras else 0,
        max_rows=MAX_ROWS,
        kv_memory_mb=64,
    )
    engine, _ = assemble(settings, make_device=Pretended)
    runner, policy = engine.runner, engine.policy
    assert isinstance(runner, GpuRunner)
    passes = runner.passes
    with torch.inference_mode():
        rehearse(runner, runner.shapes.at_start(MAX_ROWS, policy.strategies))
        at_start = len(found)
        passed: set[DraftKey | ExtendKey | None] = {None}
        for draft, key in dict.fromkeys(reachable(runner.shapes, policy)):
            extend = passes.extend(key)
            if not key.plain:
                extend.select(None)
            if draft is not None:
                drafted = passes.draft(draft)
                if draft not in passed:
                    passes.work(drafted)()
                extend.select(drafted.nodes)
                passes.learn(extend, drafted)
            if key not in passed:
                passes.work(extend)()
                if key.structured:
                    extend.run_second()
                for best in (0, MIN_BEST, 8 * MIN_BEST):
                    extend.report(torch.zeros(1, dtype=torch.int32), best, raw=True)
                    extend.score_prompt(0, 3 * best + 1, best)
            passed |= {draft, key}
    print(json.dumps({"at_start": at_start, "later": [*found][at_start:]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
