"""The kinds of objects in a request's body, and the error about a value in one.

A native route takes a `Strict` struct, which refuses unknown fields. A borrowed dialect takes
`Tolerant` ones, because its clients send fields without meaning here; null counts as absent. Fields
that would change the answer are refused by name. `parsing.parse` reads the structs, and `openapi`
describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin

from msgspec import Struct
from msgspec.json import decode

from tlt_server.errors import InvalidRequest, TltError

OFF: tuple[Any, ...] = (False, "", [], {})
MAX_PATH = 200  # characters of a path that an error shows


class RefusedField(NamedTuple):
    """A field of other servers that would change tokens or the prompt."""

    why: str  # and what to do instead
    off: tuple[Any, ...] = OFF  # values that ask for nothing


class Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body that may have only its struct's fields."""

    exactly_one: ClassVar[tuple[str, ...]] = ()  # fields of which the handler asks for one


class Tolerant(Struct, frozen=True, kw_only=True):
    """A body whose unknown fields are ignored, with some exceptions, and in which null counts as
    absent.
    """

    exactly_one: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[Mapping[str, RefusedField]] = {}  # by name, which no field of the struct has


class Open(Tolerant, frozen=True, kw_only=True):
    """An object that keeps its unknown fields."""

    more: dict[str, Any] = {}


class NoFields(Strict, frozen=True, kw_only=True):
    """An empty object; the body may be left out."""


class AnyFields(Tolerant, frozen=True, kw_only=True):
    """An object whose fields are all ignored; the body may be left out."""


def check_one(body: Strict | Tolerant) -> None:
    """Refuse a body that has both of its `exactly_one` fields, or neither."""
    first, second = body.exactly_one
    absent = getattr(body, first) is None
    if absent == (getattr(body, second) is None):
        raise InvalidRequest(
            f"{first} is {'absent' if absent else 'given'} and so is {second}; give exactly one of "
            "them"
        )


def shown(value: Any) -> str:
    """Return the value as an error message shows it: its repr, at most 80 characters long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def sentence_of(hint: Any) -> str:
    """Return the text in `Annotated[TYPE, text]`, which describes a field; empty without one."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in reversed(marks) if isinstance(mark, str)), "")


class Wrong(Exception):
    """The error about a value. `say`: makes the error from the value's path. `path`: its steps,
    innermost first, as names of fields and places in lists.
    """

    def __init__(self, say: Callable[[str], TltError], *path: str | int) -> None:
        super().__init__()
        self._say, self.path = say, [*path]

    def error(self) -> TltError:
        steps = (
            f".{step[:MAX_PATH]}" if isinstance(step, str) else f"[{step}]" for step in self.path
        )
        return self._say("".join(reversed([*steps])).removeprefix(".")[:MAX_PATH])


def must(text: memoryview, requirement: str, *path: str | int) -> Wrong:
    value = shown_text(text)
    return Wrong(lambda where: InvalidRequest(f"{where} is {value}; it must {requirement}"), *path)


def no_text() -> Wrong:
    return Wrong(
        lambda where: InvalidRequest(
            f"the body is not JSON: {where or 'a field name'} is not UTF-8; send one UTF-8 encoded "
            "JSON object"
        )
    )


def part(step: str | int, make: Callable[[Any], Any], found: Any) -> Any:
    """Return `make(found)` for a part of a value; an error's path gets the step to the part."""
    try:
        return make(found)
    except Wrong as wrong:
        wrong.path.append(step)
        raise


def shown_text(text: memoryview) -> str:
    """Return a JSON value in the form of error messages, without decoding a large one."""
    if len(text) <= 2**12:
        try:
            return shown(decode(text))
        except (ValueError, RecursionError):
            pass  # text that is not UTF-8, or a number of too many digits
    start = bytes(text[:400]).decode("utf-8", "replace")
    start = repr(start[1:]) if start.startswith('"') else start
    return start if len(start) <= 80 else start[:77] + "..."
