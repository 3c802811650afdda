"""`tlt bench prefill`: prefill of a model of Qwen2.5-7B's shapes against the libraries, which are
cuBLAS and torch's flash attention in the same decoder.

Weights and prompts are random. Prompts are computed in steps of 4,096 rows, as in the engine; the
time is that of all steps, by CUDA events, the median of nine. The libraries' attention gets keys
and values in its preferred layout, not in pages; their gate and up pass through one kernel of
silu(gate) * up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tlt_kernels.gpu.quantise import Matrix, Quantised
from tlt_kernels.gpu.silu import silu
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import PAGE_SIZE, RowTable
from tlt_server.attention.gpu import TritonPaged
from tlt_server.attention.rows import KVCache
from tlt_server.bench.micro import in_turns, measure
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.layers import RowTensors
from tlt_server.models.gpu.matmuls import MATMULS, FastMatmuls, Room, StrictMatmuls
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.numerics import Mode
from tlt_server.models.split import GPU_LEAVES, auto_gpu_leaves

SHAPE = SHAPES["qwen2.5-7b"]
STEP_ROWS = 4096
PROMPTS = ((1, 4096), (8, 2048))  # prompts, tokens of each
REPEATS = 9
LIBRARIES = "cuBLAS + SDPA"


_BLOCK = 1024


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pdl_launch()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    pdl_wait()
    gate = tl.load(gate_up_ptr + row * 2 * width + i, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + i, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + i, (silu(gate) * up).to(out_ptr.dtype.element_ty), inside)


def silu_mul(gate_up_RX: Tensor) -> Tensor:
    """Return silu(gate) * up of rows that have both, gate first: [R, 2I] -> [R, I] in the same
    dtype, with fp32 arithmetic.
    """
    rows, width = len(gate_up_RX), gate_up_RX.shape[1] // 2
    out_RI = torch.empty(rows, width, dtype=gate_up_RX.dtype, device=gate_up_RX.device)
    _silu_mul[(rows, triton.cdiv(width, _BLOCK))](gate_up_RX, out_RI, width, BLOCK=_BLOCK, **PDL)
    return out_RI


class Library(FastMatmuls):
    """Matmuls by cuBLAS. There is no LM head, so no float32 output is needed."""

    @staticmethod
    def linear(
        x: Tensor | Quantised,
        weight: Matrix,
        bias_N: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out_MN: Tensor | None = None,
    ) -> Tensor:
        return functional.linear(plain(x), weight.values, bias_N)

    def partials(
        self, x: Tensor | Quantised, weight: Matrix, *, room: Room | None = None
    ) -> Tensor:
        return functional.linear(plain(x), weight.values)[None]

    @staticmethod
    def gated(
        x: Tensor | Quantised, weight: Matrix, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return silu_mul(functional.linear(plain(x), weight.values))


def plain(x: Tensor | Quantised) -> Tensor:
    assert not isinstance(x, Quantised), "the library's matmuls are of bfloat16"
    return x


class Step:
    """Prompts that are computed together, from first to last token."""

    def __init__(self, prompts: int, length: int, model: GpuDecoder, cache: KVCache) -> None:
        self.prompts, self.length, self.model, self.cache = prompts, length, model, cache
        count = prompts * length
        self.rows = RowTable.allocate(count, 1)
        batch_slot_R, position_R = (
            torch.arange(prompts).repeat_interleave(length),
            torch.arange(length).repeat(prompts),
        )
        pages = torch.randperm(count // PAGE_SIZE, dtype=torch.int32).view(prompts, -1)
        self.rows.token_R.random_(0, 1000)
        self.rows.batch_slot_R.copy_(batch_slot_R)
        self.rows.position_R.copy_(position_R)
        self.rows.base_R.fill_(length)
        self.rows.kv_slot_R.copy_(
            pages[batch_slot_R, position_R // PAGE_SIZE] * PAGE_SIZE + position_R % PAGE_SIZE
        )
        self.tensors = RowTensors(self.rows.token_R, self.rows.position_R, self.rows.kv_slot_R)
        self.pages = pages.cuda()
        config = model.config
        self.planned = {
            numerics: TritonPaged(
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                context=STEP_ROWS,
                device=torch.device("cuda"),
                numerics=numerics,
            ).planned(count)
            for numerics in MATMULS
        }
        self.keys, self.values = torch.randn(
            2,
            prompts,
            config.kv_heads,
            length,
            config.head_dim,
            device="cuda",
            dtype=torch.bfloat16,
        )

    def ours(self, numerics: Mode) -> None:
        leaves = auto_gpu_leaves(self.model.config) if numerics == "strict" else GPU_LEAVES
        use(self.model, MATMULS[numerics](leaves))
        planned = self.planned[numerics]
        planned.plan(self.rows, self.pages)
        self.model.forward(self.tensors, self.cache, planned)

    def theirs(self) -> None:
        def attend(q_RND: Tensor, k_SKD: Tensor, v_SKD: Tensor, **_: object) -> Tensor:
            q = q_RND.view(self.prompts, self.length, *q_RND.shape[1:]).transpose(1, 2)
            out = functional.scaled_dot_product_attention(
                q, self.keys, self.values, is_causal=True, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(q_RND.shape)

        use(self.model, Library())
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            self.model.forward(self.tensors, self.cache, attend)


def times(count: int, run: Callable[[], None]) -> None:
    for _ in range(count):
        run()


def decoder() -> GpuDecoder:
    config = ModelConfig.parse({**SHAPE.config("bfloat16"), "attention_bias": True}, "prefill")
    model = GpuDecoder(
        config, placement=Placement(torch.device("cuda"), torch.bfloat16, StrictMatmuls())
    )
    for parameter in model.storage():
        parameter.normal_(0, 0.02)
    return model


def use(model: GpuDecoder, matmuls: StrictMatmuls) -> None:
    for layer in model.layers:
        attention, mlp = layer.self_attention, layer.mlp
        for projection in (attention.qkv, attention.output, mlp.gate_up, mlp.down):
            projection.matmuls = matmuls


@torch.inference_mode()
def timed() -> Iterator[dict[str, Any]]:
    model = decoder()
    config = model.config
    cache = model.placement.cache(config, STEP_ROWS // PAGE_SIZE, 1, config.layers)
    for prompts, length in PROMPTS:
        together = STEP_ROWS // length
        step, steps = Step(together, length, model, cache), prompts // together
        runs = {name: partial(times, steps, partial(step.ours, name)) for name in MATMULS}
        found = in_turns({**runs, LIBRARIES: partial(times, steps, step.theirs)}, REPEATS)
        for name, ms in found.items():
            yield {
                "with": name,
                "prompts": prompts,
                "length": length,
                "ms": round(ms, 3),
                "tokens_per_s": round(prompts * length / ms * 1e3),
                "ratio": round(found[LIBRARIES] / ms, 4),
            }


def run(args: argparse.Namespace) -> int:
    shape = {"layers": SHAPE.layers, "hidden": SHAPE.hidden}
    return measure(args, "prefill", timed(), shape=shape)
