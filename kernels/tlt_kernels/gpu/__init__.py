"""Triton kernels of the GPU engine: one file per operation, each with a slow twin that its tests
compare it with.

Every launch but `lora.shrink`'s takes `**PDL`, and every program calls `pdl_wait()` before it
touches what earlier kernels wrote or still read. No launch function waits for the device, and none
allocates memory in a way that a CUDA graph cannot capture.
"""

from typing import Any

from triton.runtime.jit import DependenciesFinder

_merge = DependenciesFinder._update_hash


def _hash_first(finder: Any, function: Any) -> None:
    """Hash a called function before its globals are merged into the caller's. Triton merges first,
    so a kernel's key in its cache depends on what the process hashed before, and another process
    compiles the kernel again.
    """
    _ = function.cache_key
    _merge(finder, function)


DependenciesFinder._update_hash = _hash_first
