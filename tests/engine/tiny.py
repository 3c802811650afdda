"""Tiny random checkpoints on disk, in the published layouts: a qwen2 target and an EAGLE-3 head that knows nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, LAYERS, HEAD_DIM = 97, 64, 6, 32
EOS = 96


def write_target(directory: Path, seed: int = 0) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        initializer_range=0.15,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(directory)
    return directory


def write_eagle(directory: Path, seed: int = 1, draft_vocab: int = 60) -> Path:
    torch.manual_seed(seed)
    directory.mkdir(parents=True, exist_ok=True)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape) * 0.1

    ids = torch.randperm(VOCAB)[:draft_vocab].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    save_file(
        {
            "fc.weight": weight(HIDDEN, 3 * HIDDEN),
            "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
            "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
            "midlayer.self_attn.q_proj.weight": weight(2 * HEAD_DIM, 2 * HIDDEN),
            "midlayer.self_attn.k_proj.weight": weight(HEAD_DIM, 2 * HIDDEN),
            "midlayer.self_attn.v_proj.weight": weight(HEAD_DIM, 2 * HIDDEN),
            "midlayer.self_attn.o_proj.weight": weight(HIDDEN, 2 * HEAD_DIM),
            "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
            "midlayer.mlp.gate_proj.weight": weight(96, HIDDEN),
            "midlayer.mlp.up_proj.weight": weight(96, HIDDEN),
            "midlayer.mlp.down_proj.weight": weight(HIDDEN, 96),
            "norm.weight": torch.ones(HIDDEN),
            "lm_head.weight": weight(draft_vocab, HIDDEN),
            "d2t": ids - torch.arange(draft_vocab),
            "t2d": t2d,
        },
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "hidden_size": HIDDEN,
                "intermediate_size": 96,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": HEAD_DIM,
                "num_hidden_layers": 1,
                "vocab_size": VOCAB,
                "draft_vocab_size": draft_vocab,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "max_position_embeddings": 1024,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
            }
        )
    )
    return directory
