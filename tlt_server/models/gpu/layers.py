"""The pieces of a decoder layer on a GPU. A piece owns its storage; `models/names.py` has the
checkpoint's names of its parts.

Fused weights are laid out as in the checkpoint, [out, in], one part's rows after the other's, so
every parameter is a contiguous view.

Legend: R rows, H hidden, I intermediate, N query heads, K KV heads (or a matmul's inputs), D head
width, S slots, X fused width, P partial sums.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tlt_kernels.gpu.gemm_tiles import PARTS
from tlt_kernels.gpu.quantise import Quantised
from tlt_kernels.gpu.rope import rope_store
from tlt_server.models.config import LayerShape
from tlt_server.models.gpu.adapted import GpuAdaptedLayer, GpuAdaptedProjection
from tlt_server.models.gpu.matmuls import Room
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.names import Parameters, map_parameters
from tlt_server.models.quantised import QuantisedTensor
from tlt_server.models.quantization import LayerQuantization
from tlt_server.models.rope import RotaryTable


class RowTensors(NamedTuple):
    """The rows of a pass. Their keys and values are written to `kv_slot_R`."""

    token_R: Tensor
    position_R: Tensor
    kv_slot_R: Tensor


class Attend(Protocol):
    """Attention for one step's rows, planned once for all layers."""

    def __call__(
        self,
        q_RND: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        *,
        first: int = 0,
        quantised: bool = False,
        scale_2KS: Tensor | None = None,
    ) -> Tensor | Quantised:
        """`quantised`: a matmul in FP8 reads the result. `scale_2KS`: of keys and values in
        e4m3.
        """


