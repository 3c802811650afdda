"""Matmuls on a GPU by numerics: `strict` adds in an order fixed by the weight's shape, `fast` in
the quickest order.

Legend: M rows, K inputs, N outputs, I intermediate, P partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from tlt_kernels.gpu import gemm
from tlt_kernels.gpu.gemm_tiles import LEAVES
from tlt_kernels.gpu.quantise import Matrix, Quantised
from tlt_server.models.numerics import Mode
from tlt_server.models.split import Split

# Up to here matmuls wait for weights, which our kernels read sooner than the library does.
FEW_ROWS = 64
WHOLE = Split(LEAVES)  # on one GPU, in the fewest leaves


class Room(NamedTuple):
    """Memory for partial sums."""

    floats: Tensor  # float32, of which they take the beginning
    parts: int  # how many there are at least, if there are as many leaves


@dataclass(frozen=True)
class StrictMatmuls:
    leaves: int = LEAVES  # another number gives `partials` other bits

    linear = staticmethod(gemm.linear)
    gated = staticmethod(gemm.gated)

    def of_rank(self, split: Split) -> Self:
        """Return the matmuls of a target's shard, with the reduction segments of one rank."""
        return replace(self, leaves=split.leaves // split.of)

    def partials(
        self, x: Tensor | Quantised, weight: Matrix, *, room: Room | None = None
    ) -> Tensor:
        """Return partial sums [P, M, N], in `room` if given. Added as a binary tree over the first
        axis, they give x @ weight.T.
        """
        if room is None:
            return gemm.partials(x, weight, leaves=self.leaves)
        return gemm.partials(x, weight, leaves=self.leaves, parts=room.parts, room=room.floats)


class FastMatmuls(StrictMatmuls):
    """The quicker of two ways: the library for unfused matmuls of many rows, else our kernels,
    which multiply all that is quantised.
    """

    @staticmethod
    def linear(
        x: Tensor | Quantised,
        weight: Matrix,
        bias_N: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out_MN: Tensor | None = None,
    ) -> Tensor:
        if (
            isinstance(x, Quantised)
            or weight.scales is not None
            or len(x) <= FEW_ROWS
            or out_dtype not in (None, x.dtype)
        ):  # the library rounds its sums to the inputs' dtype
            return StrictMatmuls.linear(x, weight, bias_N, out_dtype=out_dtype, out_MN=out_MN)
        found_MN = functional.linear(x, weight.values, bias_N)
        return found_MN if out_MN is None else out_MN.copy_(found_MN)

    def partials(
        self, x: Tensor | Quantised, weight: Matrix, *, room: Room | None = None
    ) -> Tensor:
        assert room is None, "the library's sums are not exchanged"
        if isinstance(x, Quantised) or weight.scales is not None or len(x) <= FEW_ROWS:
            return super().partials(x, weight)
        return functional.linear(x, weight.values)[None]


MATMULS: dict[Mode, type[StrictMatmuls]] = {"strict": StrictMatmuls, "fast": FastMatmuls}
