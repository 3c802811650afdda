"""The target: a small Qwen2 decoder in plain PyTorch, with Hugging Face's parameter names, for
training. A test compares it with `Qwen2ForCausalLM`.

Legend: B sequences, T positions, V vocabulary.
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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


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

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        cos, sin = self.cos[: ids_BT.shape[1]], self.sin[: ids_BT.shape[1]]
        x = self.model.embed_tokens(ids_BT)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight).float()


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
