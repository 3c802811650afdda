"""Matmuls and the MLP's gate with float32 weights, computed in a narrower dtype.

Tensors kept for the backward pass have the compute dtype, and weights are cast once, not in every
unrolled step: at a 7B model's drafter shapes a cast writes 0.8 GB. Weight gradients leave their
matmul in float32.

Legend: N slots, X inputs, Y outputs, I inner width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def linear(x_NX: Tensor, weight_YX: Tensor, cast_YX: Tensor, bias_Y: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, [N, Y] in float32, computed in the dtype of `x_NX`. `weight_YX`
    and `bias_Y` are float32 and get the gradients; `cast_YX` is the weight in the compute dtype.
    """
    found: Tensor = _Linear.apply(x_NX, weight_YX, cast_YX, bias_Y)  # type: ignore[no-untyped-call]
    return found


def gated(gate_NI: Tensor, up_NI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return silu(gate) * up in float32. The inputs are float32 with values representable in
    `dtype`.
    """
    found: Tensor = _Gated.apply(gate_NI, up_NI, dtype)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NX: Tensor, weight_YX: Tensor, cast_YX: Tensor, bias_Y: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x_NX, cast_YX)
        ctx.biased = bias_Y is not None
        bias = None if bias_Y is None else bias_Y.to(x_NX.dtype)
        return functional.linear(x_NX, cast_YX, bias).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_NX, cast_YX = ctx.saved_tensors
        grad_NY = grads[0].to(x_NX.dtype)
        below_NX = grad_NY @ cast_YX if ctx.needs_input_grad[0] else None
        weight_YX = _product(grad_NY.t(), x_NX) if ctx.needs_input_grad[1] else None
        return below_NX, weight_YX, None, grads[0].sum(0) if ctx.biased else None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_NI: Tensor, up_NI: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(gate_NI.to(dtype), up_NI.to(dtype))
        return functional.silu(gate_NI) * up_NI

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate_NI, up_NI = (x.float() for x in ctx.saved_tensors)
        slope_NI = torch.ops.aten.silu_backward(grads[0] * up_NI, gate_NI)
        return slope_NI, grads[0] * functional.silu(gate_NI), None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
