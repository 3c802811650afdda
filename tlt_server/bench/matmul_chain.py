"""The matmuls of one step of a model, on random weights: per layer qkv, o, gate-up with SiLU and
down, then the LM head in float32. They are those of one GPU, or of one rank of several. In FP8 all
have scales but the head.

Every layer has its own weights, so the L2 cache does not help; without attention, whose time is
another bench's. Data are random: zeros run faster than any model does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tlt_client.quantise import quantise
from tlt_kernels.gpu.exchange import parts_of
from tlt_kernels.gpu.quantise import BLOCK, Matrix, Quantised, empty_rows, quantise_rows
from tlt_server.bench.padding.shapes import Shape
from tlt_server.engine.devices.choice import SAMPLED_BLOCK
from tlt_server.errors import StartupError
from tlt_server.models.gpu.matmuls import Room, StrictMatmuls, by_library
from tlt_server.models.gpu.sums import ATTENTION, MLP, LayerSums

EPS = 1e-6
SAMPLED = 1024  # rows with logits, at most: a long prefill needs few
GPU_BYTES = 0.9  # part of the free memory that weights may take


class Widths(NamedTuple):
    """Sizes of the weights of one rank; K of o is `attended`, of down `inner`."""

    layers: int
    hidden: int
    qkv: int
    attended: int
    inner: int
    vocabulary: int
    quantised: bool = False

    @classmethod
    def of(cls, shape: Shape, ranks: int) -> Widths:
        """Return the widths of the first rank, which has the most blocks of the head."""
        heads, kv_heads = shape.heads // ranks, max(1, shape.kv_heads // ranks)
        blocks = -(-shape.vocab // SAMPLED_BLOCK)
        return cls(
            shape.layers,
            shape.hidden,
            (heads + 2 * kv_heads) * shape.head_dim,
            heads * shape.head_dim,
            shape.intermediate // ranks,
            min(shape.vocab, -(-blocks // ranks) * SAMPLED_BLOCK),
        )

    @property
    def elements(self) -> int:
        """Elements of all weights but the head and biases."""
        each = self.qkv + self.attended + 3 * self.inner
        return self.layers * self.hidden * each

    @property
    def bytes(self) -> int:
        each = self.elements if self.quantised else 2 * self.elements
        return each + 2 * self.vocabulary * self.hidden

    def in_fp8(self) -> Widths:
        """Return these widths with quantised weights; `StartupError` if their blocks are cut."""
        for name in ("hidden", "attended", "inner"):
            if (width := getattr(self, name)) % BLOCK:
                raise StartupError(
                    f"--quantization is fp8, and {name} is {width} on a rank, no multiple of "
                    f"{BLOCK}; name a smaller --tensor-parallel"
                )
        return self._replace(quantised=True)


class LayerWeights(NamedTuple):
    qkv: Matrix
    qkv_bias: Tensor
    o: Matrix
    gate_up: Matrix
    down: Matrix


class Chain:
    """Random weights of a rank; `StartupError` if the current GPU is too small."""

    def __init__(self, widths: Widths) -> None:
        free = torch.cuda.mem_get_info()[0]
        if widths.bytes > GPU_BYTES * free:
            raise StartupError(
                f"the weights of a rank take {widths.bytes / 1e9:.0f} GB, and this GPU has "
                f"{free / 1e9:.0f} free; name a larger --tensor-parallel or a smaller --shape"
            )
        self.widths, hidden = widths, widths.hidden
        self.layers = [
            LayerWeights(
                self._matrix(widths.qkv, hidden),
                draw(widths.qkv),
                self._matrix(hidden, widths.attended),
                self._matrix(2 * widths.inner, hidden),
                self._matrix(hidden, widths.inner),
            )
            for _ in range(widths.layers)
        ]
        self.head = Matrix(draw(widths.vocabulary, hidden))
        self.norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def _matrix(self, outputs: int, inputs: int) -> Matrix:
        values = draw(outputs, inputs)
        return Matrix(*quantise(values)) if self.widths.quantised else Matrix(values)


class Inputs:
    """Inputs of each matmul, independent of other matmuls' outputs, and a residual."""

    def __init__(self, widths: Widths, rows: int) -> None:
        def given(x: Tensor) -> Tensor | Quantised:
            return quantise_rows(x) if widths.quantised else x

        x = draw(rows, widths.hidden) * 50
        self.x, self.last = given(x), x[:SAMPLED]  # all rows, and the head's
        self.attended = given(draw(rows, widths.attended) * 50)
        self.inner = given(draw(rows, widths.inner) * 50)
        self.residual = torch.randn(rows, widths.hidden, device="cuda")

    def room(self) -> Tensor | Quantised:
        """Return memory for a norm's output."""
        if isinstance(self.x, Quantised):
            return empty_rows(len(self.residual), self.residual.shape[1], self.residual.device)
        return torch.empty_like(self.x)


class LoneRank(LayerSums):
    """The sums of a rank without its peers: it sends them the same parts and gets none."""

    def __init__(self, ranks: int, leaves: int, rows: int, hidden: int) -> None:
        self._parts = parts_of(ranks, rows)
        self._room_X = torch.empty(leaves * rows * hidden, device="cuda")

    def room(self, turn: int, rows: int) -> Room:
        return Room(self._room_X, self._parts)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def step(chain: Chain, inputs: Inputs, matmuls: StrictMatmuls, sums: LayerSums) -> Tensor:
    """Run all layers and the norms between them; attention's contribution is an input."""
    normed, residual, rows = inputs.x, inputs.residual, len(inputs.residual)
    for layer in chain.layers:
        matmuls.linear(normed, layer.qkv, layer.qkv_bias)
        part = matmuls.partials(inputs.attended, layer.o, room=sums.room(ATTENTION, rows))
        normed = sums.add_rms_norm(part, residual, chain.norm, EPS, inputs.room())
        inner = matmuls.gated(normed, layer.gate_up)
        part = matmuls.partials(inner, layer.down, room=sums.room(MLP, rows))
        normed = sums.add_rms_norm(part, residual, chain.norm, EPS, inputs.room())
    last = inputs.last if isinstance(normed, Quantised) else normed[:SAMPLED]
    return matmuls.linear(last, chain.head, out_dtype=torch.float32)


def alone(chain: Chain, inputs: Inputs, matmuls: StrictMatmuls, sums: LayerSums) -> Tensor:
    """Run the matmuls without the norms."""
    rows = len(inputs.residual)
    for layer in chain.layers:
        matmuls.linear(inputs.x, layer.qkv, layer.qkv_bias)
        matmuls.partials(inputs.attended, layer.o, room=sums.room(ATTENTION, rows))
        matmuls.gated(inputs.x, layer.gate_up)
        matmuls.partials(inputs.inner, layer.down, room=sums.room(MLP, rows))
    return matmuls.linear(inputs.last, chain.head, out_dtype=torch.float32)


def library(chain: Chain, inputs: Inputs) -> Tensor:
    """Run the same matmuls by the library, without SiLU; its head is in bfloat16."""
    for layer in chain.layers:
        by_library(inputs.x, layer.qkv, layer.qkv_bias)
        by_library(inputs.attended, layer.o)
        by_library(inputs.x, layer.gate_up)
        by_library(inputs.inner, layer.down)
    return by_library(inputs.last, chain.head)
