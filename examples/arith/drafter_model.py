"""The EAGLE-3 drafter for training: one decoder layer over the target's hidden states, parameter
names of the published checkpoints.

Slot p holds (embedding of x_p, feature g_{p-1}); its output h predicts x_{p+1} and is the feature
of the next drafted slot. Slot 0 does not exist. Legend: B sequences, T positions, N branch roots, H
hidden, D head size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from target_model import MLP, RMSNorm, TargetConfig, rope_tables, rotate
from torch import nn


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of the drafter; the rest follows the target."""

    target: TargetConfig
    intermediate_size: int = 768
    draft_vocab_size: int = 256


class DrafterAttention(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, size, bias=False)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [.., N, heads, D], k and v [.., N, 1, D] for inputs [.., N, 2H]; cos and sin [.., N,
        D].
        """
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return (
            rotate(q, cos.unsqueeze(-2), sin.unsqueeze(-2)),
            rotate(k, cos.unsqueeze(-2), sin.unsqueeze(-2)),
            v,
        )


class Midlayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size = config.target.hidden_size
        self.input_layernorm, self.hidden_norm = RMSNorm(size), RMSNorm(size)
        self.self_attn = DrafterAttention(config.target)
        self.post_attention_layernorm = RMSNorm(size)
        self.mlp = MLP(size, config.intermediate_size)

    def join(self, embeds: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(features)], -1)

    def finish(self, features: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Residual over the feature, then the MLP; `attended` [.., heads * D]."""
        h = features + self.self_attn.o_proj(attended)
        return h + self.mlp(self.post_attention_layernorm(h))


class DrafterModel(nn.Module):
    """Embeddings are the target's and passed in; `d2t` and `t2d` say which target ids the draft
    vocabulary keeps.
    """

    def __init__(self, config: DrafterConfig, kept_ids: torch.Tensor) -> None:
        super().__init__()
        size = config.target.hidden_size
        self.config = config
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(size)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        kept_ids = kept_ids.sort().values
        kept = torch.zeros(config.target.vocab_size, dtype=torch.bool)
        kept[kept_ids] = True
        self.register_buffer("d2t", kept_ids - torch.arange(len(kept_ids)))
        self.register_buffer("t2d", kept)
        cos, sin = rope_tables(
            config.target.max_position_embeddings,
            config.target.head_dim,
            config.target.rope_theta,
            "cpu",
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                gain = 0.25 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.7
                nn.init.normal_(parameter, std=gain * parameter.shape[1] ** -0.5)

    @property
    def kept_ids(self) -> torch.Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, states: list[torch.Tensor]) -> torch.Tensor:
        """g: the feature made of the target's hidden states at the inputs of its `aux_layers`."""
        return self.fc(torch.cat([states[i] for i in self.config.target.aux_layers], -1))

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(h)).float()

    def unroll(
        self, embeds_BTH: torch.Tensor, fused_BTH: torch.Tensor, steps: int
    ) -> Iterator[torch.Tensor]:
        """Training-time test along the true path: yields h [B, N, H] of step j for roots r = 1 ..
        T-2-j.

        Step j's slot r+j sees the true slots 1..r and its own path's slots r+1 .. r+j, whose keys
        come from steps 1 .. j.
        """
        last = embeds_BTH.shape[1] - 1
        state = fused_BTH[:, : last - 1]
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(steps):
            roots = last - 1 - step
            state = state[:, :roots]
            joined = self.midlayer.join(embeds_BTH[:, 1 + step : last], state)
            q, k, v = self.midlayer.self_attn.project(
                joined, self.cos[1 + step : last], self.sin[1 + step : last]
            )
            keys.append(k.transpose(1, 2))
            values.append(v.transpose(1, 2))
            attended = attend_branches(
                q.transpose(1, 2),
                [x[:, :, :roots] for x in keys],
                [x[:, :, :roots] for x in values],
            )
            state = self.midlayer.finish(state, attended.transpose(1, 2).flatten(2))
            yield state


def attend_branches(
    q_BhND: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """Row r attends to keys[0][<= r] (true slots) and to keys[i][r] for i >= 1 (its own path); keys
    and values [B, 1, N, D].
    """
    if len(keys) == 1:
        return F.scaled_dot_product_attention(
            q_BhND, keys[0], values[0], is_causal=True, enable_gqa=True
        )
    rows = q_BhND.shape[2]
    future = torch.ones((rows, rows), dtype=torch.bool, device=q_BhND.device).triu(1)
    true = (q_BhND @ keys[0].transpose(2, 3)).masked_fill(future, float("-inf"))
    own = torch.stack([(q_BhND * k).sum(-1) for k in keys[1:]], -1)
    weights = (
        (torch.cat([true, own.to(true.dtype)], -1) * q_BhND.shape[-1] ** -0.5)
        .softmax(-1)
        .to(values[0].dtype)
    )
    out = weights[..., :rows] @ values[0]
    for i, value in enumerate(values[1:]):
        out = out + weights[..., rows + i, None] * value
    return out


def export_drafter(model: DrafterModel, directory: Path) -> None:
    """Write the published EAGLE-3 layout in bf16: no embedding, no biases."""
    directory.mkdir(parents=True, exist_ok=True)
    target = model.config.target
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": model.config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": model.config.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # Published checkpoints count layer inputs at the top level, but layer outputs (one less)
        # inside `eagle_config`.
        "eagle_aux_hidden_state_layer_ids": list(target.aux_layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in target.aux_layers],
            "use_aux_hidden_state": True,
        },
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {
        name: value.detach()
        .to("cpu", torch.bfloat16 if value.is_floating_point() else value.dtype)
        .contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def load_drafter(directory: Path, target: TargetConfig, device: str) -> DrafterModel:
    """The exported drafter, its bf16 weights held in float32."""
    config = json.loads((directory / "config.json").read_text())
    state = load_file(directory / "model.safetensors")
    kept = state["d2t"] + torch.arange(len(state["d2t"]))
    model = DrafterModel(
        DrafterConfig(target, config["intermediate_size"], config["draft_vocab_size"]), kept
    )
    model.load_state_dict(
        {
            name: value.float() if value.is_floating_point() else value
            for name, value in state.items()
        }
    )
    return model.to(device).eval()
