"""A checkpoint's matrix that a model keeps in FP8. Loads and pushes see a tensor of effective
weights, which are value times scale in bfloat16.

Both kinds take a matrix in any type, which is quantised, or `QuantisedBlocks`, which are kept as
they are. On a GPU values and scales are kept; on a CPU, which computes in float32, the effective
weights.

Legend: N outputs, K inputs, B and C blocks of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tlt_client.quantise import (
    BLOCK,
    MAX_VALUE,
    SCALE_SUFFIX,
    QuantisedBlocks,
    effective,
    quantise,
    scales_shape,
)
from tlt_server.errors import ModelError

E4M3 = torch.float8_e4m3fn
SCALE_DTYPES = (torch.bfloat16, torch.float32)


class QuantisedTensor:
    """Values and scales of a matrix, or of some of its rows from a whole block on."""

    dtype = torch.bfloat16  # the type of its effective weights

    def __init__(self, values_NK: Tensor, scales_BC: Tensor) -> None:
        self.blocks = QuantisedBlocks(values_NK, scales_BC)
        self.shape, self.device = values_NK.shape, values_NK.device
        self.is_cuda = values_NK.is_cuda

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.blocks

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.blocks.values_NK)

    def __getitem__(self, rows: slice) -> QuantisedTensor:
        start, stop, _ = rows.indices(len(self))
        return QuantisedTensor(*self.blocks.narrow(0, start, stop - start))

    def numel(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def copy_(self, given: Tensor | QuantisedBlocks) -> None:
        made = given if isinstance(given, QuantisedBlocks) else quantise(given.to(self.device))
        for kept, new in zip(self.blocks, made, strict=True):
            kept.copy_(new)

    def whole(self) -> Tensor:
        """Return a copy of the effective weights, bfloat16 [N, K]."""
        return effective(self.blocks)


class EffectiveTensor(QuantisedTensor):
    """A float32 view of a CPU's weights, which holds effective weights."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK = weight_NK
        self.shape, self.device, self.is_cuda = weight_NK.shape, weight_NK.device, False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight_NK,)

    def __len__(self) -> int:
        return len(self.weight_NK)

    def __getitem__(self, rows: slice) -> EffectiveTensor:
        if rows.indices(len(self))[0] % BLOCK:
            raise ValueError(f"rows begin at {rows.start}, and blocks have {BLOCK}")
        return EffectiveTensor(self.weight_NK[rows])

    def copy_(self, given: Tensor | QuantisedBlocks) -> None:
        blocks = given if isinstance(given, QuantisedBlocks) else quantise(given.to(self.device))
        self.weight_NK.copy_(effective(blocks))

    def whole(self) -> Tensor:
        return self.weight_NK


def check_scales(
    name: str, weight: Sequence[int], shape: Sequence[int], dtype: torch.dtype, where: Path | str
) -> None:
    """Check the layout of scales. `name` and `weight`: the weight's name and shape."""
    wanted = scales_shape(weight)
    if tuple(shape) != wanted or dtype not in SCALE_DTYPES:
        raise ModelError(
            f"{where}: tensor {name + SCALE_SUFFIX!r} has shape {list(shape)} and dtype {dtype}, "
            f"expected {list(wanted)}, one scale per block of {BLOCK} x {BLOCK}, as "
            f"{' or '.join(map(str, SCALE_DTYPES))}; convert the checkpoint"
        )


def check_blocks(
    name: str, values_NK: Tensor, scales_BC: Tensor, where: Path | str
) -> QuantisedBlocks:
    """Return a weight in FP8 as it is kept, once its values and scales are checked. `name`: the
    weight's.
    """
    check_scales(name, values_NK.shape, scales_BC.shape, scales_BC.dtype, where)
    nan = int((values_NK.view(torch.uint8) & 0x7F == 0x7F).sum())
    if nan:
        raise ModelError(
            f"{where}: tensor {name!r} holds {nan} NaN values of {values_NK.numel()}, expected "
            "none; the file is damaged: download it again"
        )
    bad = scales_BC[~(torch.isfinite(scales_BC) & (scales_BC > 0))]
    if len(bad):
        raise ModelError(
            f"{where}: tensor {name + SCALE_SUFFIX!r} holds {len(bad)} scales such as "
            f"{bad[0].item()}, expected finite ones above 0; the file is damaged: download it again"
        )
    blocks = QuantisedBlocks(values_NK, scales_BC.float())
    large = blocks.scales_BC > torch.finfo(torch.bfloat16).max / MAX_VALUE
    if bool(large.any()) and not bool(torch.isfinite(effective(blocks)).all()):
        raise ModelError(
            f"{where}: tensor {name!r} holds values beyond the range of bfloat16, in which values "
            "times scales must lie; the file is damaged: download it again"
        )
    return blocks
