"""The model card of an exported drafter: what it drafts for, how it is used, and what is known."""

from __future__ import annotations

from typing import NamedTuple

from tlt_server import __version__
from tlt_server.trainer.export_layouts import EXPORTS, Origin

UNKNOWN = "not given at the export"


class Card(NamedTuple):
    """The facts of a model card that the files do not say."""

    version: str = ""
    data: str = ""  # what it was trained on
    accept_lengths: str = ""  # a sentence


def model_card(origin: Origin, layout: str, sha256: str, card: Card) -> str:
    """Return README.md."""
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
