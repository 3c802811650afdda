"""Dataclasses of arrays: converted to named tensors of a file, and checked when read back.

A field's name ends in its dimensions, one capital letter each; its annotation is its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tlt_kernels.filters import NO_FILTERS, Filters

Array = NDArray[Any]
Part = TypeVar("Part")


def tensors_of(prefix: str, part: object) -> dict[str, Array]:
    """Return the arrays by their names in a file."""
    found: dict[str, Array] = {}
    for field in fields(part):  # type: ignore[arg-type]
        name, array = f"{prefix}.{field.name}", getattr(part, field.name)
        columns = {name.replace("filters", each): array[each] for each in array.dtype.names or ()}
        found |= columns or {name: array}
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def parsed(kind: type[Part], prefix: str, tensors: Mapping[str, Array]) -> Part:
    """Return one part. `ValueError` unless all its arrays exist with their dtypes."""
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        dtype = str(field.type).removeprefix("NDArray[np.").removesuffix("]")
        name = f"{prefix}.{field.name}"
        values[field.name] = (
            _filters(name, tensors) if dtype == "void" else _array(name, dtype, tensors)
        )
    return kind(**values)


def _array(name: str, dtype: DTypeLike, tensors: Mapping[str, Array]) -> Array:
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    if tensors[name].dtype != dtype:
        raise ValueError(f"{name} is {tensors[name].dtype}, not {np.dtype(dtype)}")
    dimensions = sum(letter.isupper() for letter in name.rpartition("_")[2]) or 1
    if tensors[name].ndim != dimensions:
        raise ValueError(f"{name} has {tensors[name].ndim} dimensions, not {dimensions}")
    return tensors[name]


def _filters(name: str, tensors: Mapping[str, Array]) -> NDArray[np.void]:
    """Return filters; those that did not exist when the file was written keep all tokens."""
    there = {
        field: _array(column, dtype, tensors)
        for field, dtype in Filters.columns(np.float32)
        if (column := name.replace("filters", field)) in tensors
    }
    lengths = {len(array) for array in there.values()}
    if len(lengths) != 1:
        raise ValueError(f"{name} has columns of {sorted(lengths)} values; they must be as long")
    found = NO_FILTERS.table(lengths.pop())
    for field, array in there.items():
        found[field] = array
    return found


def same_length(part: object, suffix: str) -> bool:
    """Return True if all arrays over this dimension are equally long."""
    names = [f.name for f in fields(part) if f.name.endswith(suffix)]  # type: ignore[arg-type]
    return len({len(getattr(part, name)) for name in names}) == 1


def expect(name: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} does not fit the rest")


def within(name: str, values: Array, limit: int) -> None:
    """Raise `ValueError` unless all values are in [0, limit)."""
    if values.size and not (0 <= int(values.min()) <= int(values.max()) < limit):
        raise ValueError(
            f"{name} lies between {values.min()} and {values.max()}, not in [0, {limit})"
        )
