"""Values in messages for templates of either habit: templates that test whether there is a text,
and those that print it; templates that read a call's arguments as an object, and those that read
JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2


class SentMessage(dict[str, Any]):
    """A message for a template. Like transformers, it leaves out null fields; missing content is
    `NoText`.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__((name, value) for name, value in fields.items() if value is not None)

    def __missing__(self, name: str) -> NoText:
        if name != "content":
            raise KeyError(name)
        return NoText("this message has no content")

    def __or__(self, fields: dict[str, Any]) -> SentMessage:  # type: ignore[override]
        return SentMessage({**self, **fields})


class NoText(jinja2.Undefined):
    """The content of a message that has none, null or left out: undefined, as in transformers.

    A template that tests whether it is none gets True, since some show calls only then. Operations
    that fail on an undefined value act as on an empty text, which other servers pass to every
    template. One value does all three, as a template may test the content of one message and append
    to that of the next.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NoText)

    def __hash__(self) -> int:
        return hash(None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr("", name)

    def __getitem__(self, at: Any) -> str:  # type: ignore[override]
        return ""[at]

    def __add__(self, other: str) -> str:  # type: ignore[override]
        return "" + other

    def __radd__(self, other: str) -> str:  # type: ignore[override]
        return other + ""


def as_text(value: object) -> str:
    """Return the JSON text for a value, which must be `NoText`."""
    if not isinstance(value, NoText):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return ""


def asking(test: Any) -> Callable[..., bool]:
    """Return a template's test, with None in place of `NoText`."""
    return lambda *values: test(*(None if isinstance(each, NoText) else each for each in values))


class SentArguments(dict[str, Any]):
    """The arguments of a call: as an object, and as the JSON text that was sent."""

    def __init__(self, arguments: dict[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text
