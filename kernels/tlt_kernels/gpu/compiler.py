"""Compiles kernel variants in parallel, into Triton's cache: a separate process, which needs no GPU
and starts none: `python -m tlt_kernels.gpu.compiler WORKERS PARENT NICENESS`.

Its input is a target in the first line, then a variant per line, as JSON. After the last line the
process forks into workers and writes a line for each finished variant: `[index, error, compiled]`,
where `compiled` is false if Triton's cache had it. A variant without a line has killed its worker;
the others are compiled nevertheless. The process and its workers end with the process that started
it, PARENT.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import traceback
from importlib import import_module

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from tlt_kernels.gpu.variants import PACKAGE, Variant, preload
from tlt_kernels.parents import end_with

TASK = 4  # bytes of an index in the pipe that workers share
MAX_VARIANTS = 8192  # more indices do not fit the pipe


class FixedTarget:
    """The driver properties that Triton needs for a compilation."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def compile_variant(module: str, kernel: str, specialization: str) -> None:
    """Compile one variant for the active driver's target, unless Triton has it in its cache."""
    compiled = preload(Variant(module, kernel, specialization))
    if hasattr(nvidia, "make_launcher"):  # up to 3.6, Triton compiles a launcher for each signature
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


def compile_all(lines: list[str], workers: int) -> None:
    """Compile the variants of these lines, in up to `workers` processes."""
    tasks, feed = os.pipe()
    for index in range(len(lines)):
        os.write(feed, index.to_bytes(TASK))
    os.close(feed)
    for _ in range(min(workers, len(lines))):
        _fork(tasks, lines)
    while True:
        try:
            _, status = os.wait()
        except ChildProcessError:
            return
        if status:  # its task has ended it; the next worker takes the next one
            _fork(tasks, lines)


def _fork(tasks: int, lines: list[str]) -> None:
    """Start a worker, which ends when no task is left."""
    parent = os.getpid()
    if os.fork():
        return
    end_with(parent)
    while index := os.read(tasks, TASK):
        _compile(int.from_bytes(index), lines)
    os._exit(0)


def _compile(index: int, lines: list[str]) -> None:
    error, compiled = "", list[bool]()
    knobs.compilation.listener = lambda **told: compiled.append(not told["cache_hit"])
    try:
        compile_variant(*json.loads(lines[index]))
    except Exception as failed:
        error = traceback.format_exception_only(failed)[-1].strip()
    os.write(1, (json.dumps([index, error[:400], any(compiled)]) + "\n").encode())


def be_nice(least: int) -> None:
    """Raise this process's niceness to `least`; the starting process keeps its own."""
    os.nice(max(0, least - os.nice(0)))


def main() -> None:
    end_with(int(sys.argv[2]))
    be_nice(int(sys.argv[3]))
    for module in pkgutil.iter_modules(import_module(PACKAGE).__path__, f"{PACKAGE}."):
        import_module(module.name)
    triton_key()  # hashes Triton's files, which no worker should do again
    target, *lines = sys.stdin.read().splitlines() or [""]
    if lines:
        driver.set_active(FixedTarget(GPUTarget(*json.loads(target))))
        compile_all(lines[:MAX_VARIANTS], int(sys.argv[1]))


if __name__ == "__main__":
    main()
