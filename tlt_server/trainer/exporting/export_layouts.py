"""The layouts of other engines: the network of each, its config.json, its limits, and the model
card of an exported drafter.

`EXPORTS` has one row per layout of `tlt drafter export`; `export.py` writes them. Sources:
SafeAILab/EAGLE (`cnets.py`, `cnets1.py`), SGLang (`llama_eagle.py`, `llama_eagle3.py`) and
vllm-project/speculators (`Eagle3SpeculatorConfig`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tlt_server import __version__
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_checkpoint import Described
from tlt_server.models.draft_layouts import FLAT, NESTED, SPECULATORS, DraftLayout, Raw
from tlt_server.models.draft_networks import EAGLE1, EAGLE3, Layout, layer_ids, usual_layers

UNKNOWN = "not given at the export"
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias",
    "max_position_embeddings", "vocab_size", "torch_dtype", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """The drafter to export, and its target."""

    directory: Path
    raw: Raw  # its config.json, made flat
    described: Described
    features: tuple[int, ...]
    target_directory: Path
    target: ModelConfig
    base: str  # the target's name for other engines

    @property
    def sizes(self) -> Raw:
        kept = {key: self.raw[key] for key in SIZES if key in self.raw}
        fixed = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
        return {**fixed, **kept, "head_dim": self.described.config.head_dim}


class ExportLayout(NamedTuple):
    """A layout that other engines read. `lacks` returns the properties of a drafter that it cannot
    express.
    """

    network: str
    layout: DraftLayout
    config: Callable[[Origin], Raw]
    lacks: Callable[[Origin], Iterator[str]]
    title: str
    use: str  # on the model card; {out} is the directory, {base} the target


def _eagle3_config(origin: Origin) -> Raw:
    sizes = {"draft_vocab_size": origin.described.draft_vocab_size}
    return {"architectures": [EAGLE3], **origin.sizes, **sizes}


def _sglang_config(origin: Origin) -> Raw:
    return {
        **_eagle3_config(origin),
        "target_hidden_size": origin.target.hidden_size,
        **layer_ids(origin.features),
    }


def _speculators_config(origin: Origin) -> Raw:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    limits = {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        SPECULATORS: "eagle3",
        "speculators_version": "0.4.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, **limits}],
            "verifier": {
                "name_or_path": origin.base,
                "architectures": [origin.target.architecture],
            },
        },
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **origin.sizes},
        "draft_vocab_size": origin.described.draft_vocab_size,
        "norm_before_residual": origin.described.norm_before_residual,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [*origin.features],
        "tie_word_embeddings": False,
    }


def _eagle1_config(origin: Origin) -> Raw:
    return {"architectures": [EAGLE1], **origin.sizes, "bias": True}


def _no_norm_first(origin: Origin) -> Iterator[str]:
    if origin.described.norm_before_residual:
        yield "'norm_before_residual' is true, and this layout is read as if it were false"


def _only_usual_layers(origin: Origin) -> Iterator[str]:
    yield from _no_norm_first(origin)
    usual = usual_layers(origin.target)
    if origin.features != usual:
        yield f"it reads target layers {origin.features}, and SafeAILab's code gives {usual}"


def _nothing(origin: Origin) -> Iterator[str]:
    yield from ()


EXPORTS: dict[Layout, ExportLayout] = {
    "eagle3": ExportLayout(
        EAGLE3,
        FLAT,
        _eagle3_config,
        _only_usual_layers,
        "EAGLE-3",
        "SafeAILab/EAGLE: `EaModel.from_pretrained(use_eagle3=True, ...)`, once the weights are "
        "saved as pytorch_model.bin, the name that it reads.",
    ),
    "sglang": ExportLayout(
        EAGLE3,
        FLAT,
        _sglang_config,
        _no_norm_first,
        "EAGLE-3",
        "SGLang: `--speculative-algorithm EAGLE3 --speculative-draft-model-path {out}`.",
    ),
    "speculators": ExportLayout(
        EAGLE3,
        NESTED,
        _speculators_config,
        _nothing,
        "EAGLE-3",
        "vLLM: `vllm serve {out}` serves {base} with this drafter.",
    ),
    "eagle1": ExportLayout(
        EAGLE1,
        FLAT,
        _eagle1_config,
        _nothing,
        "EAGLE-1",
        "SGLang: `--speculative-algorithm EAGLE --speculative-draft-model-path {out}`. vLLM reads "
        "no bias of `fc`.",
    ),
}


class Card(NamedTuple):
    """Facts for a model card that the files do not contain."""

    version: str = ""
    data: str = ""  # what it was trained on
    accept_lengths: str = ""  # a sentence


def model_card(origin: Origin, layout: Layout, sha256: str, card: Card) -> str:
    """Return the text of README.md."""
    row, described = EXPORTS[layout], origin.described
    facts = {
        "Target": f"`{origin.base}` ({origin.target.architecture}, {origin.target.layers} layers "
        f"of {origin.target.hidden_size})",
        "Reads of the target": "its hidden state after the final norm"
        if origin.features == (origin.target.layers,)
        else f"the inputs of layers {', '.join(map(str, origin.features))}",
        "Draft vocabulary": f"{described.draft_vocab_size} of {described.config.vocab_size} tokens",
        "Layout": layout,
        "Version": card.version or UNKNOWN,
        "Data": card.data or UNKNOWN,
        "Written by": f"TLT Server {__version__}; read back, hidden states and logits equal bit "
        "for bit",
        "SHA-256 of model.safetensors": f"`{sha256}`",
    }
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    use = row.use.format(out="DIR", base=origin.base)
    measured = card.accept_lengths or (
        f"{UNKNOWN}. `tlt drafter evaluate` computes them from recorded responses."
    )
    return f"""---
base_model: {origin.base}
tags: [speculative-decoding, {row.title.lower()}]
---

# {row.title} drafter for {origin.base}

{lines}

## Use

DIR is this directory. TLT Server: `tlt serve --model TARGET --drafter DIR`.
{use}

## Accept lengths

{measured}
"""
