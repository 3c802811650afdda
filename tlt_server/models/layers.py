"""The pieces of a decoder layer on fused weights, shared by every family and by the EAGLE drafter.

A piece owns its storage; `names.py` has the checkpoint's names of its parts.

Legend: R rows, H hidden, I intermediate, N query heads, K KV heads (or a matmul's inputs), D head
width, S slots, X fused width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_client.quantise import MAX_VALUE, scale_of
from tlt_kernels.cpu import elementwise
from tlt_server.attention import Attention
from tlt_server.attention.rows import Rows
from tlt_server.models.adapted import AdaptedLayer, AdaptedProjection
from tlt_server.models.config import LayerShape
from tlt_server.models.names import Parameters, map_parameters
from tlt_server.models.numerics import Numerics
from tlt_server.models.quantised import EffectiveTensor
from tlt_server.models.quantization import UNQUANTISED, LayerQuantization
from tlt_server.models.rope import RotaryTable
from tlt_server.models.split import WHOLE, Split


class Projection:
    """Linear maps of one input, fused side by side and stored transposed ([K, X]), the fastest
    layout for a matmul of few rows. `in_fp8`: the weights are those of FP8, and inputs are
    quantised, too.
    """

    def __init__(
        self,
        inputs: int,
        parts: dict[str, int],
        *,
        bias: bool,
        numerics: Numerics,
        in_fp8: bool = False,
    ) -> None:
        self.parts, self.numerics, self.in_fp8 = parts, numerics, in_fp8
        self.weight_KX = torch.zeros(inputs, sum(parts.values()))
        self.bias_X = torch.zeros(sum(parts.values())) if bias else None

    def outputs(self, x_RK: Tensor, first: int = 0) -> Tensor:
        """Return the outputs from `first` on."""
        bias_X = None if self.bias_X is None else self.bias_X[first:]
        return self.numerics.linear(self.read(x_RK), self.weight_KX[:, first:], bias_X)

    def read(self, x_RK: Tensor) -> Tensor:
        """Return the input of the matmul."""
        return elementwise.in_e4m3(x_RK) if self.in_fp8 else x_RK

    def __call__(self, x_RK: Tensor, adapted: AdaptedProjection | None = None) -> Tensor:
        out_RX = self.outputs(x_RK)
        if adapted is not None:
            adapted.add(x_RK, out_RX)
        return out_RX

    def parameters(self, prefix: str = "") -> Parameters:
        bias = {} if self.bias_X is None else {"bias": self.bias_X}
        tensors = {"weight": self.weight_KX.t(), **bias}
        for name, view in map_parameters(self.parts, tensors, prefix):
            yield name, EffectiveTensor(view) if self.in_fp8 and view.dim() == 2 else view


class SummedProjection(Projection):
    """A linear map that is summed over the reduction segments of a split, here and on other
    ranks.
    """

    def __init__(
        self,
        inputs: int,
        parts: dict[str, int],
        *,
        bias: bool,
        numerics: Numerics,
        split: Split,
        in_fp8: bool = False,
    ) -> None:
        super().__init__(inputs, parts, bias=bias, numerics=numerics, in_fp8=in_fp8)
        self.own_leaves, self.exchange = split.leaves // split.of, split.exchange
        self.whole = split.leaves == 1

    def __call__(self, x_RK: Tensor, adapted: AdaptedProjection | None = None) -> Tensor:
        if self.whole:
            return super().__call__(x_RK, adapted)
        own_RX = self.numerics.sum_of_leaves(self.read(x_RK), self.weight_KX, self.own_leaves)
        out_RX = self.exchange.add(own_RX)
        if self.bias_X is not None:
            out_RX += self.bias_X
        if adapted is not None:
            adapted.add(x_RK, out_RX)
        return out_RX

    @property
    def leaf_KX(self) -> Tensor:
        """Return the weights of one reduction segment."""
        return self.weight_KX[: len(self.weight_KX) // self.own_leaves]


class SelfAttention:
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
        attention: Attention,
        numerics: Numerics,
        split: Split = WHOLE,
        in_fp8: LayerQuantization = UNQUANTISED,
    ) -> None:
        self.heads, self.query_width, self.norm_eps = heads, heads * head_dim, norm_eps
        self.table, self.attention = table, attention
        kv_width = kv_heads * head_dim
        self.qkv = Projection(
            inputs,
            {"q_proj": self.query_width, "k_proj": kv_width, "v_proj": kv_width},
            bias=shape.qkv_bias,
            numerics=numerics,
            in_fp8=in_fp8.qkv,
        )
        self.output = SummedProjection(
            self.query_width,
            {"o_proj": hidden},
            bias=shape.output_bias,
            numerics=numerics,
            split=split,
            in_fp8=in_fp8.output,
        )
        self.q_weight_D = torch.ones(head_dim) if shape.qk_norm else None
        self.k_weight_D = torch.ones(head_dim) if shape.qk_norm else None

    def __call__(
        self,
        x_RH: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        rows: Rows,
        first: int = 0,
        adapted: AdaptedLayer | None = None,
        rounds: bool = False,
    ) -> Tensor:
        """Write the rows' keys and values, which `rounds` rounds to e4m3, then attend over
        positions [first, own]: [R, H].
        """
        qkv_RX = self.qkv(x_RH, adapted and adapted.qkv)
        q_RND = self._store(qkv_RX, self.heads, k_SKD, v_SKD, rows)
        if rounds:
            for cache_SKD in (k_SKD, v_SKD):
                cache_SKD[rows.kv_slot_R] = rounded_heads(cache_SKD[rows.kv_slot_R])
        out_RND = self.attention.attend(q_RND, k_SKD, v_SKD, rows, first)
        return self.output(out_RND.view(len(rows), self.query_width), adapted and adapted.output)

    def store(self, x_RH: Tensor, k_SKD: Tensor, v_SKD: Tensor, rows: Rows) -> None:
        """Write only the rows' keys and values."""
        self._store(self.qkv.outputs(x_RH, self.query_width), 0, k_SKD, v_SKD, rows)

    def _store(
        self, qkv_RX: Tensor, heads: int, k_SKD: Tensor, v_SKD: Tensor, rows: Rows
    ) -> Tensor:
        return elementwise.rope_store(
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
            eps=self.norm_eps,
        )


def rounded_heads(x_RKD: Tensor) -> Tensor:
    """Return the values in e4m3, each head with its own scale, as a GPU's KV has them."""
    scale_RK1 = scale_of(x_RKD.abs().amax(-1, keepdim=True))
    number_RKD = (x_RKD / scale_RK1).clamp_(-MAX_VALUE, MAX_VALUE).to(torch.float8_e4m3fn)
    return number_RKD.float() * scale_RK1


class GatedMlp:
    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        shape: LayerShape,
        numerics: Numerics,
        split: Split = WHOLE,
        in_fp8: LayerQuantization = UNQUANTISED,
    ) -> None:
        self.gate_up = Projection(
            hidden,
            {"gate_proj": intermediate, "up_proj": intermediate},
            bias=shape.mlp_bias,
            numerics=numerics,
            in_fp8=in_fp8.gate_up,
        )
        self.down = SummedProjection(
            intermediate,
            {"down_proj": hidden},
            bias=shape.mlp_bias,
            numerics=numerics,
            split=split,
            in_fp8=in_fp8.down,
        )

    def __call__(self, x_RH: Tensor, adapted: AdaptedLayer | None = None) -> Tensor:
        gate_up_RX = self.gate_up(x_RH, adapted and adapted.gate_up)
        return self.down(elementwise.silu_mul(gate_up_RX), adapted and adapted.down)
