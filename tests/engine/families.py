"""A tiny target and its drafter with the tokenizer of a family of models, by name."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.tiny import Shape, write_alphabet, write_eagle, write_target
from tests.mostly_long import mostly_long
from tests.tokenizers import FAMILIES

ALPHABET = "alphabet"  # a token is one character
SHAPE, EOS = Shape(vocab=300), 256  # every family has both
# Marks that are tokens of their own, called special or not, find what other families would.
CASES = [ALPHABET, *mostly_long(FAMILIES, "qwen3", "special marks")]


def write_pair(root: Path) -> tuple[Path, Path]:
    """Return the directories of a target without a tokenizer, and of its drafter."""
    target = write_target(root / "target", shape=SHAPE)
    for file in ("config.json", "generation_config.json"):
        config = json.loads((target / file).read_text())
        (target / file).write_text(json.dumps(config | {"eos_token_id": EOS}))
    return target, write_eagle(root / "drafter", shape=SHAPE, draft_vocab=200)


def write_family(root: Path, name: str) -> tuple[Path, Path]:
    """Return the directories of a target with the tokenizer of this name, and of its drafter."""
    if name == ALPHABET:
        return write_alphabet(write_target(root / "target")), write_eagle(root / "drafter")
    target, drafter = write_pair(root)
    return FAMILIES[name].write(target), drafter
