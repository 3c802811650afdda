"""Triton's CPU interpreter at several times its speed: the language is patched once.

By itself the interpreter patches the language again for every launch and every call of a device
function, computes each integer sum and product again in 64 bits for a check of overflows that it
does not make, describes each value's type and shape again, and finds out for each operation what
its operands promote to. With a Triton whose interior differs this changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    (interpreter, "TensorHandle"),
    (core, "_unwrap_if_constexpr"),
    (core.block_type, "with_element_ty"),
    (core.block_type, "to_ir"),
    (semantic.TritonSemantic, "broadcast_impl_value"),
    (semantic.TritonSemantic, "binary_op_type_checking_impl"),
)


WHOLE = frozenset(("int32", "uint32", "int64", "uint64"))
SUMS = WHOLE | {"fp32"}
# Operations whose result has the type of both operands.
SAME_TYPE: dict[str, tuple[np.ufunc, frozenset[str]]] = {
    "__add__": (np.add, SUMS),
    "__radd__": (np.add, SUMS),
    "__sub__": (np.subtract, SUMS),
    "__mul__": (np.multiply, SUMS),
    "__rmul__": (np.multiply, SUMS),
    "__and__": (np.bitwise_and, WHOLE | {"int1"}),
    "__or__": (np.bitwise_or, WHOLE | {"int1"}),
    "__xor__": (np.bitwise_xor, WHOLE),
}
COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
NUMPY = {
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "fp32": np.float32,
}
_blocks: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}


def _block(scalar: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
    key = scalar.name, shape
    if (block := _blocks.get(key)) is None:
        block = _blocks[key] = tl.block_type(scalar, list(shape))
    return block


def _shape(first: tl.tensor, second: tl.tensor, data: Any, scalar: tl.dtype) -> tl.dtype:
    """Return the type of what two tensors gave."""
    if first.type.is_block() or second.type.is_block():
        return _block(scalar, data.shape)
    return scalar


def _offsets(pointers: tl.tensor, other: Any) -> bool:
    return (
        isinstance(pointers.dtype, tl.pointer_type)
        and type(other) is tl.tensor
        and other.dtype.name in ("int32", "int64")
    )


def _operation(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that asks numpy at once where both operands are of one plain type, or one
    is a small number.
    """
    compares = name in COMPARISONS
    ufunc, plain = (COMPARISONS[name], SUMS) if compares else SAME_TYPE[name]
    handle, tensor = interpreter.TensorHandle, tl.tensor

    def quick(self: tl.tensor, other: Any) -> Any:
        kind = self.dtype.name
        if kind not in plain:
            if name == "__add__" and _offsets(self, other):
                moved = interpreter.interpreter_builder.create_addptr(self.handle, other.handle)
                return tensor(moved, _shape(self, other, moved.data, self.dtype))
            return slow(self, other)
        value = other.value if type(other) is tl.constexpr else other
        own = self.handle.data
        if type(value) is tensor and value.dtype.name == kind:
            data = ufunc(own, value.handle.data)
            element = tl.int1 if compares else self.dtype
            shaped = _shape(self, value, data, element)
        elif (type(value) is int and 0 <= value < 2**31 and kind != "int1") or (
            type(value) is float and kind == "fp32" and value != 0
        ):
            data = ufunc(own, np.array([value], NUMPY[kind]))
            element = tl.int1 if compares else self.dtype
            shaped = _shape(self, self, data, element)
        else:
            return slow(self, other)
        return tensor(handle(data, self.handle.dtype), shaped)

    return quick


def _remembered_types() -> list[Patch]:
    """Return functions that make blocks, handles and pairs without looking at each again."""
    make_block = core.block_type.__init__
    check = semantic.TritonSemantic.binary_op_type_checking_impl
    shapes: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init_handle(self: Any, data: Any, dtype: tl.dtype, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def init_block(self: tl.block_type, element: tl.dtype, shape: Any) -> None:
        sizes = tuple(shape.values if isinstance(shape, tl.tuple) else shape)
        if not all(type(size) is int for size in sizes):
            make_block(self, element, shape)
        elif (known := shapes.get((element.name, sizes))) is not None:
            vars(self).update(known)
        else:
            make_block(self, element, shape)
            shapes[element.name, sizes] = dict(vars(self))

    def check_operands(self: Any, left: Any, right: Any, *rules: bool, **named: bool) -> Any:
        tensors = type(left) is tl.tensor and type(right) is tl.tensor
        if tensors and left.dtype.name == right.dtype.name and left.dtype.name in SUMS:
            return self.broadcast_impl_value(left, right)
        return check(self, left, right, *rules, **named)

    return [
        (semantic.TritonSemantic, "binary_op_type_checking_impl", check_operands),
        (interpreter.TensorHandle, "__init__", init_handle),
        (core.block_type, "__init__", init_block),
    ]


def _short_cuts() -> list[Patch]:
    """Return functions that give what Triton's give, and remember what a type decides."""
    described: dict[str, tuple[tl.tuple, tl.constexpr]] = {}
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
        return _block(scalar, tuple(self.shape.values))

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

    operation = obj is tl.tensor and (name in SAME_TYPE or name in COMPARISONS)
    scope.set_attr(obj, name, _operation(name, bound) if operation else bound)


@contextmanager
def patched_once() -> Iterator[None]:
    if not all(hasattr(owner, name) for owner, name in NEEDED):
        yield
        return
    builder, patch = interpreter.interpreter_builder, interpreter._patch_lang
    options = builder.options
    patches = [*_remembered_types(), *_short_cuts(), (interpreter, "_patch_attr", _patch_attr)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    builder.options = replace(options, sanitize_overflow=False)
    scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    try:
        yield
    finally:
        interpreter._patch_lang, builder.options = patch, options
        scope.restore()
        for owner, name, original in originals:
            setattr(owner, name, original)
