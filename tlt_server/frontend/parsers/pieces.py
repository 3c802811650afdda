"""The pieces of an answer, and the interface of the parsers that find them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import ClassVar, NamedTuple, Protocol

MAX_SPACE = 64  # characters of white space that are held until it is known what follows
MAX_NAME = 256  # characters of a function's name


class SpokenText(NamedTuple):
    text: str


class ThoughtText(NamedTuple):
    text: str


class SpokenCall(NamedTuple):
    name: str
    arguments: str  # JSON


Piece = SpokenText | ThoughtText | SpokenCall


class Parser(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> Iterator[Piece]:
        """Add text, and yield the pieces that are certain. Iterate to the end."""

    def end(self) -> Iterator[Piece]:
        """Yield the held-back pieces at the end of the answer."""


class Form(NamedTuple):
    """The text around calls with JSON arguments, to constrain an answer to it."""

    begin: str  # with `{name}`, the name as JSON
    end: str
    separator: str


class ToolParser(Parser, Protocol):
    form: ClassVar[Form | None]  # None: the arguments are no JSON

    def __init__(self, offered: Container[str], most: int) -> None:
        """`offered`: names of the functions. `most`: how many calls to read; further ones are
        content.
        """


def partial(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)


def is_name(name: object) -> bool:
    """Return True if a value may name a function: short, without control characters."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return False
    return not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 for letter in name)