class GpuProjection:
    """Linear maps of one input, fused: weight [X, K]."""

    def __init__(
        self,
        inputs: int,
        parts: dict[str, int],
        *,
        bias: bool,
        placement: Placement,
        quantised: bool = False,
    ) -> None:
        self._parts, self.matmuls, outputs = parts, placement.matmuls, sum(parts.values())
        self._dtype = placement.dtype
        self.weight = placement.matrix(outputs, inputs, quantised=quantised)
        self._bias_X = placement.empty(outputs) if bias else None

    @property
    def quantised(self) -> bool:
        """Return True if it takes rows in FP8. It also takes others, and quantises them."""
        return self.weight.scales is not None

    def __call__(
        self,
        x_RK: Tensor | Quantised,
        *,
        first: int = 0,
        out_dtype: torch.dtype | None = None,
        out_RX: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs from `first` on, in `out_RX` where that is given."""
        bias_X = None if self._bias_X is None else self._bias_X[first:]
        weight, dtype = self.weight.rows(first), out_dtype or self._dtype
        return self.matmuls.linear(x_RK, weight, bias_X, out_dtype=dtype, out_MN=out_RX)

    def gated(self, x_RK: Tensor | Quantised) -> Tensor:
        """Return silu(gate) * up, where the first half of the outputs is gate's: [R, X / 2]."""
        return self.matmuls.gated(x_RK, self.weight, out_dtype=self._dtype)

    def partials(
        self, x_RK: Tensor | Quantised, adapted: GpuAdaptedProjection | None, room: Room | None
    ) -> Tensor:
        """Return partial sums [P, R, X] of a map. The adapters' additions are in the first one,
        which at every number of rows covers the first half of K.
        """
        if adapted is None:
            return self.matmuls.partials(x_RK, self.weight, room=room)
        low_PRX = adapted.shrink(plain(x_RK))
        part_PRX = self.matmuls.partials(x_RK, self.weight)
        assert len(part_PRX) <= PARTS, "more leaves of K than adapters can be added to"
        adapted.expand(low_PRX, part_PRX[0])
        return part_PRX

    def parameters(self, prefix: str = "") -> Parameters:
        values_XK, scales = self.weight
        bias = {} if self._bias_X is None else {"bias": self._bias_X}
        weight = values_XK if scales is None else QuantisedTensor(values_XK, scales)
        return map_parameters(self._parts, {"weight": weight, **bias}, prefix)

    def storage(self) -> list[Tensor]:
        return present(*self.weight, self._bias_X)


def plain(x_RK: Tensor | Quantised) -> Tensor:
    assert isinstance(x_RK, Tensor), "read by more than matmuls, and quantised"
    return x_RK


def present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


class GpuSelfAttention:
    def __init__(
        self,
        inputs: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        shape: LayerShape,
        norm_eps: float,
        table: RotaryTable,
        placement: Placement,
        quantised: LayerQuantization,
    ) -> None:
        assert not shape.output_bias, "see limits.check_shape"
        self.heads, self.query_width, self.norm_eps, self.table = (
            heads,
            heads * head_dim,
            norm_eps,
            table,
        )
        kv_width = kv_heads * head_dim
        parts = {"q_proj": self.query_width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv = GpuProjection(
            inputs, parts, bias=shape.qkv_bias, placement=placement, quantised=quantised.qkv
        )
        self.output = GpuProjection(
            self.query_width,
            {"o_proj": hidden},
            bias=False,
            placement=placement,
            quantised=quantised.output,
        )
        self.q_weight_D = placement.empty(head_dim) if shape.qk_norm else None
        self.k_weight_D = placement.empty(head_dim) if shape.qk_norm else None

    def __call__(
        self,
        x_RH: Tensor | Quantised,
        k_SKD: Tensor,
        v_SKD: Tensor,
        rows: RowTensors,
        attend: Attend,
        *,
        first: int = 0,
        scale_2KS: Tensor | None = None,
        adapted: GpuAdaptedLayer | None = None,
        room: Room | None = None,
    ) -> Tensor:
        """Write the rows' keys and values, and attend over positions [first, own]. Return partial
        sums [P, R, H] of the output, in `room` if given.
        """
        if adapted is not None:
            low_PRX = adapted.qkv.shrink(plain(x_RH))
        qkv_RX = self.qkv(x_RH)
        if adapted is not None:
            adapted.qkv.expand(low_PRX, qkv_RX)
        q_RND = self._store(qkv_RX, self.heads, k_SKD, v_SKD, rows, scale_2KS)
        quantised = self.output.quantised and adapted is None
        out_RX = attend(q_RND, k_SKD, v_SKD, first=first, quantised=quantised, scale_2KS=scale_2KS)
        if isinstance(out_RX, Tensor):
            out_RX = out_RX.view(len(qkv_RX), self.query_width)
        return self.output.partials(out_RX, adapted and adapted.output, room)

    def store(
        self, x_RH: Tensor | Quantised, k_SKD: Tensor, v_SKD: Tensor, rows: RowTensors
    ) -> None:
        """Write only the rows' keys and values."""
        self._store(self.qkv(x_RH, first=self.query_width), 0, k_SKD, v_SKD, rows)

    def _store(
        self,
        qkv_RX: Tensor,
        heads: int,
        k_SKD: Tensor,
        v_SKD: Tensor,
        rows: RowTensors,
        scale_2KS: Tensor | None = None,
    ) -> Tensor:
        return rope_store(
            qkv_RX,
            rows.position_R,
            rows.kv_slot_R,
            self.table.cos_PD2,
            self.table.sin_PD2,
            k_SKD,
            v_SKD,
            heads=heads,
            q_weight_D=self.q_weight_D,
            k_weight_D=self.k_weight_D,
            scale_2KS=scale_2KS,
            eps=self.norm_eps,
        )

    def storage(self) -> list[Tensor]:
        norms = present(self.q_weight_D, self.k_weight_D)
        return [*self.qkv.storage(), *self.output.storage(), *norms]


class GpuGatedMlp:
    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        shape: LayerShape,
        placement: Placement,
        quantised: LayerQuantization,
    ) -> None:
        assert not shape.mlp_bias, "see limits.check_shape"
        self.gate_up = GpuProjection(
            hidden,
            {"gate_proj": intermediate, "up_proj": intermediate},
            bias=False,
            placement=placement,
            quantised=quantised.gate_up,
        )
        self.down = GpuProjection(
            intermediate,
            {"down_proj": hidden},
            bias=False,
            placement=placement,
            quantised=quantised.down,
        )

    def __call__(
        self,
        x_RH: Tensor | Quantised,
        adapted: GpuAdaptedLayer | None = None,
        room: Room | None = None,
    ) -> Tensor:
        """Return partial sums [P, R, H], in `room` if given."""
        if adapted is None:
            gated_RI = self.gate_up.gated(x_RH)
        else:
            x_RH = plain(x_RH)
            low_PRX = adapted.gate_up.shrink(x_RH)
            both_RX = self.gate_up(x_RH, out_dtype=torch.float32)
            gated_RI = adapted.gate_up.expand_silu(low_PRX, both_RX, x_RH.dtype)
        return self.down.partials(gated_RI, adapted and adapted.down, room)

    def storage(self) -> list[Tensor]:
        return [*self.gate_up.storage(), *self.down.storage()]
