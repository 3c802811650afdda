"""The identity of a model's token ids: its shape, tokenizer and chat template.

Weights do not count, so every checkpoint of one training run has the same identity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from tlt_server.errors import ModelError

SHAPE = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size")


class Identity(NamedTuple):
    model: str  # "xxh3:" and 16 hex digits, as the template's
    template: str  # empty: the model has none


def identity_of(directory: Path) -> Identity:
    """Return the identity of a model directory. `ModelError` if a file of it cannot be read."""
    config = _json(directory / "config.json")
    shape = msgspec.json.encode({name: config.get(name) for name in SHAPE})
    template = _content(directory / "chat_template.jinja")
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        template += path.name.encode() + b"\0" + _content(path)
    if not template:
        named = _json(directory / "tokenizer_config.json").get("chat_template")
        template = msgspec.json.encode(named) if named else b""
    return Identity(
        _digest(shape + _content(directory / "tokenizer.json")),
        _digest(template) if template else "",
    )


def vocabulary_of(directory: Path) -> int:
    """Return the size of a model's vocabulary. `ModelError` if its config.json has none."""
    size = _json(directory / "config.json").get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"vocab_size of {directory / 'config.json'} is {size!r}; copy it again")
    return size


def _digest(data: bytes) -> str:
    return f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(_content(path) or b"{}")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    return content if isinstance(content, dict) else {}
