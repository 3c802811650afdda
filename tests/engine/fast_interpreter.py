"""Triton's CPU interpreter at up to three times its speed: the language is patched once.

By itself the interpreter patches the language again for every launch and every call of a device
function, and computes each integer sum and product again in 64 bits to check it for overflow. Whole
engines run without that check; the kernels' own tests keep it (`checked`). With a Triton whose
interior differs this changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

import tlt_server.engine.devices.cuda  # noqa: F401  kernels are to be imported while the language is its own


@contextmanager
def patched_once(*, checked: bool = False) -> Iterator[None]:
    builder, patch = (
        getattr(interpreter, "interpreter_builder", None),
        getattr(interpreter, "_patch_lang", None),
    )
    if builder is None or patch is None or not hasattr(interpreter, "_LangPatchScope"):
        yield
        return
    options = builder.options
    scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    builder.options = replace(options, sanitize_overflow=checked)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    try:
        yield
    finally:
        interpreter._patch_lang, builder.options = patch, options
        scope.restore()
