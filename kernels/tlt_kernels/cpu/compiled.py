"""Kernels with the types of their arguments, so that no call compiles a variant of its own.

`kernel` declares one. Its types are compiled, or loaded from numba's cache, by `Kernel.compile`,
which an engine calls for all of them at its start, else by the first call. A call with other types
is a TypeError. Functions that only kernels call are plain `njit`: they are part of their callers.
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
    """One function that Python calls, and the types that it is called with."""

    def __init__(self, function: Callable[..., Any], types: Sequence[object], options: Any) -> None:
        self.name, self._types = function.__name__.strip("_"), types
        self.dispatcher = njit(cache=True, **options)(function)
        self.dispatcher._compile_for_args = self._compile_declared
        self._lock = Lock()  # a second thread waits until the first one has made it ready

    @property
    def cached(self) -> bool:
        """Return True if numba's cache on disk has all of it."""
        cache, codegen = self.dispatcher._cache, self.dispatcher.targetctx.codegen()
        found = cache._cache_file._load_index()
        return all(cache._index_key(types, codegen) in found for types in self._types)

    @property
    def ready(self) -> bool:
        return not self.dispatcher._can_compile

    def compile(self) -> None:
        """Make it ready; a second call does nothing."""
        with self._lock:
            if self.ready:
                return
            for types in self._types:
                self.dispatcher.compile(types)
            self.dispatcher.disable_compile()

    def _compile_declared(self, *arguments: object, **named: object) -> object:
        """Return what the dispatcher calls for these arguments: itself, now that it is ready."""
        self.compile()
        return self.dispatcher


def kernel(*types: object, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel. `types`: of its arguments, as signatures of numba; `options`: of `njit`."""

    def declare(function: Callable[..., Any]) -> Any:
        module = function.__module__.rpartition(".")[2]
        declared = Kernel(function, types, options)
        _KERNELS.setdefault(module, []).append(declared)
        return declared.dispatcher

    return declare


def kernels(modules: Sequence[str] = MODULES) -> list[Kernel]:
    """Import these modules, and return their kernels."""
    for module in modules:
        import_module(f"tlt_kernels.cpu.{module}")
    return [each for module in modules for each in _KERNELS[module]]


def cache_directory() -> str:
    """Return where numba keeps what it has compiled."""
    return str(kernels(["tree"])[0].dispatcher.stats.cache_path)


def compile_all(modules: Sequence[str], on_kernel: Callable[[int, int], None]) -> int:
    """Make the kernels of these modules ready, and return how many no cache had. `on_kernel`: gets
    the number of those that are compiled by now, and of all that must be.
    """
    needed = kernels(modules)
    missing = [each for each in needed if not (each.ready or each.cached)]
    for done, each in enumerate(missing):
        on_kernel(done, len(missing))
        each.compile()
    for each in needed:
        each.compile()
    return len(missing)
