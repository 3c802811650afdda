"""Dataclasses of arrays: how they become named tensors of a file and come back checked.

The name of a field ends in its dimensions, one capital letter each; its annotation is its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Part = TypeVar("Part")


def tensors_of(prefix: str, part: object) -> dict[str, Array]:
    """Return the arrays by the names that they have in a file."""
    return {
        f"{prefix}.{field.name}": np.ascontiguousarray(getattr(part, field.name))
        for field in fields(part)  # type: ignore[arg-type]
    }


def parsed(kind: type[Part], prefix: str, tensors: Mapping[str, Array]) -> Part:
    """Return one part; `ValueError` unless its arrays are there, of their types."""
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        name = f"{prefix}.{field.name}"
        if name not in tensors:
            raise ValueError(f"{name} is missing")
        dtype = str(field.type).removeprefix("NDArray[np.").removesuffix("]")
        if tensors[name].dtype != dtype:
            raise ValueError(f"{name} is {tensors[name].dtype}, not {dtype}")
        dimensions = sum(letter.isupper() for letter in field.name.rpartition("_")[2]) or 1
        if tensors[name].ndim != dimensions:
            raise ValueError(f"{name} has {tensors[name].ndim} dimensions, not {dimensions}")
        values[field.name] = tensors[name]
    return kind(**values)


def same_length(part: object, suffix: str) -> bool:
    """Return True if all arrays over this dimension are equally long."""
    names = [f.name for f in fields(part) if f.name.endswith(suffix)]  # type: ignore[arg-type]
    return len({len(getattr(part, name)) for name in names}) == 1


def expect(name: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} does not fit the rest")


def within(name: str, values: Array, limit: int) -> None:
    """`ValueError` unless all values lie in [0, limit)."""
    if values.size and not (0 <= int(values.min()) <= int(values.max()) < limit):
        raise ValueError(
            f"{name} lies between {values.min()} and {values.max()}, not in [0, {limit})"
        )
