"""Run by itself, without Triton's interpreter: four starts of an engine with two kernels, compiled
for a GPU that is not there; tells what each did, as JSON. TRITON_CACHE_DIR is empty before.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import torch
import triton
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from tests.engine.kernel_variants import Hopper
from tlt_kernels.gpu import compiler, gather
from tlt_kernels.gpu.variants import Unloaded, Variant, listed, only_loaded
from tlt_server.engine.gpu.start import kernel_start
from tlt_server.engine.gpu.start.kernel_records import cache_directory, records
from tlt_server.engine.gpu.start.kernel_start import KernelStart

brought: list[str] = []
launched: list[str] = []
DIES = "tlt_kernels.gpu.dies"


def gather_both() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        gather.gather(torch.zeros(4, 8, dtype=dtype), torch.zeros(3, dtype=torch.int32))


def rehearse() -> list[Variant]:
    before = len(launched)
    with listed() as found:
        gather_both()
    assert len(launched) == before, "a loaded kernel was launched on what none had written"
    return [*found]


def start(name: str, engine: str = "engine") -> dict[str, Any]:
    """Start once, and tell what a launch would still have to load."""
    rehearsals: list[list[Variant]] = []
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    kernels = KernelStart(engine)
    with kernels.recorded():
        kernels.load(lambda: rehearsals.append(rehearse()) or rehearsals[0], lambda done, of: None)
    triton.knobs.compilation.listener = None
    before = len(brought)
    rehearse()
    gather_both()
    return {
        "start": name,
        "rehearsals": len(rehearsals),
        "compiled": kernels.compiled,
        "hits": hits,
        "brought": before,
        "left": len(brought) - before,
    }


def bring(kernel: CompiledKernel) -> None:
    """Stands for what brings a kernel onto a GPU."""
    if kernel._run is None:
        kernel._run = lambda *told: launched.append(kernel.name)
        brought.append(kernel.name)


def launch() -> str:
    """Launch a kernel where none may be loaded."""
    try:
        with only_loaded():
            gather.gather(torch.zeros(4, 8), torch.zeros(3, dtype=torch.int32))
    except Unloaded as error:
        return str(error)
    return ""


def main() -> None:
    driver.set_active(Hopper())
    found = {"gpu": "NVIDIA H200", "capability": "9.0"}
    kernel_start.toolchain = lambda: found
    CompiledKernel._init_handles = bring
    refused = launch()
    told = [start("cold"), start("later engine of this process", "another")]
    gather._gather.device_caches.clear()  # as in a new process
    told.append(start("warm"))
    [record] = records(cache_directory())
    assert record.complete(cache_directory())
    shutil.rmtree(cache_directory() / record.kernels[0].entry)
    gather._gather.device_caches.clear()
    told.append(start("one is missing"))
    print(json.dumps([refused, told]), flush=True)

    def compile_or_die(module: str, kernel: str, specialization: str) -> None:
        if module == DIES:
            os.abort()

    compiler.compile_variant = compile_or_die
    lines = [json.dumps([DIES if i in (0, 1, 4) else "another", "", ""]) for i in range(6)]
    compiler.compile_all(lines, 2)


if __name__ == "__main__":
    main()
