"""LoRA on a CPU: the matrices of all loaded adapters, each in a slot, and what they add to the rows
of a step.

Ranks are padded with zeros to one bound, so all matmuls have shapes that the self-test of
`Numerics` has seen, and what is added to a row depends on the row and its adapter alone. Rows
without an adapter are not touched.

Legend: R rows, A rows of one adapter, K inputs, X fused width, N outputs of a part, r padded rank,
S slots, P parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.models.adapters import AdapterWeights, linear_sizes
from tlt_server.models.config import ModelConfig
from tlt_server.models.numerics import Numerics

FUSED = {  # projection of a layer -> its linear maps, side by side
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


class AdaptedRows(NamedTuple):
    """Rows of a step that have the adapter of one slot."""

    slot: int
    scale: float
    row_A: Tensor  # int64


class ProjectionSlots:
    """The matrices of one fused projection, for every slot."""

    def __init__(
        self, inputs: int, parts: dict[str, int], slots: int, rank: int, numerics: Numerics
    ) -> None:
        self.parts, self._rank, self._numerics = parts, rank, numerics
        self._a_SKX = torch.zeros(slots, inputs, rank * len(parts))
        self._b_PSrN = [torch.zeros(slots, rank, width) for width in parts.values()]

    def clear(self, slot: int) -> None:
        self._a_SKX[slot].zero_()
        for b_SrN in self._b_PSrN:
            b_SrN[slot].zero_()

    def fill(self, slot: int, part: str, a_rK: Tensor, b_Nr: Tensor) -> None:
        """Copy a part's matrices, of at most the padded rank, to a slot of zeros."""
        at, rank = [*self.parts].index(part), len(a_rK)
        first = at * self._rank
        self._a_SKX[slot, :, first : first + rank].copy_(a_rK.t())
        self._b_PSrN[at][slot, :rank].copy_(b_Nr.t())

    def add(self, x_RK: Tensor, out_RX: Tensor, adapted: Sequence[AdaptedRows]) -> None:
        """Add to the rows of `out_RX` what their adapters make of the rows of `x_RK`."""
        for slot, scale, row_A in adapted:
            low_AX = self._numerics.linear(x_RK.index_select(0, row_A), self._a_SKX[slot]) * scale
            added = [
                self._numerics.linear(low_Ar.contiguous(), b_SrN[slot])
                for low_Ar, b_SrN in zip(low_AX.split(self._rank, 1), self._b_PSrN, strict=True)
            ]
            out_RX.index_add_(0, row_A, torch.cat(added, 1))

    def samples(self) -> Iterator[Tensor]:
        """Yield a weight like those of each matmul, for the self-test: zeros would pass any."""
        for weights_SKX in (self._a_SKX, *self._b_PSrN):
            yield torch.randn(weights_SKX.shape[1:], generator=torch.Generator().manual_seed(0))


class AdaptedProjection(NamedTuple):
    slots: ProjectionSlots
    rows: Sequence[AdaptedRows]

    def add(self, x_RK: Tensor, out_RX: Tensor) -> None:
        self.slots.add(x_RK, out_RX, self.rows)


class AdaptedLayer(NamedTuple):
    """The additions of a layer's projections to the rows of a step."""

    qkv: AdaptedProjection
    output: AdaptedProjection
    gate_up: AdaptedProjection
    down: AdaptedProjection


class AdapterSlots:
    """Slots for the adapters of one target, whichever version of it is live."""

    def __init__(self, config: ModelConfig, slots: int, rank: int, numerics: Numerics) -> None:
        sizes = linear_sizes(config)
        self._scales = [0.0] * slots
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
        """Put an adapter into a slot, in place of the one it holds."""
        self._scales[slot] = weights.adapter.scale
        for layer in self._layers:
            for projection in layer.values():
                projection.clear(slot)
        for at, part, pair in weights.pairs():
            for projection in self._layers[at].values():
                if part in projection.parts:
                    projection.fill(slot, part, *pair)

    def of_rows(self, slot_R: NDArray[np.int32]) -> list[AdaptedLayer] | None:
        """Return, by layer, what is added in a step whose rows have these slots (-1: none); None
        where that is nothing.
        """
        adapted = [
            AdaptedRows(slot, self._scales[slot], torch.from_numpy(np.flatnonzero(slot_R == slot)))
            for slot in np.unique(slot_R).tolist()
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
