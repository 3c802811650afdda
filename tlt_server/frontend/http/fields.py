"""The kinds of objects that a request's body is made of.

A native route takes a `Strict` struct, which refuses unknown fields. A borrowed dialect takes
`Tolerant` ones, because its clients send fields that have no meaning here; for them null means the
same as an absent field. Those that would change the answer are refused by name. `parsing.parse`
reads them, and `openapi` describes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin

from msgspec import Struct

from tlt_server.errors import InvalidRequest

OFF: tuple[Any, ...] = (False, "", [], {})


class RefusedField(NamedTuple):
    """A field that other servers know, and that would change tokens or the prompt."""

    why: str  # and what to do instead
    off: tuple[Any, ...] = OFF  # values that ask for nothing


class Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body that may have only the fields that its struct names."""

    exactly_one: ClassVar[tuple[str, ...]] = ()  # fields of which the handler asks for one


class Tolerant(Struct, frozen=True, kw_only=True):
    """A body whose unknown fields are ignored but for some, and in which null means absent."""

    exactly_one: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[Mapping[str, RefusedField]] = {}  # by name, which no field of the struct has


class Open(Tolerant, frozen=True, kw_only=True):
    """An object whose unknown fields are kept."""

    more: dict[str, Any] = {}


class NoFields(Strict, frozen=True, kw_only=True):
    """An empty object; the body may be left out."""


class AnyFields(Tolerant, frozen=True, kw_only=True):
    """An object of which nothing is read; the body may be left out."""


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
