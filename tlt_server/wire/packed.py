"""Long lists of token ids and long texts, held as the bytes that are transferred.

A list of a million ids is a million objects: creating it and collecting garbage around it would
each hold the interpreter for tens of milliseconds, and so would joining a long text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

PART_CHARS = 2**14  # characters in one part of a text
PART_IDS = 2**13  # ids that are made into objects at once


class PackedIds(Struct, frozen=True, eq=False):
    """A list of token ids."""

    packed: bytes  # int32, in the order of this machine

    @classmethod
    def of(cls, ids: Iterable[int]) -> PackedIds:
        return cls(np.fromiter(ids, np.int32).tobytes())

    def __len__(self) -> int:
        return len(self.packed) // 4

    def __getitem__(self, at: Any) -> Any:
        return memoryview(self.packed).cast("i")[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedIds | list) and [*self] == [*other]

    def __iter__(self) -> Iterator[int]:
        return iter(self.list())

    def list(self) -> list[int]:
        return memoryview(self.packed).cast("i").tolist()

    def greatest(self) -> int:
        """Return the greatest id; -1 without any."""
        return int(np.frombuffer(self.packed, np.int32).max(initial=-1))


class PackedText:
    """A text as UTF-8 in parts of at most `PART_CHARS` characters."""

    __slots__ = ("_chars", "parts")

    def __init__(self, parts: tuple[bytes, ...], chars: int) -> None:
        self.parts, self._chars = parts, chars

    @classmethod
    def of(cls, text: str) -> PackedText:
        parts = (text[at : at + PART_CHARS] for at in range(0, len(text), PART_CHARS))
        return cls(tuple(part.encode() for part in parts), len(text))

    def __len__(self) -> int:
        return self._chars

    def whole(self) -> str:
        return b"".join(self.parts).decode()


def ending(text: str | PackedText, chars: int) -> str:
    """Return the last characters of a text, at most as many as a part has."""
    if isinstance(text, PackedText):
        text = b"".join(text.parts[-2:]).decode()
    return text[-chars:]


def json_text(text: str | PackedText) -> Iterator[bytes]:
    """Yield the text as JSON, in pieces of bounded size."""
    yield b'"'
    for part in (text if isinstance(text, PackedText) else PackedText.of(text)).parts:
        yield msgspec.json.encode(part.decode())[1:-1]
    yield b'"'


def json_ids(ids: Sequence[int] | PackedIds) -> Iterator[bytes]:
    """Yield the ids as JSON, in pieces of bounded size."""
    numbers = memoryview(ids.packed).cast("i") if isinstance(ids, PackedIds) else ids
    yield b"["
    for at in range(0, len(numbers), PART_IDS):
        yield b"," * (at > 0) + msgspec.json.encode([*numbers[at : at + PART_IDS]])[1:-1]
    yield b"]"
