"""An untrained drafter for a target: configuration, draft vocabulary and first weights.

An LM head of its own starts as the target's rows of the draft vocabulary and the last norm as the
target's, so training has to learn only the layer before them; everything else is random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig, read_json
from tlt_server.models.draft_networks import ARCHITECTURES
from tlt_server.models.loader import eos_token_ids, read_tensor
from tlt_server.trainer.learning.network import TrainableDrafter, load_trainable, trainable_class

ROTARY = ("rope_theta", "rope_scaling", "rope_parameters")
RESIDUAL = ("o_proj.weight", "down_proj.weight")  # they write into the residual stream


def draft_vocabulary(count_V: NDArray[np.int64], size: int, always: tuple[int, ...]) -> Tensor:
    """Return ascending ids, int64 [min(size, V)]: the end tokens `always`, then the most frequent
    tokens; ties go to the lower id.
    """
    count_V = count_V.astype(np.int64)
    count_V[list(always)] = np.iinfo(np.int64).max
    order_V = np.argsort(-count_V, kind="stable")
    return torch.from_numpy(np.sort(order_V[:size]))


def write_drafter(
    directory: Path,
    target: Path,
    architecture: str,
    *,
    count_V: NDArray[np.int64],
    draft_vocab_size: int,
    intermediate_size: int | None = None,
    start_from: Path | None = None,
    seed: int = 0,
) -> TrainableDrafter:
    """Write a drafter that `tlt serve` can load into an existing directory. `architecture`: in
    `ARCHITECTURES`; `start_from`: another drafter of the target, whose weights are copied.
    `ModelError` if either cannot be used.
    """
    config = eos_token_ids(ModelConfig.read(target), target)
    earlier = load_trainable(start_from, config) if start_from else None
    if earlier is not None:
        intermediate_size = intermediate_size or earlier.config.intermediate_size
    kind = ARCHITECTURES[architecture]
    size = draft_vocab_size if kind.own_head else config.vocab_size
    ids_C = draft_vocabulary(count_V, size, config.eos_token_ids)
    described = _described(target, config, len(ids_C), intermediate_size)
    described |= {"architectures": [architecture], **kind.untrained(config)}
    text = json.dumps(described, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    parsed = ModelConfig.parse(described, str(directory / "config.json"))
    network = trainable_class(architecture)(parsed, len(ids_C))
    network.target_ids_C = ids_C
    _fill(network, seed)
    if kind.own_head:
        head_CH, norm_H = _outputs(target, config, ids_C)
        network.weights["lm_head.weight"].copy_(head_CH)
        network.weights["norm.weight"].copy_(norm_H)
    if earlier is not None:
        _take_over(network, earlier)
    network.save(directory)
    return network


def _described(
    target: Path, config: ModelConfig, draft_vocab_size: int, intermediate_size: int | None
) -> dict[str, Any]:
    """Return config.json in the published layout, with the target's rotary embedding."""
    raw = read_json(target / "config.json")
    rotary = {key: value for key, value in raw.items() if key in ROTARY}
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size or config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        **rotary,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _fill(network: TrainableDrafter, seed: int) -> None:
    """Set random matrices whose outputs keep the scale of their inputs, and norms of one."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in network.weights.items():
        if weight.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        gain = 0.25 if name.endswith(RESIDUAL) else 0.7
        weight.normal_(0.0, gain * weight.shape[1] ** -0.5, generator=generator)


def _take_over(network: TrainableDrafter, earlier: TrainableDrafter) -> None:
    """Copy an earlier drafter's weights; of its head, the rows of tokens that both draft."""
    for name, weight in network.weights.items():
        theirs = earlier.weights.get(name)
        is_head = name == "lm_head.weight"
        if theirs is None or not (is_head or theirs.shape == weight.shape):
            found = "absent" if theirs is None else list(theirs.shape)
            raise ModelError(
                f"the drafter to start from has another shape: {name!r} is {found}, expected "
                f"{list(weight.shape)}; leave --intermediate out, or start from another drafter"
            )
        if not is_head:
            weight.copy_(theirs)
    if not network.kind.own_head:
        return
    known_C = torch.isin(network.target_ids_C, earlier.target_ids_C)
    rows = torch.searchsorted(earlier.target_ids_C, network.target_ids_C[known_C])
    network.weights["lm_head.weight"][known_C] = earlier.weights["lm_head.weight"][rows]


def _outputs(target: Path, config: ModelConfig, ids_C: Tensor) -> tuple[Tensor, Tensor]:
    """Read the target's LM head rows [C, H] and last norm [H]; reads no other tensor."""
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    head_VH, norm_H = (read_tensor(target, name).float() for name in (head, "model.norm.weight"))
    return head_VH[ids_C], norm_H
