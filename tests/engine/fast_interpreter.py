"""Triton's CPU interpreter at several times its speed: the language is patched once.

By itself the interpreter patches the language again for every launch and every call of a device
function, computes each integer sum and product again in 64 bits to check it for overflow, and
describes each value's type and shape again. Whole engines run without the overflow check; the
kernels' own tests keep it (`checked`). With a Triton whose interior differs this changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

import tlt_server.engine.devices.cuda  # noqa: F401  kernels are to be imported while the language is its own

Patch = tuple[Any, str, Callable[..., Any]]
NEEDED = (  # what the patches replace
    (interpreter, "interpreter_builder"),
    (interpreter, "interpreter_semantic"),
    (interpreter, "_LangPatchScope"),
    (interpreter, "_patch_lang"),
    (interpreter, "_patch_attr"),
    (interpreter, "_get_np_dtype"),
    (core, "_unwrap_if_constexpr"),
    (core.block_type, "with_element_ty"),
    (core.block_type, "to_ir"),
    (semantic.TritonSemantic, "broadcast_impl_value"),
)


def _short_cuts() -> list[Patch]:
    """Return functions that give what Triton's give, and remember what a type decides."""
    described: dict[str, tuple[tl.tuple, tl.constexpr]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}
    numpy_types: dict[str, Any] = {}
    numpy_type, unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    make_tensor = core.tensor.__init__

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        known = described.get(type.name)
        if known is None:
            make_tensor(self, handle, type)
            described[type.name] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    def with_element_type(self: tl.block_type, scalar: tl.dtype) -> tl.block_type:
        key = scalar.name, tuple(self.shape.values)
        if (block := blocks.get(key)) is None:
            block = blocks[key] = tl.block_type(scalar, self.shape)
        return block

    def get_numpy_type(type: tl.dtype) -> Any:
        element = type.element_ty if isinstance(type, tl.block_type) else type
        if (found := numpy_types.get(element.name)) is None:
            found = numpy_types[element.name] = numpy_type(element)
        return found

    def unwrap_constexpr(value: Any) -> Any:
        if isinstance(value, tl.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, list | tuple | tl.tuple) else value

    def broadcast_values(self: Any, left: tl.tensor, right: tl.tensor) -> Any:
        block = left.type.is_block()
        if block == right.type.is_block() and (
            not block or left.type.shape.values == right.type.shape.values
        ):
            return left, right
        return broadcast(self, left, right)

    return [
        (core.tensor, "__init__", init_tensor),
        (core.block_type, "with_element_ty", with_element_type),
        (core.block_type, "to_ir", lambda self, builder: self),  # its types are the language's own
        (interpreter, "_get_np_dtype", get_numpy_type),
        (core, "_unwrap_if_constexpr", unwrap_constexpr),
        (semantic.TritonSemantic, "broadcast_impl_value", broadcast_values),
    ]


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Bind a builtin to the interpreter, without the wrapper that asks whether it is bound."""
    inner = getattr(member, "__wrapped__", member)

    def bound(*args: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **named)

    scope.set_attr(obj, name, bound)


@contextmanager
def patched_once(*, checked: bool = False) -> Iterator[None]:
    if not all(hasattr(owner, name) for owner, name in NEEDED):
        yield
        return
    builder, patch = interpreter.interpreter_builder, interpreter._patch_lang
    options = builder.options
    patches = [*_short_cuts(), (interpreter, "_patch_attr", _patch_attr)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    builder.options = replace(options, sanitize_overflow=checked)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    try:
        yield
    finally:
        interpreter._patch_lang, builder.options = patch, options
        scope.restore()
        for owner, name, original in originals:
            setattr(owner, name, original)
