"""LoRA on a CPU: the matrices of all loaded adapters, each in a slot, and their additions to the
rows of a step.

Ranks are padded with zeros to one bound, so all matmuls have shapes that the self-test of
`Numerics` has seen, and a row's addition depends only on the row and its adapter. Rows without an
adapter are not touched.

Legend: R rows, A rows of one adapter, K inputs, N outputs of a fused projection, r padded rank, X =
r times its parts, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.models.adapters import AdapterWeights, MatrixPair, linear_sizes
from tlt_server.models.config import ModelConfig
from tlt_server.models.numerics import Numerics
from tlt_server.models.quantization import MODULES

# Projection of a layer -> its linear maps, side by side.
FUSED = {name: [part.split(".")[-1] for part in parts] for name, parts in MODULES.items()}


class AdaptedRows(NamedTuple):
    """Rows of a step with the adapter of one slot."""

    slot: int
    row_A: Tensor | None  # int64; None: all rows


class ProjectionSlots:
    """The matrices of one fused projection, for every slot. The parts of B, with the scale, lie on
    a diagonal between zeros, which add nothing, so one matmul serves all parts.
    """

    def __init__(
        self, inputs: int, parts: dict[str, int], slots: int, rank: int, numerics: Numerics
    ) -> None:
        self.parts, self._rank, self._numerics = parts, rank, numerics
        self._a_SKX = torch.zeros(slots, inputs, rank * len(parts))
        self._b_SXN = torch.zeros(slots, rank * len(parts), sum(parts.values()))

    def clear(self, slot: int) -> None:
        self._a_SKX[slot].zero_()
        self._b_SXN[slot].zero_()

    def fill(self, slot: int, part: str, pair: MatrixPair, scale: float) -> None:
        """Copy a part's matrices, of at most the padded rank, to a zeroed slot."""
        at, widths = [*self.parts].index(part), [*self.parts.values()]
        x, n = at * self._rank, sum(widths[:at])
        low = slice(x, x + len(pair.a_rK))
        self._a_SKX[slot, :, low].copy_(pair.a_rK.t())
        self._b_SXN[slot, low, n : n + widths[at]].copy_(pair.b_Nr.t()).mul_(scale)

    def add(self, x_RK: Tensor, out_RN: Tensor, adapted: Sequence[AdaptedRows]) -> None:
        """Add the adapters' results for the rows of `x_RK` to the same rows of `out_RN`."""
        for slot, row_A in adapted:
            x_AK = x_RK if row_A is None else x_RK.index_select(0, row_A)
            low_AX = self._numerics.linear(x_AK, self._a_SKX[slot])
            added_AN = self._numerics.linear(low_AX, self._b_SXN[slot])
            if row_A is None:
                out_RN += added_AN
            else:
                out_RN.index_add_(0, row_A, added_AN)

    def samples(self) -> Iterator[Tensor]:
        """Yield a weight like those of each matmul, for the self-test; zeros would pass any
        test.
        """
        for weights_SKX in (self._a_SKX, self._b_SXN):
            yield torch.randn(weights_SKX.shape[1:], generator=torch.Generator().manual_seed(0))


class AdaptedProjection(NamedTuple):
    slots: ProjectionSlots
    rows: Sequence[AdaptedRows]

    def add(self, x_RK: Tensor, out_RN: Tensor) -> None:
        self.slots.add(x_RK, out_RN, self.rows)


class AdaptedLayer(NamedTuple):
    """The adapters' additions to a layer's projections in one step."""

    qkv: AdaptedProjection
    output: AdaptedProjection
    gate_up: AdaptedProjection
    down: AdaptedProjection


class AdapterSlots:
    """Slots for the adapters of one target, in any of its versions."""

    def __init__(self, config: ModelConfig, slots: int, rank: int, numerics: Numerics) -> None:
        sizes = linear_sizes(config)
        self._layers = [
            {
                name: ProjectionSlots(
                    sizes[parts[0]].inputs,
                    {part: sizes[part].outputs for part in parts},
                    slots,
                    rank,
                    numerics,
                )
                for name, parts in FUSED.items()
            }
            for _ in range(config.layers)
        ]

    def fill(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot, in place of the previous one."""
        for layer in self._layers:
            for projection in layer.values():
                projection.clear(slot)
        for at, part, pair in weights.pairs():
            for projection in self._layers[at].values():
                if part in projection.parts:
                    projection.fill(slot, part, pair, weights.adapter.scale)

    def of_rows(self, slot_R: NDArray[np.int32]) -> list[AdaptedLayer] | None:
        """Return the additions, by layer, for a step whose rows have these slots (-1: none); None
        if there are none.
        """
        held = np.unique(slot_R).tolist()
        adapted = [
            AdaptedRows(
                slot, None if len(held) == 1 else torch.from_numpy(np.flatnonzero(slot_R == slot))
            )
            for slot in held
            if slot >= 0
        ]
        if not adapted:
            return None
        return [
            AdaptedLayer(**{n: AdaptedProjection(slots, adapted) for n, slots in layer.items()})
            for layer in self._layers
        ]

    def samples(self) -> Iterator[tuple[Tensor, None]]:
        """Yield a weight of each shape for `Numerics.self_test`."""
        for projection in self._layers[0].values():
            for weight in projection.samples():
                yield weight, None
