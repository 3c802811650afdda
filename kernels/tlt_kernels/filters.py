"""The filters of sampling: their parameters, and what they keep, found by a full sort.

A filter is a field here and a step in each of `Filters.kept`, `cpu/sampling.py` and
`gpu/filters.py`, which are compared with it; engines and records pass filters on by name.

Legend: V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, astuple
from numpy.typing import NDArray


class Filters(Struct, frozen=True, kw_only=True, gc=False):
    """The filters of one sequence, in the order in which they apply. The defaults keep all
    tokens. `Sampling` has these fields too.
    """

    min_p: float = 0.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0

    @staticmethod
    def of(sampling: object) -> Filters:
        """Return the filters of a record that has fields of these names."""
        return Filters(**{name: getattr(sampling, name) for name in FILTERS})

    @staticmethod
    def columns(real: type[np.floating[Any]]) -> list[tuple[str, type[np.number[Any]]]]:
        """Return the names with their dtypes: int32, and `real` for fractions."""
        return [
            (name, np.int32 if isinstance(default, int) else real)
            for name, default in FILTERS.items()
        ]

    def table(self, count: int) -> NDArray[np.void]:
        """Return an array of records that all have these filters."""
        return np.array([astuple(self)] * count, self.columns(np.float32))

    def words(self) -> NDArray[np.int32]:
        """Return an int32 for each field, which of a fraction has the bits of the float32."""
        return self.table(1).view(np.int32)

    def kept(self, z_V: NDArray[np.floating[Any]]) -> tuple[NDArray[np.bool_], float]:
        """Return a mask of the tokens that are kept, and the least distance of a float threshold
        from a probability.

        A fast sum in another order may decide otherwise only where that distance is of the size of
        its rounding errors.
        """
        keep_V, distance = z_V > -np.inf, np.inf
        weight_V = np.exp(z_V.astype(np.float64) - np.float64(z_V.max()))
        if self.min_p > 0:
            keep_V = keep_V & (weight_V >= self.min_p)
            distance = min(distance, np.abs(weight_V / self.min_p - 1).min())
        order = [v for v in sorted(range(len(z_V)), key=lambda v: (-z_V[v], v)) if keep_V[v]]
        if self.top_k > 0:
            order = order[: self.top_k]
        if self.top_p < 1:
            p = weight_V[order] / weight_V[order].sum()
            before = np.cumsum(p) - p
            distance = min(distance, np.abs(before[1:] - self.top_p).min(initial=np.inf))
            order = [v for i, v in enumerate(order) if i == 0 or before[i] < self.top_p]
        keep_V = np.zeros(len(z_V), bool)
        keep_V[order] = True
        return keep_V, float(distance)


NO_FILTERS = Filters()
FILTERS = asdict(NO_FILTERS)  # by name, what keeps all tokens
