"""LoRA on a GPU: the matrices of all loaded adapters, each in a slot with fixed addresses, which
captured passes read. All versions of the target use them.

Legend: K inputs, N outputs of a fused map, r padded rank, X = r times its parts, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tlt_kernels.gpu.lora import MIN_RANK, AdapterRows, expand, expand_silu, shrink, tile_columns
from tlt_server.errors import StartupError
from tlt_server.models.adapted import FUSED
from tlt_server.models.adapters import AdapterWeights, MatrixPair, linear_sizes
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.placement import Placement


class GpuProjectionSlots(NamedTuple):
    """The matrices of one fused projection, for every slot."""

    parts: dict[str, int]
    a_SXK: Tensor
    b_SNr: Tensor
    scale_S: Tensor

    def fill(self, slot: int, part: str, pair: MatrixPair) -> None:
        """Copy a part's matrices, of at most the padded rank, to a zeroed slot."""
        at, rank, padded = [*self.parts].index(part), len(pair.a_rK), self.b_SNr.shape[2]
        first = sum([*self.parts.values()][:at])
        self.a_SXK[slot, at * padded : at * padded + rank].copy_(pair.a_rK)
        self.b_SNr[slot, first : first + self.parts[part], :rank].copy_(pair.b_Nr)


class SideStream:
    """A stream for work that runs alongside the current stream; none in the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Launch the block's work on this stream, after everything queued on the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def end(self) -> None:
        """Let the current stream wait for the work launched on this one."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class GpuAdaptedProjection(NamedTuple):
    slots: GpuProjectionSlots
    rows: AdapterRows
    side: SideStream

    def shrink(self, x_MK: Tensor) -> Tensor:
        """Return `low_PMX`: the rows of `x_MK` times the A of their adapters, computed alongside
        the map.
        """
        with self.side.begin():
            return shrink(x_MK, self.slots.a_SXK, self.rows)

    def expand(self, low_PMX: Tensor, out_MN: Tensor) -> None:
        """Add the adapters' results from `low_PMX` to the rows of the map's output."""
        parts = tuple(self.slots.parts.values())
        self.side.end()
        expand(low_PMX, self.slots.b_SNr, self.slots.scale_S, parts, self.rows, out_MN)

    def expand_silu(self, low_PMX: Tensor, gate_up_MN: Tensor, dtype: torch.dtype) -> Tensor:
        """Return silu(gate) * up; both include the adapters of their rows."""
        b_SNr, scale_S = self.slots.b_SNr, self.slots.scale_S
        self.side.end()
        return expand_silu(low_PMX, b_SNr, scale_S, self.rows, gate_up_MN, dtype)


class GpuAdaptedLayer(NamedTuple):
    """The adapters' additions to a layer's projections in one step."""

    qkv: GpuAdaptedProjection
    output: GpuAdaptedProjection
    gate_up: GpuAdaptedProjection
    down: GpuAdaptedProjection


class GpuAdapterSlots:
    def __init__(self, config: ModelConfig, slots: int, rank: int, placement: Placement) -> None:
        sizes, padded = linear_sizes(config), max(MIN_RANK, triton.next_power_of_2(rank))
        self.count, device = slots, placement.device
        self._side = SideStream(device)
        self._scale_S = torch.zeros(slots, dtype=torch.float32, device=device)
        self._layers = []
        for _ in range(config.layers):
            layer = {}
            for name, maps in FUSED.items():
                parts = {part: sizes[part].outputs for part in maps}
                _check_tiles(name, parts)
                layer[name] = GpuProjectionSlots(
                    parts,
                    placement.empty(slots, padded * len(parts), sizes[maps[0]].inputs).zero_(),
                    placement.empty(slots, sum(parts.values()), padded).zero_(),
                    self._scale_S,
                )
            self._layers.append(layer)

    def fill(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot, in place of the previous one, on the current stream."""
        self._scale_S[slot] = weights.adapter.scale
        for layer in self._layers:
            for projection in layer.values():
                projection.a_SXK[slot].zero_()
                projection.b_SNr[slot].zero_()
        for at, part, pair in weights.pairs():
            for projection in self._layers[at].values():
                if part in projection.parts:
                    projection.fill(slot, part, pair)

    def of_rows(self, rows: AdapterRows) -> list[GpuAdaptedLayer]:
        """Return each layer's adapter contributions in a step with these rows."""
        return [
            GpuAdaptedLayer(
                **{n: GpuAdaptedProjection(slots, rows, self._side) for n, slots in layer.items()}
            )
            for layer in self._layers
        ]


def _check_tiles(name: str, parts: dict[str, int]) -> None:
    if tile_columns(tuple(parts.values())) < MIN_RANK:
        raise StartupError(
            f"max_loras: the outputs of {name} are {parts}, and the kernels of a GPU need "
            f"multiples of {MIN_RANK}; serve without --max-loras, or with --device cpu"
        )
