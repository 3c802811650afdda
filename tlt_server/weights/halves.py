"""FP8 matrices that come as two tensors of a push: X.weight in e4m3 and X.weight_scale_inv.

They may come in any order, in different batches and parts. The first one is held in host memory
until the other has come, so nothing is copied to its place before both are checked. `Arriving`
calls this module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from tlt_client.quantise import SCALE_SUFFIX, QuantisedBlocks
from tlt_server.errors import WeightsRefused
from tlt_server.models.quantised import E4M3, check_blocks, check_scales
from tlt_server.models.shards import Stored, in_fp8

HELD_BYTES = 2**31  # limit on tensors whose other half has not come


class Halves:
    def __init__(self, parameters: Mapping[str, Stored]) -> None:
        """`parameters`: the tensors of a network, by name. Those in FP8 may come in halves."""
        self.matrices = {name for name, stored in parameters.items() if in_fp8(stored)}
        # The name of the scales -> the shape of their matrix.
        self.scales = {name + SCALE_SUFFIX: parameters[name].shape for name in self.matrices}
        self.came: set[str] = set()  # halves, whether their matrix is whole or not
        self._held: dict[str, tuple[Tensor, str]] = {}  # name -> half, where it came from

    def lacking(self, matrix: str) -> str:
        """Return the name of the tensor that an incomplete matrix still needs."""
        return matrix + SCALE_SUFFIX if matrix in self._held else matrix

    def check_names(
        self, coming: Collection[str], dtypes: Mapping[str, torch.dtype], where: str
    ) -> None:
        """Reject scales of a tensor that is not in FP8. `dtypes`: of the tensors whose type is
        known; reject those that should come with scales and do not, or the reverse.
        """
        for name in coming:
            if name.endswith(SCALE_SUFFIX) and name not in self.scales:
                raise WeightsRefused(
                    f"{where}: {name!r} is a scale of FP8, and this server does not keep "
                    f"{name.removesuffix(SCALE_SUFFIX)!r} in FP8; push its bfloat16 values without "
                    "scales, or serve a quantised target (--quantization fp8)"
                )
        for matrix, dtype in dtypes.items():
            if matrix in self.matrices and (dtype == E4M3) != (matrix + SCALE_SUFFIX in coming):
                raise half_missing(matrix, dtype, where)

    def check_layout(self, name: str, shape: Sequence[int], dtype: torch.dtype, where: str) -> None:
        """Check the shape and type of scales."""
        matrix = name.removesuffix(SCALE_SUFFIX)
        check_scales(matrix, self.scales[name], shape, dtype, where)

    def join(
        self, name: str, half: Tensor, device: torch.device, where: str
    ) -> QuantisedBlocks | None:
        """Return the matrix that this half completes, on `device`; None if the other half has not
        come yet. `half` is copied then.
        """
        self.came.add(name)
        matrix = name.removesuffix(SCALE_SUFFIX)
        other = matrix if name in self.scales else matrix + SCALE_SUFFIX
        if other not in self._held:
            self._hold(name, half, where)
            return None
        found, place = self._held.pop(other)
        pair = (found, half) if name in self.scales else (half, found)
        values, scales = (each.to(device) for each in pair)
        where = where if place == where else f"{place} and {where}"
        return check_blocks(matrix, values, scales, where)

    def _hold(self, name: str, half: Tensor, where: str) -> None:
        held = half.nbytes + sum(each.nbytes for each, _ in self._held.values())
        if held > HELD_BYTES:
            raise WeightsRefused(
                f"{where}: {len(self._held) + 1} tensors of {held} bytes, among them {name!r}, "
                f"wait for their other half, and the limit is {HELD_BYTES}; push each matrix next "
                "to its scales, or all scales first"
            )
        self._held[name] = half.to("cpu", copy=True), where


def half_missing(matrix: str, dtype: torch.dtype | None, where: str) -> WeightsRefused:
    """Return the error for values in e4m3 without scales, or in another type with scales."""
    missing = (
        f"comes in e4m3 without its scales {matrix + SCALE_SUFFIX!r}"
        if dtype == E4M3
        else f"has scales, and comes in {dtype or 'another type than e4m3'}"
    )
    return WeightsRefused(
        f"{where}: tensor {matrix!r} {missing}; push e4m3 values and scales together, or bfloat16 "
        "values alone"
    )
