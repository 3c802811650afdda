"""The variants of Triton kernels: lists those that launches need, without launching; lists those
that a process has loaded, with their place in Triton's cache.

A variant is a kernel with its constants, the types and alignments of its arguments, and its
options. Triton describes it as JSON, from which another process can compile it (`compiler.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from triton import knobs
from triton.runtime.jit import DependenciesFinder, JITFunction

PACKAGE = "tlt_kernels.gpu"

_merge = DependenciesFinder._update_hash


def _hash_first(finder: Any, function: Any) -> None:
    """Hash a called function before its globals are merged into the caller's. Triton merges first,
    so a kernel's key in its cache depends on what the process hashed before, and another process
    compiles the kernel again.
    """
    _ = function.cache_key
    _merge(finder, function)


DependenciesFinder._update_hash = _hash_first


class Variant(NamedTuple):
    module: str
    kernel: str  # its name in the module
    specialization: str  # JSON, as `JITFunction.preload` takes it


class Unloaded(Exception):
    """A launch needs a kernel that is not loaded."""


def preload(variant: Variant) -> Any:
    """Return the compiled variant, for a launch to find; Triton compiles it for the active driver's
    target, unless its cache has it. `ValueError` if the kernel is not from this package.
    """
    if not variant.module.startswith(f"{PACKAGE}."):
        raise ValueError(f"{variant.module} is not a module of tlt_kernels")
    return getattr(import_module(variant.module), variant.kernel).preload(variant.specialization)


def load(variant: Variant) -> None:
    """Load a variant onto the GPU, so that its first launch, perhaps in a capture, need not."""
    _ = preload(variant).run  # Triton loads the program where its launcher is asked for


@contextmanager
def only_loaded() -> Iterator[None]:
    """Make launches that would load a kernel raise `Unloaded`. Loading is forbidden in a
    capture.
    """

    def refuse(**told: Any) -> bool:
        raise Unloaded(told["fn"].name)

    with _hook("jit_cache_hook", refuse):
        yield


class _Unlaunched:
    """Stands in for a kernel while launches are listed."""

    function = packed_metadata = None

    def launch_metadata(self, *told: object) -> None:
        pass

    def run(self, *told: object) -> None:
        pass


@contextmanager
def listed() -> Iterator[dict[Variant, None]]:
    """Fill the mapping with the variants that the block would launch and that are not loaded yet,
    in order. Nothing is compiled or launched, not even loaded kernels, so their outputs are
    undefined; a launch that used them as addresses could read anywhere.
    """
    found: dict[Variant, None] = {}
    held = [(kernels, key, kernel) for kernels in _all_loaded() for key, kernel in kernels.items()]
    for kernels, key, _ in held:
        kernels[key] = _Unlaunched()

    def hold(**told: Any) -> bool:
        found[_variant(told)] = None
        kernels = _kernels(told)
        kernels[told["key"]] = _Unlaunched()  # the next launch of this variant is quick
        held.append((kernels, told["key"], None))
        return True  # seen to: Triton neither compiles nor launches

    with _hook("jit_cache_hook", hold):
        try:
            yield found
        finally:
            for kernels, key, kernel in held:
                if kernel is None:
                    del kernels[key]
                else:
                    kernels[key] = kernel


@contextmanager
def loaded() -> Iterator[dict[Variant, str]]:
    """Fill the mapping with the variants that the block loads, and their hashes in Triton's
    cache.
    """
    found: dict[Variant, str] = {}

    def note(**told: Any) -> None:
        found[_variant(told)] = _kernels(told)[told["key"]].hash

    with _hook("jit_post_compile_hook", note):
        yield found


def _variant(told: dict[str, Any]) -> Variant:
    kernel = told["fn"]
    return Variant(kernel.module, kernel.name, told["compile"]["specialization_data"])


def _all_loaded() -> list[dict[Any, Any]]:
    """Return the loaded kernels of each function of this package, on each device."""
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(f"{PACKAGE}.")]
    functions = {
        id(value): value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    return [caches[0] for each in functions.values() for caches in each.device_caches.values()]


def _kernels(told: dict[str, Any]) -> dict[Any, Any]:
    """Return the kernels that Triton has loaded of this function, by their keys."""
    kernels: dict[Any, Any] = told["fn"].jit_function.device_caches[told["compile"]["device"]][0]
    return kernels


@contextmanager
def _hook(name: str, hook: Callable[..., object]) -> Iterator[None]:
    """Install a hook of Triton. An earlier hook is called first and decides first."""
    before = getattr(knobs.runtime, name)

    def both(**told: Any) -> object:
        return (before(**told) if before else None) or hook(**told)

    setattr(knobs.runtime, name, both)
    try:
        yield
    finally:
        setattr(knobs.runtime, name, before)
