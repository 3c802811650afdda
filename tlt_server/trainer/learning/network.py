"""Drafters as trainable tensors, in the checkpoint layouts that `models.eagle` serves: EAGLE-3, and
EAGLE-1 with EAGLE-2. `draft_networks.ARCHITECTURES` names the class of each.

Parameters are float32 with the published names; matmuls run in `compute`; norms, rotations and the
residual stream in float32. Tensors kept for the backward pass have the compute dtype, and weights
are cast once, not in every unrolled step: at a 7B model's drafter shapes a cast writes 0.8 GB.
Weight gradients leave their matmul in float32. In inference the logits equal those of the serving
network on the same slots. The target's embedding and head are passed in per target version and
never trained.

Legend: N slots, H hidden, F feature width, A query heads, K KV heads, D head width, C draft
vocabulary, V target vocabulary, X inputs, Y outputs, I inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_checkpoint import describe, feature_layers, fill_drafter, target_ids
from tlt_server.models.draft_networks import ARCHITECTURES
from tlt_server.models.rope import rotary_table
from tlt_server.registry import load_object


@dataclass
class TargetShape:
    """The facts about a target that a drafter must fit: a `draft_checkpoint.Served` that has no
    network.
    """

    config: ModelConfig
    feature_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        self.hidden_size, self.vocab_size = self.config.hidden_size, self.config.vocab_size
        self.max_position = self.config.max_position


class Frozen(NamedTuple):
    """Tensors of one target version, in the compute dtype."""

    embedding_VH: Tensor
    head_CH: Tensor  # the LM head's rows of the draft vocabulary
    drafted_V: Tensor  # bool: is a token in the draft vocabulary?


class SlotOutputs(NamedTuple):
    """h of each queried slot, which is the g of the next drafted slot, and the keys and values that
    later slots read; float32.
    """

    h_MH: Tensor
    k_NKD: Tensor
    v_NKD: Tensor


class TrainableDrafter:
    """A drafter's weights and its layer, whose attention the caller passes in. Subclasses define
    the layer's input and the head.
    """

    def __init__(
        self,
        config: ModelConfig,
        draft_vocab_size: int,
        *,
        own_embedding: bool = False,
        join_bias: bool = False,
        compute: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.compute, self.device = config, compute, torch.device(device)
        self.kind = ARCHITECTURES[config.architecture]
        self.layer = self.kind.layer
        self.draft_vocab_size, self.vocab_size = draft_vocab_size, config.vocab_size
        self.target_ids_C = torch.arange(draft_vocab_size)  # int64, draft id -> target id; host
        self.own_embedding_VH = (
            torch.zeros(config.vocab_size, config.hidden_size) if own_embedding else None
        )
        self.weights: dict[str, Tensor] = {
            name: torch.zeros(shape, device=self.device)
            for name, shape in self.kind.shapes(
                config, draft_vocab_size, join_bias=join_bias
            ).items()
        }
        self._cast: dict[str, Tensor] = {}  # weights in the compute dtype, within `cast_once`
        table = rotary_table(config.rope, config.head_dim, config.max_position)
        self._cos_PD2, self._sin_PD2 = (half.to(self.device) for half in table)

    def parameters(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors by their published names, without d2t and t2d."""
        own = self.own_embedding_VH
        return {**({} if own is None else {"embed_tokens.weight": own}), **self.weights}

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None:
        """Set the draft vocabulary from a checkpoint's two maps. `ModelError` if they contradict
        each other.
        """
        self.target_ids_C = target_ids(d2t_C, t2d_V, self.draft_vocab_size, self.vocab_size, path)

    @property
    def drafted_V(self) -> Tensor:
        """Mask over the target vocabulary, true for tokens that can be drafted: bool, on the
        host.
        """
        drafted_V = torch.zeros(self.vocab_size, dtype=torch.bool)
        drafted_V[self.target_ids_C] = True
        return drafted_V

    def frozen(self, embedding_VH: Tensor, head_CH: Tensor) -> Frozen:
        """Cast a target version's embedding and head rows. A drafter that has its own embedding
        uses that one.
        """
        own = self.own_embedding_VH
        embedding_VH = embedding_VH if own is None else own
        embedding_VH, head_CH = (x.to(self.device, self.compute) for x in (embedding_VH, head_CH))
        return Frozen(embedding_VH, head_CH, self.drafted_V.to(self.device))

    @contextmanager
    def cast_once(self) -> Iterator[None]:
        """Within this context, cast the weights to the compute dtype once. They must not change in
        it.
        """
        self._cast = {
            name: weight.detach().to(self.compute) for name, weight in self.weights.items()
        }
        try:
            yield
        finally:
            self._cast = {}

    def fuse(self, feature_NF: Tensor) -> Tensor:
        """Turn the target's features at a position into g, an input of the next slot: [N, H]."""
        raise NotImplementedError

    def join(self, embedded_NH: Tensor, g_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of a slot's attention and the start of its residual stream."""
        raise NotImplementedError

    def logits(self, h_NH: Tensor, frozen: Frozen) -> Tensor:
        """Return logits [N, C] over the draft vocabulary for the token after each slot's."""
        raise NotImplementedError

    def draft(
        self,
        embedded_NH: Tensor,
        g_NH: Tensor,
        position_N: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        query_M: Tensor | None = None,
    ) -> SlotOutputs:
        """Run the layer over slots. `attend` maps this step's rotated queries, keys and values to
        the attention output [M, A, D]. Only the slots `query_M` get a query and an output; None
        means all.
        """
        joined_NX, residual_NH = self.join(embedded_NH, g_NH)
        k, v = (self._heads(part, joined_NX) for part in "kv")
        k = self._rotated(k, position_N)
        if query_M is not None:
            joined_NX, residual_NH, position_N = (
                x.index_select(0, query_M) for x in (joined_NX, residual_NH, position_N)
            )
        q = self._rotated(self._heads("q", joined_NX), position_N)
        mixed_NH = self._linear(f"{self.layer}self_attn.o_proj", attend(q, k, v).flatten(1))
        return SlotOutputs(self._with_mlp(residual_NH + mixed_NH), k, v)

    def _with_mlp(self, h_NH: Tensor) -> Tensor:
        """Add the MLP to the residual stream."""
        normed_NH = self._norm(f"{self.layer}post_attention_layernorm", h_NH)
        gate_NI, up_NI = (
            self._linear(f"{self.layer}mlp.{part}_proj", normed_NH) for part in ("gate", "up")
        )
        inner_NI = gated(gate_NI, up_NI, self.compute)
        return h_NH + self._linear(f"{self.layer}mlp.down_proj", inner_NI)

    def save(self, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `model.safetensors` with the vocabulary map; the caller writes config.json."""
        tensors = {
            name: value.detach().to("cpu", dtype).contiguous()
            for name, value in self.parameters().items()
        }
        save_file(
            {**tensors, **(self._vocabulary_map() if self.kind.own_head else {})},
            directory / "model.safetensors",
            metadata={"format": "pt"},
        )

    def _vocabulary_map(self) -> dict[str, Tensor]:
        ids_C = self.target_ids_C
        return {"d2t": ids_C - torch.arange(len(ids_C)), "t2d": self.drafted_V}

    def _heads(self, part: str, joined_NX: Tensor) -> Tensor:
        """Return the queries, keys or values of slots, before rotation."""
        x_NX = self._linear(f"{self.layer}self_attn.{part}_proj", joined_NX)
        return x_NX.unflatten(1, (-1, self.config.head_dim))

    def _rotated(self, x_NXD: Tensor, position_N: Tensor) -> Tensor:
        at_N = position_N.clamp(max=len(self._cos_PD2) - 1)  # beyond it nothing is served
        cos_N1D, sin_N1D = (half[at_N][:, None] for half in (self._cos_PD2, self._sin_PD2))
        return _rotate(x_NXD, cos_N1D, sin_N1D)

    def _linear(self, name: str, x_NX: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        cast = self._cast.get(f"{name}.weight")
        cast = weight.detach().to(self.compute) if cast is None else cast
        return linear(x_NX.to(self.compute), weight, cast, bias)

    def _norm(self, name: str, x_NH: Tensor) -> Tensor:
        weight_H = self.weights[f"{name}.weight"]
        return functional.rms_norm(x_NH.float(), weight_H.shape, weight_H, self.config.norm_eps)


class TrainableEagle3(TrainableDrafter):
    """The network of EAGLE-3: `fc` joins the inputs of three target layers, embedding and g are
    normed separately and concatenated, and its own head covers the draft vocabulary.
    """

    def fuse(self, feature_NF: Tensor) -> Tensor:
        return self._linear("fc", feature_NF)

    def join(self, embedded_NH: Tensor, g_NH: Tensor) -> tuple[Tensor, Tensor]:
        normed = (
            self._norm("midlayer.input_layernorm", embedded_NH),
            self._norm("midlayer.hidden_norm", g_NH),
        )
        return torch.cat(normed, dim=1), g_NH

    def logits(self, h_NH: Tensor, frozen: Frozen) -> Tensor:
        return self._linear("lm_head", self._norm("norm", h_NH))


class TrainableEagle1(TrainableDrafter):
    """The network of EAGLE-1 and EAGLE-2. The feature is the target's hidden state after its final
    norm; `fc` joins it with the embedding, without an input norm; the head is the target's, frozen.
    """

    def fuse(self, feature_NF: Tensor) -> Tensor:
        return feature_NF.float()

    def join(self, embedded_NH: Tensor, g_NH: Tensor) -> tuple[Tensor, Tensor]:
        joined_NH = self._linear("fc", torch.cat([embedded_NH.float(), g_NH], dim=1))
        return joined_NH, joined_NH

    def logits(self, h_NH: Tensor, frozen: Frozen) -> Tensor:
        return functional.linear(h_NH.to(self.compute), frozen.head_CH).float()


def trainable_class(architecture: str) -> type[TrainableDrafter]:
    """Return the trainable network's class for an entry of `ARCHITECTURES`."""
    found: type[TrainableDrafter] = load_object(ARCHITECTURES[architecture].trained)
    return found


def load_trainable(
    directory: str | Path,
    target: ModelConfig,
    *,
    compute: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> TrainableDrafter:
    """Load a drafter from its directory. `ModelError` if it does not fit this target's shape."""
    directory = Path(directory)
    described = describe(directory, TargetShape(target, feature_layers(directory, target)))
    if described.norm_before_residual:
        raise ModelError(
            f"{directory}: a drafter with 'norm_before_residual' true is not trained; serve it as "
            "it is, or train another drafter"
        )
    network = trainable_class(described.config.architecture)(
        described.config,
        described.draft_vocab_size,
        own_embedding=described.own_embedding,
        join_bias=described.join_bias,
        compute=compute,
        device=device,
    )
    fill_drafter(network, directory)
    return network


def _rotate(x_NXD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2), as `elementwise.rope_store` does."""
    low, high = x_NXD.chunk(2, -1)
    return torch.cat([low * cos_N1D - high * sin_N1D, high * cos_N1D + low * sin_N1D], -1)


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
