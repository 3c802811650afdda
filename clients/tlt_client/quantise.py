"""FP8 of a weight, for trainers and servers alike: e4m3 values with one power-of-two scale per
block of 128 x 128.

`quantise` is a function of the values alone and adds nothing up, so every machine gets the same
bits. A block with the largest magnitude m has the smallest power of two s with m / s <= 464 as its
scale, because e4m3 rounds 464 to its largest number, 448. So quantising what `effective` returns
gives the same values and scales. A trainer computes with `effective(quantise(w))` to train what the
server samples from, and `effective_checksum` is what the server reports of its live weights.

Legend: N outputs, K inputs, B = ceil(N / 128), C = ceil(K / 128); 1 is the inside of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"  # in names of tensors: X.weight and X.weight_scale_inv
MAX_VALUE = 448.0  # the largest e4m3 number
_LEAST, _NOTHING = 2.0**-100, 2.0**-110  # the smallest scale; magnitudes that it rounds to 0
_ELEMENTS = 2**24  # computed at a time, which bounds the memory in float32


class QuantisedBlocks(NamedTuple):
    """A quantised matrix."""

    values_NK: Tensor  # float8_e4m3fn
    scales_BC: Tensor  # float32

    @property
    def shape(self) -> torch.Size:
        return self.values_NK.shape

    def narrow(self, dim: int, start: int, length: int) -> QuantisedBlocks:
        """Return a part that begins at a whole block, as `Tensor.narrow` does."""
        if start % BLOCK:
            raise ValueError(f"a part begins at {start}, and blocks have {BLOCK} elements")
        first, count = start // BLOCK, -(-length // BLOCK)
        return QuantisedBlocks(
            self.values_NK.narrow(dim, start, length), self.scales_BC.narrow(dim, first, count)
        )


def scales_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix of this shape."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantise(weight_NK: Tensor) -> QuantisedBlocks:
    """Quantise a matrix of finite numbers, on its device. Gradients end here, as e4m3 would round
    them to 0. A trainer passes them by: w + (effective(quantise(w)) - w).detach().
    """
    import torch

    weight_NK = weight_NK.detach()
    shape, device = weight_NK.shape, weight_NK.device
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(scales_shape(shape), dtype=torch.float32, device=device)
    for rows, blocks in _parts(shape):
        tile_B1C1 = _tiled(weight_NK[rows].float())
        scale = scale_of(torch.linalg.vector_norm(tile_B1C1, torch.inf, dim=(1, 3)))
        scales[blocks] = scale
        scaled_B1C1 = (tile_B1C1 / scale[:, None, :, None]).clamp_(-MAX_VALUE, MAX_VALUE)
        values[rows] = _flat(scaled_B1C1, values[rows].shape)
    return QuantisedBlocks(values, scales)


def effective(blocks: QuantisedBlocks) -> Tensor:
    """Return value times scale, rounded to bfloat16, which is exact for powers of two: [N, K]."""
    import torch

    out = torch.empty(blocks.shape, dtype=torch.bfloat16, device=blocks.values_NK.device)
    for rows, part in _parts(blocks.shape):
        tile_B1C1 = _tiled(blocks.values_NK[rows].float())
        tile_B1C1.mul_(blocks.scales_BC[part][:, None, :, None])
        out[rows] = _flat(tile_B1C1, out[rows].shape)
    return out


def effective_checksum(weight_NK: Tensor) -> str:
    """Return the checksum that a server reports of a pushed matrix which it keeps in FP8."""
    from tlt_client.channels.checksums import mix64

    return mix64(effective(quantise(weight_NK)))


def scale_of(top: Tensor) -> Tensor:
    """Return the scales of blocks whose largest magnitudes are `top`, float32 of any shape. A block
    of zeros, or of values that would become zeros, has 1.
    """
    import torch

    # The exponent goes up by one where the mantissa is above that of 464.
    exponent = (top.view(torch.int32) + 0x17FFFF >> 23) - 8
    scale = (exponent.clamp_min(1) << 23).view(torch.float32).clamp_min(_LEAST)
    return torch.where(top <= _NOTHING, 1.0, scale)


def _parts(shape: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows, which begin at whole blocks, and of their blocks."""
    step = max(1, _ELEMENTS // max(1, shape[1]) // BLOCK)
    for first in range(0, -(-shape[0] // BLOCK), step):
        yield slice(first * BLOCK, (first + step) * BLOCK), slice(first, first + step)


def _tiled(part_NK: Tensor) -> Tensor:
    """Return the blocks of a matrix, filled up with zeros: [B, 128, C, 128]."""
    from torch.nn.functional import pad

    rows, columns = part_NK.shape
    if rows % BLOCK or columns % BLOCK:
        part_NK = pad(part_NK, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return part_NK.reshape(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)


def _flat(tile_B1C1: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the matrix of this shape that has these blocks."""
    return tile_B1C1.flatten(2).flatten(0, 1)[: shape[0], : shape[1]]
