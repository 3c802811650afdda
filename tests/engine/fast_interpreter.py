"""Triton's CPU interpreter at several times its speed: the language is patched once.

By itself the interpreter patches the language again for every launch and every call of a device
function, computes each integer sum and product again in 64 bits for a check of overflows that it
does not make, describes each value's type and shape again, and finds out for each operation what
its operands promote to. Here operations of plain types ask numpy at once; all others go the slow
way. Matmuls add in ascending order, so that no bit depends on a row's place, as on a GPU. With a
Triton whose interior differs this changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.language import core, semantic
from triton.runtime import interpreter

import tlt_server.engine.gpu.device  # noqa: F401  kernels are to be imported while the language is its own
from tests.engine.ascending_matmul import ascending

Builder: Any = getattr(interpreter, "InterpreterBuilder", None)
Patch = tuple[Any, str, Callable[..., Any]]
NEEDED = (  # what the patches replace
    (interpreter, "interpreter_builder"),
    (interpreter, "interpreter_semantic"),
    (interpreter, "_LangPatchScope"),
    (interpreter, "_patch_lang"),
    (interpreter, "_patch_attr"),
    (interpreter, "_get_np_dtype"),
    (interpreter, "TensorHandle"),
    (Builder, "create_dot"),
    (core.block_type, "with_element_ty"),
    (core.block_type, "to_ir"),
    (semantic.TritonSemantic, "broadcast_impl_value"),
    (memory, "load"),
)


Binary = Callable[[Any, Any], Any]
LIMITS = {"int32": 2**31, "uint32": 2**32, "int64": 2**63, "uint64": 2**64}
WHOLE = frozenset(LIMITS)
FLOAT = frozenset(("fp32",))
SUMS = WHOLE | FLOAT
NUMPY = {
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "fp32": np.float32,
}
LOADED = {
    name: np.dtype(kind) for name, kind in (NUMPY | {"int8": np.int8, "uint8": np.uint8}).items()
}


def _quotient(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right  # towards 0


# Operations whose result has the type of both operands.
SAME_TYPE: dict[str, tuple[Binary, frozenset[str]]] = {
    "__add__": (np.add, SUMS),
    "__radd__": (np.add, SUMS),
    "__sub__": (np.subtract, SUMS),
    "__mul__": (np.multiply, SUMS),
    "__rmul__": (np.multiply, SUMS),
    "__truediv__": (np.divide, FLOAT),
    "__floordiv__": (_quotient, WHOLE),
    "__mod__": (np.fmod, WHOLE),
    "__and__": (np.bitwise_and, WHOLE | {"int1"}),
    "__or__": (np.bitwise_or, WHOLE | {"int1"}),
    "__xor__": (np.bitwise_xor, WHOLE),
}
COMPARISONS: dict[str, Binary] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
ALL = slice(None)
PROMOTED = {("int32", "int64"), ("int64", "int32")}
_blocks: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}
_constants: dict[tuple[float, str], tl.tensor] = {}


def _block(scalar: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
    key = scalar.name, shape
    if (block := _blocks.get(key)) is None:
        block = _blocks[key] = tl.block_type(scalar, list(shape))
    return block


def _made(data: Any, scalar: tl.dtype, *operands: tl.tensor) -> tl.tensor:
    """Return the tensor of what operands gave: a block if one of them is."""
    kind = scalar
    for each in operands:
        if type(each.type) is tl.block_type:
            kind = _block(scalar, data.shape)
            break
    return tl.tensor(interpreter.TensorHandle(data, scalar), kind)


def _fits(value: Any, kind: str) -> bool:
    """Say whether a number takes the type of the tensor that it meets."""
    if type(value) is int:
        return 0 <= value < LIMITS.get(kind, 2**31 if kind == "fp32" else 0)
    return type(value) is float and kind == "fp32"


def _constant(value: float, scalar: tl.dtype) -> tl.tensor:
    """Return a number as a tensor, made once and never written to."""
    key = value, scalar.name  # a zero has no sign here, as in Triton
    if (found := _constants.get(key)) is None:
        data = np.array([value or 0], NUMPY[scalar.name])
        data.flags.writeable = False
        found = _constants[key] = tl.tensor(interpreter.TensorHandle(data, scalar), scalar)
    return found


def _moved(pointers: tl.tensor, by: Any) -> tl.tensor | None:
    """Return pointers that were moved by elements, if it is plain how."""
    width = max(1, pointers.dtype.element_ty.primitive_bitwidth // 8)
    own = pointers.handle.data
    if type(by) is int and by >= 0:
        return _made(own + np.uint64(width * by), pointers.dtype, pointers)
    if type(by) is tl.tensor and by.dtype.name in ("int32", "int64"):
        offsets = by.handle.data.astype(np.uint64)
        return _made(own + width * offsets, pointers.dtype, pointers, by)
    return None


def _operation(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that asks numpy at once where both operands are of one plain type, or one
    is a number.
    """
    compares = name in COMPARISONS
    operation, plain = (COMPARISONS[name], SUMS) if compares else SAME_TYPE[name]

    def quick(self: tl.tensor, other: Any) -> Any:
        kind = self.dtype.name
        value = other.value if type(other) is tl.constexpr else other
        if kind not in plain:
            if name == "__add__" and isinstance(self.dtype, tl.pointer_type):
                moved = _moved(self, value)
                return slow(self, other) if moved is None else moved
            return slow(self, other)
        scalar = self.dtype
        if type(value) is tl.tensor:
            if value.dtype.name != kind:
                if (kind, value.dtype.name) not in PROMOTED:
                    return slow(self, other)
                scalar = tl.int64
        elif _fits(value, kind):
            value = _constant(value, scalar)
        else:
            return slow(self, other)
        data = operation(self.handle.data, value.handle.data)
        return _made(data, tl.int1 if compares else scalar, self, value)

    return quick


