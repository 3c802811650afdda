"""Kernels with declared argument types, so that no call compiles another variant.

`kernel` declares one. `Kernel.compile` compiles its types, or loads them from numba's cache; an
engine calls it for all kernels at its start, otherwise the first call does. A call with other types
is a TypeError. Functions that only kernels call are plain `njit`: they are compiled into their
callers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from threading import Lock
from typing import Any

from numba import njit

MODULES = (
    "attention",
    "branches",
    "catch_up",
    "checksums",
    "counts",
    "elementwise",
    "growth",
    "match",
    "rows",
    "sampling",
    "tree",
)
_KERNELS: dict[str, list[Kernel]] = {}


class Kernel:
    """A function that Python calls, with its argument types."""

    def __init__(self, function: Callable[..., Any], types: Sequence[object], options: Any) -> None:
        self.name, self._types = function.__name__.strip("_"), types
        self.dispatcher = njit(cache=True, **options)(function)
        self.dispatcher._compile_for_args = self._compile_declared
        self._lock = Lock()  # a second thread waits until the first one has made it ready

    @property
    def cached(self) -> bool:
        """Return True if numba's cache on disk has all its variants."""
        cache, codegen = self.dispatcher._cache, self.dispatcher.targetctx.codegen()
        found = cache._cache_file._load_index()
        return all(cache._index_key(types, codegen) in found for types in self._types)

    @property
    def ready(self) -> bool:
        return not self.dispatcher._can_compile

    def compile(self) -> None:
        """Compile or load it; a second call does nothing."""
        with self._lock:
            if self.ready:
                return
            for types in self._types:
                self.dispatcher.compile(types)
            self.dispatcher.disable_compile()

    def _compile_declared(self, *arguments: object, **named: object) -> object:
        """Compile, and return the result of the dispatcher for these arguments."""
        self.compile()
        return self.dispatcher


def kernel(*types: object, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel. `types`: its arguments, as numba signatures. `options`: of `njit`."""

    def declare(function: Callable[..., Any]) -> Any:
        module = function.__module__.rpartition(".")[2]
        declared = Kernel(function, types, options)
        _KERNELS.setdefault(module, []).append(declared)
        return declared.dispatcher

    return declare


def kernels(modules: Sequence[str] = MODULES) -> list[Kernel]:
    """Import these modules and return their kernels."""
    for module in modules:
        import_module(f"tlt_kernels.cpu.{module}")
    return [each for module in modules for each in _KERNELS[module]]


def cache_directory() -> str:
    """Return the directory of numba's cache."""
    return str(kernels(["tree"])[0].dispatcher.stats.cache_path)


def compile_all(modules: Sequence[str], on_kernel: Callable[[int, int], None]) -> int:
    """Compile or load the kernels of these modules; return how many were not in a cache.
    `on_kernel(done, total)` follows each.
    """
    needed = kernels(modules)
    missing = [each for each in needed if not (each.ready or each.cached)]
    for done, each in enumerate(missing):
        on_kernel(done, len(missing))
        each.compile()
    for each in needed:
        each.compile()
    return len(missing)
