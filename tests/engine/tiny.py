"""Tiny random checkpoints on disk, in the published layouts: a qwen2 target, an EAGLE-3 head that
knows nothing, and an EAGLE-1 head that knows a little.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, LAYERS, HEAD_DIM = 97, 64, 6, 32
EOS = 96


@dataclass(frozen=True)
class Shape:
    vocab: int = VOCAB
    hidden: int = HIDDEN
    layers: int = LAYERS
    head_dim: int = HEAD_DIM
    mlp: int = 96
    features: tuple[int, int, int] = (2, LAYERS // 2, LAYERS - 3)  # layers that the drafter reads
    tied: bool = True  # the head is the embedding

    @property
    def eos(self) -> int:
        return self.vocab - 1


SHALLOW = Shape(layers=2, features=(1, 0, 1))
# For the interpreter: milliseconds a row.
SMALLEST = Shape(vocab=64, hidden=32, layers=2, head_dim=16, mlp=48, features=(1, 0, 1))


def write_target(directory: Path, seed: int = 0, shape: Shape = Shape()) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=shape.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=shape.tied,
        eos_token_id=shape.eos,
        initializer_range=0.15,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = shape.eos
    model.save_pretrained(directory)
    return directory


def write_eagle(
    directory: Path,
    seed: int = 1,
    draft_vocab: int = 60,
    shape: Shape = Shape(),
    own_embedding: bool = False,
) -> Path:
    torch.manual_seed(seed)
    vocab, hidden, head_dim, mlp = shape.vocab, shape.hidden, shape.head_dim, shape.mlp
    directory.mkdir(parents=True, exist_ok=True)

    def weight(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes) * 0.1

    ids = torch.randperm(vocab)[:draft_vocab].sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    save_file(
        {
            "fc.weight": weight(hidden, 3 * hidden),
            "midlayer.input_layernorm.weight": torch.ones(hidden),
            "midlayer.hidden_norm.weight": torch.ones(hidden),
            "midlayer.self_attn.q_proj.weight": weight(2 * head_dim, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": weight(head_dim, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": weight(head_dim, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": weight(hidden, 2 * head_dim),
            "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
            "midlayer.mlp.gate_proj.weight": weight(mlp, hidden),
            "midlayer.mlp.up_proj.weight": weight(mlp, hidden),
            "midlayer.mlp.down_proj.weight": weight(hidden, mlp),
            "norm.weight": torch.ones(hidden),
            "lm_head.weight": weight(draft_vocab, hidden),
            "d2t": ids - torch.arange(draft_vocab),
            "t2d": t2d,
            **({"embed_tokens.weight": weight(vocab, hidden)} if own_embedding else {}),
        },
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "hidden_size": hidden,
                "intermediate_size": mlp,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": head_dim,
                "num_hidden_layers": 1,
                "vocab_size": vocab,
                "draft_vocab_size": draft_vocab,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "max_position_embeddings": 1024,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
                "eagle_aux_hidden_state_layer_ids": list(shape.features),
            }
        )
    )
    return directory


def write_eagle1(
    directory: Path, target: Path, seed: int = 2, bias: bool = True, shape: Shape = Shape()
) -> Path:
    """`fc` maps the token and the hidden state before it to the hidden state after it, by least
    squares over random text; the layer adds a little of its own.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    hidden, head_dim, mlp = shape.hidden, shape.head_dim, shape.mlp
    directory.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    token_BT = torch.randint(0, shape.vocab, (16, 48))
    with torch.no_grad():
        state_BTH = model(token_BT, output_hidden_states=True).hidden_states[-1]
        embedded_BTH = model.get_input_embeddings()(token_BT)
    before_NX = torch.cat(
        [embedded_BTH[:, 1:], state_BTH[:, :-1], torch.ones(16, 47, 1)], dim=2
    ).flatten(0, 1)
    fc_XH = torch.linalg.lstsq(before_NX, state_BTH[:, 1:].flatten(0, 1)).solution

    def weight(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes) * 0.05

    save_file(
        {
            "fc.weight": fc_XH[:-1].t().contiguous(),
            **({"fc.bias": fc_XH[-1].contiguous()} if bias else {}),
            "layers.0.self_attn.q_proj.weight": weight(2 * head_dim, hidden),
            "layers.0.self_attn.k_proj.weight": weight(head_dim, hidden),
            "layers.0.self_attn.v_proj.weight": weight(head_dim, hidden),
            "layers.0.self_attn.o_proj.weight": weight(hidden, 2 * head_dim),
            "layers.0.post_attention_layernorm.weight": torch.ones(hidden) + weight(hidden),
            "layers.0.mlp.gate_proj.weight": weight(mlp, hidden),
            "layers.0.mlp.up_proj.weight": weight(mlp, hidden),
            "layers.0.mlp.down_proj.weight": weight(hidden, mlp),
        },
        directory / "model.safetensors",
    )
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


FIRST = '{}[]":,.-0123456789abcdefghijklmnopqrstuvwxyz \n_/+\t'
LETTERS = FIRST + "".join(c for c in map(chr, range(33, 126)) if c not in FIRST)


def write_alphabet(directory: Path, shape: Shape = Shape()) -> Path:
    """A tokenizer whose tokens are single characters; the last id is the end token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = {" ": "\u0120", "\n": "\u010a", "\t": "\u0109"}  # as byte-level tokenizers spell them
    vocab = {names.get(letter, letter): id for id, letter in enumerate(LETTERS[: shape.eos])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"<|end|>": shape.eos}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