def _where(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(condition: Any, x: Any, y: Any) -> Any:
        left, right = (each.value if type(each) is tl.constexpr else each for each in (x, y))
        if type(left) is tl.tensor and _fits(right, left.dtype.name):
            right = _constant(right, left.dtype)
        elif type(right) is tl.tensor and _fits(left, right.dtype.name):
            left = _constant(left, right.dtype)
        if not (
            type(condition) is type(left) is type(right) is tl.tensor
            and condition.dtype.name == "int1"
            and left.dtype.name == right.dtype.name in SUMS
        ):
            return slow(condition, x, y)
        data = np.where(condition.handle.data, left.handle.data, right.handle.data)
        return _made(data, left.dtype, condition, left, right)

    return quick


def _load(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
        value = other.value if type(other) is tl.constexpr else other
        if not (
            type(pointer) is tl.tensor
            and isinstance(pointer.dtype, tl.pointer_type)
            and (kind := pointer.dtype.element_ty.name) in LOADED
            and named.keys() <= {"cache_modifier", "eviction_policy", "volatile"}
            and (value is None or (mask is not None and _fits(value, kind)))
            and (mask is None or (type(mask) is tl.tensor and mask.dtype.name == "int1"))
        ):
            return slow(pointer, mask, other, **named)
        places, block = pointer.handle.data, pointer.type.is_block()
        if mask is None:
            chosen = np.ones(places.shape, bool)
        elif block and not mask.type.is_block():
            chosen = np.full(places.shape, mask.handle.data)
        elif block == mask.type.is_block() and mask.handle.data.shape == places.shape:
            chosen = mask.handle.data
        else:
            return slow(pointer, mask, other, **named)
        left = np.full(places.shape, value or 0, LOADED[kind])
        found = memory.load(places, chosen, left, LOADED[kind])
        return _made(found, pointer.dtype.element_ty, pointer)

    return quick


def _to(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(self: tl.tensor, dtype: Any, *given: Any, **named: Any) -> Any:
        to = dtype.value if type(dtype) is tl.constexpr else dtype
        kind = self.dtype.name
        if given or named or to.name not in NUMPY or not (kind in NUMPY or kind == "int1"):
            return slow(self, dtype, *given, **named)
        if kind == to.name:
            return self
        return _made(self.handle.data.astype(NUMPY[to.name]), to, self)

    return quick


def _item(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(self: tl.tensor, slices: Any) -> Any:
        if self.type.is_block() and slices in ((ALL, None), (None, ALL)):
            if self.handle.data.ndim == 1:
                return _made(self.handle.data[slices], self.dtype, self)
        return slow(self, slices)

    return quick


def _arange(slow: Callable[..., Any]) -> Callable[..., Any]:
    made = cache(slow)  # the same range is never written to

    def quick(start: Any, end: Any) -> Any:
        return made(*(each.value if type(each) is tl.constexpr else each for each in (start, end)))

    return quick


MEMBERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "to": _to,
    "__getitem__": _item,
    **{name: partial(_operation, name) for name in (*SAME_TYPE, *COMPARISONS)},
}
FUNCTIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "arange": _arange,
    "load": _load,
    "where": _where,
}


def _short_cuts() -> list[Patch]:
    """Return functions that give what Triton's give, and remember what a type decides."""
    described: dict[str, tuple[tl.tuple, tl.constexpr]] = {}
    numpy_types: dict[str, Any] = {}
    numpy_type = interpreter._get_np_dtype
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
        (semantic.TritonSemantic, "broadcast_impl_value", broadcast_values),
        (inspect, "getfullargspec", cache(inspect.getfullargspec)),  # asked at each launch
    ]


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Bind a builtin to the interpreter, without the wrapper that asks whether it is bound."""
    inner = getattr(member, "__wrapped__", member)

    def bound(*args: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **named)

    quicker = MEMBERS if obj is tl.tensor else FUNCTIONS if obj in (tl, core) else {}
    scope.set_attr(obj, name, quicker[name](bound) if name in quicker else bound)


@contextmanager
def patched_once() -> Iterator[None]:
    if not all(hasattr(owner, name) for owner, name in NEEDED):
        yield
        return
    builder, patch = interpreter.interpreter_builder, interpreter._patch_lang
    options = builder.options
    patches = [
        *_short_cuts(),
        (interpreter, "_patch_attr", _patch_attr),
        (Builder, "create_dot", ascending(Builder.create_dot)),
    ]
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
