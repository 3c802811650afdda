"""Run by itself, without Triton's interpreter: three starts of an engine with two kernels, compiled
for a GPU that is not there; tells what each did, as JSON. TRITON_CACHE_DIR is empty before.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib import import_module
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from tests.engine.kernel_variants import Hopper
from tlt_kernels.gpu import compiler, gather
from tlt_kernels.gpu.variants import Variant, listed
from tlt_server.engine.gpu import kernel_start
from tlt_server.engine.gpu.kernel_records import cache_directory, records
from tlt_server.engine.gpu.kernel_start import KernelStart

DIES = "tlt_kernels.gpu.dies"


def rehearse() -> list[Variant]:
    with listed() as found:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            gather.gather(torch.zeros(4, 8, dtype=dtype), torch.zeros(3, dtype=torch.int32))
    return [*found]


def start(name: str) -> dict[str, Any]:
    """Start once; a launch would load what `preload` loads."""
    rehearsals: list[list[Variant]] = []
    hits: list[bool] = []
    kernels = KernelStart("engine")
    kernels.compile(lambda: rehearsals.append(rehearse()) or rehearsals[0], lambda done, of: None)
    triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    with kernels.recorded():
        for variant in rehearse():
            getattr(import_module(variant.module), variant.kernel).preload(variant.specialization)
    triton.knobs.compilation.listener = None
    gather._gather.device_caches.clear()  # as in a new process
    return {
        "start": name,
        "rehearsals": len(rehearsals),
        "compiled": kernels.compiled,
        "hits": hits,
    }


def main() -> None:
    driver.set_active(Hopper())
    found = {"gpu": "NVIDIA H200", "capability": "9.0"}
    kernel_start.toolchain = lambda: found
    told = [start("cold"), start("warm")]
    [record] = records(cache_directory())
    assert record.complete(cache_directory())
    shutil.rmtree(cache_directory() / record.kernels[0].entry)
    told.append(start("one is missing"))
    print(json.dumps(told), flush=True)

    def compile_or_die(module: str, kernel: str, specialization: str) -> None:
        if module == DIES:
            os.abort()

    compiler.compile_variant = compile_or_die
    lines = [json.dumps([DIES if i in (0, 1, 4) else "another", "", ""]) for i in range(6)]
    compiler.compile_all(lines, 2)


if __name__ == "__main__":
    main()
