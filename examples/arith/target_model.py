"""The target: a small Qwen2 decoder in plain PyTorch, with Hugging Face's parameter names, for
training and batched sampling.

Legend: B sequences, T positions, H hidden, D head, S cache slots, V vocabulary. `forward` is
checked against `Qwen2ForCausalLM` in the tests.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn


@dataclass(frozen=True)
class TargetConfig:
    """Shape of the target."""

    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 128
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers whose INPUT feeds an EAGLE-3 drafter."""
        return (2, self.num_hidden_layers // 2, self.num_hidden_layers - 3)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope_tables(
    length: int, head_dim: int, theta: float, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, head_dim] in the half-rotation layout."""
    frequencies = theta ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to [..., D] with cos and sin broadcastable to it; keeps x's dtype."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        size, head_dim = config.hidden_size, config.head_dim
        self.q_heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
        )
        self.q_proj = nn.Linear(size, self.q_heads * head_dim)
        self.k_proj = nn.Linear(size, self.kv_heads * head_dim)
        self.v_proj = nn.Linear(size, self.kv_heads * head_dim)
        self.o_proj = nn.Linear(self.q_heads * head_dim, size, bias=False)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as [B, heads, T, D], rotated."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.project(x, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), k, v


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attended, k, v = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class Decoder(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TargetModel(nn.Module):
    """Right-padded batches need no mask: attention is causal and positions start at 0."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config, self.model = config, Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(
                    parameter,
                    std=0.02
                    if "embed" in name
                    else parameter.shape[1] ** -0.5 * (0.25 if out else 0.7),
                )
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        cos, sin = rope_tables(
            config.max_position_embeddings, config.head_dim, config.rope_theta, "cpu"
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden_states(self, ids_BT: torch.Tensor, cache: list | None = None) -> list[torch.Tensor]:
        """Input of each layer, then the final hidden states before and after `norm`; `cache`
        collects (k, v) [B, 1, T, D] per layer.
        """
        cos, sin = self.cos[: ids_BT.shape[1]], self.sin[: ids_BT.shape[1]]
        x = self.model.embed_tokens(ids_BT)
        states = [x]
        for layer in self.model.layers:
            x, k, v = layer(x, cos, sin)
            states.append(x)
            if cache is not None:
                cache.append((k, v))
        return [*states, self.model.norm(x)]

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return F.linear(normed, self.model.embed_tokens.weight).float()

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.logits(self.hidden_states(ids_BT)[-1])

    def decode(
        self,
        ids_B: torch.Tensor,
        positions_B: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """One token per sequence: writes its K and V at `positions_B` of caches [B, S, D] (one KV
        head), returns logits [B, V].
        """
        rows = torch.arange(len(ids_B), device=ids_B.device)
        hidden = (
            torch.arange(keys[0].shape[1], device=ids_B.device)[None, None]
            > positions_B[:, None, None]
        )
        cos, sin = self.cos[positions_B][:, None, None], self.sin[positions_B][:, None, None]
        x = self.model.embed_tokens(ids_B)[:, None]
        for layer, k_cache, v_cache in zip(self.model.layers, keys, values, strict=True):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            k_cache[rows, positions_B], v_cache[rows, positions_B] = (
                k[:, 0, 0].to(k_cache.dtype),
                v[:, 0, 0].to(v_cache.dtype),
            )
            scores = (
                torch.bmm(q[:, :, 0].to(k_cache.dtype), k_cache.transpose(1, 2)).float()
                * self.config.head_dim**-0.5
            )
            weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
            x = (
                x
                + layer.self_attn.o_proj(torch.bmm(weights.to(v_cache.dtype), v_cache).flatten(1))[
                    :, None
                ]
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.logits(self.model.norm(x))[:, 0]


def export_target(model: TargetModel, directory: Path, eos_id: int, pad_id: int) -> None:
    """Write a Hugging Face `Qwen2ForCausalLM` directory in bf16 (the tokenizer is written by
    `make_tokenizer.py`).
    """
    directory.mkdir(parents=True, exist_ok=True)
    layers = model.config.num_hidden_layers
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **asdict(model.config),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "eos_token_id": [eos_id, pad_id],
        "pad_token_id": pad_id,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    state = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def load_target(directory: Path, device: str) -> TargetModel:
    """The exported model, its bf16 weights held in float32."""
    config = json.loads((directory / "config.json").read_text())
    model = TargetModel(TargetConfig(**{name: config[name] for name in asdict(TargetConfig())}))
    model.load_state_dict(
        {name: value.float() for name, value in load_file(directory / "model.safetensors").items()}
    )
    return model.to(device).eval()
