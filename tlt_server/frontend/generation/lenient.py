"""Values of messages that suit templates of either habit: those that ask whether there is a text,
and those that write it; those that take a call's arguments as an object, and those that take JSON.
"""

from __future__ import annotations

from typing import Any


class NoText(str):
    """The text of a message that has none: empty, and none to a template that asks."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class SentArguments(dict[str, Any]):
    """The arguments of a call: an object, and as a text the JSON that was sent."""

    def __init__(self, arguments: dict[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text
