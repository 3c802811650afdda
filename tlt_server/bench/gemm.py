"""`tlt bench gemm`: all matmuls of one Qwen2.5-7B step as one CUDA graph, with bytes read per
second, and cuBLAS for comparison.

A step is per layer qkv, o, gate-up with SiLU and down, then the LM head in float32; every layer has
its own weights, so the L2 cache does not help. cuBLAS runs the same matmuls without SiLU, in turns
with ours; the step with the two norms between the matmuls is timed, too. With several `--leaves`,
steps with each number of leaves in o and down projections take turns. Data are random: zeros run
faster than any model does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tlt_kernels.gpu.gemm import gated, linear, partials
from tlt_kernels.gpu.norm import add_rms_norm
from tlt_server.bench.graph_time import captured, in_turns, require_gpu
from tlt_server.bench.record import finish

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, QKV = 28, 3584, 18944, 152064, 4608
READ_BYTES_PER_S = 4.3e12  # what a copy reaches on an H200
EPS = 1e-6


@dataclass
class Layer:
    qkv: Tensor
    qkv_bias: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def step(
    leaves: int,
    layers: list[Layer],
    head: Tensor,
    sampled: int,
    x: Tensor,
    attended: Tensor,
    residual: Tensor,
    norm: Tensor,
) -> Tensor:
    normed = x
    for layer in layers:
        linear(normed, layer.qkv, layer.qkv_bias)
        normed = add_rms_norm(partials(attended, layer.o, leaves=leaves), residual, norm, EPS)
        inner = gated(normed, layer.gate_up)
        normed = add_rms_norm(partials(inner, layer.down, leaves=leaves), residual, norm, EPS)
    return linear(normed[:sampled], head, out_dtype=torch.float32)


def alone(
    leaves: int,
    layers: list[Layer],
    head: Tensor,
    sampled: int,
    x: Tensor,
    attended: Tensor,
    inner: Tensor,
) -> Tensor:
    for layer in layers:
        linear(x, layer.qkv, layer.qkv_bias)
        partials(attended, layer.o, leaves=leaves)
        gated(x, layer.gate_up)
        partials(inner, layer.down, leaves=leaves)
    return linear(x[:sampled], head, out_dtype=torch.float32)


def cublas(
    layers: list[Layer], head: Tensor, sampled: int, x: Tensor, attended: Tensor, inner: Tensor
) -> Tensor:
    for layer in layers:
        torch.nn.functional.linear(x, layer.qkv, layer.qkv_bias)
        torch.mm(attended, layer.o.T)
        torch.mm(x, layer.gate_up.T)
        torch.mm(inner, layer.down.T)
    return torch.mm(x[:sampled], head.T)


def run(args: argparse.Namespace) -> int:
    require_gpu()
    layers = [
        Layer(
            draw(QKV, HIDDEN),
            draw(QKV),
            draw(HIDDEN, HIDDEN),
            draw(2 * INTERMEDIATE, HIDDEN),
            draw(HIDDEN, INTERMEDIATE),
        )
        for _ in range(LAYERS)
    ]
    head, norm = draw(VOCABULARY, HIDDEN), torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = [
        head,
        *(w for layer in layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)),
    ]
    floor = sum(w.numel() for w in weights) * 2 / READ_BYTES_PER_S * 1e3
    found = []
    print(
        f"{'rows':>6} {'leaves':>6} {'step':>8} {'alone':>8} {'floor':>8} {'cuBLAS':>8} "
        f"{'TB/s':>6} {'TFLOP/s':>8}"
    )
    for rows in args.rows:
        sampled = min(rows, 1024)  # a long prefill needs few logits
        x, attended, inner = (
            draw(rows, HIDDEN) * 50,
            draw(rows, HIDDEN) * 50,
            draw(rows, INTERMEDIATE) * 50,
        )
        residual = torch.randn(rows, HIDDEN, device="cuda")

        matmuls = (layers, head, sampled, x, attended, inner)
        whole = (layers, head, sampled, x, attended, residual, norm)
        runs: dict[tuple[str, int], Callable[[], object]] = {
            ("cublas", 0): captured(partial(cublas, *matmuls))
        }
        for leaves in args.leaves:
            runs["step", leaves] = captured(partial(step, leaves, *whole))
            runs["alone", leaves] = captured(partial(alone, leaves, *matmuls))
        ms = in_turns(runs)
        flops = 2 * (rows * sum(w.numel() for w in weights[1:]) + sampled * head.numel())
        for leaves in args.leaves:
            step_ms, alone_ms = ms["step", leaves], ms["alone", leaves]
            found.append(
                {
                    "rows": rows,
                    "leaves": leaves,
                    "step_ms": round(step_ms, 4),
                    "products_ms": round(alone_ms, 4),
                    "floor_ms": round(floor, 4),
                    "cublas_ms": round(ms["cublas", 0], 4),
                    "of_floor": round(alone_ms / floor, 3),
                    "of_cublas": round(alone_ms / ms["cublas", 0], 3),
                }
            )
            rates = (
                f"{floor / alone_ms * READ_BYTES_PER_S / 1e12:6.2f} {flops / alone_ms / 1e9:8.0f}"
            )
            print(
                f"{rows:6d} {leaves:6d} {step_ms:8.3f} {alone_ms:8.3f} {floor:8.3f} "
                f"{ms['cublas', 0]:8.3f} {rates}",
                flush=True,
            )
    finish(
        args,
        {"bench": "products", "shape": {"layers": LAYERS, "hidden": HIDDEN}, "rows": found},
        on_gpu=True,
    )
    return 0
