"""A model that says what it is told: the fake engine answers with the prompt from its beginning,
and this template puts the answer there.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.frontend.tiny_model import SPECIALS, write_model

EOS = SPECIALS[0]
# The last message, and for the form of calls a word that the template holds.
SAYS = (
    "{{ messages[-1].content }}" + EOS + "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>"
)


def write_saying(directory: Path, template: str = SAYS) -> Path:
    """Write a model with this template."""
    model = write_model(directory)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model
