"""Limits on the members of a JSON list or object, counted in its text before any member becomes an
object.

The text must already be valid JSON, so only quotes, brackets and commas matter. It is read in
slices, which bounds the memory, in 0.1 to 20 ns per byte.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from tlt_server.errors import InvalidRequest, TltError
from tlt_server.frontend.http.fields import Wrong, must

if TYPE_CHECKING:
    from tlt_server.config import ResolvedConfig

# Limits on a value that may be any JSON: its members at all levels, and its levels.
MAX_MEMBERS = 2**17
MAX_DEPTH = 64
SLICE_BYTES = 2**16
STRUCTURE = b'"[]{},'
_OTHERS = bytes(set(range(256)) - set(STRUCTURE))
_EMPTY = re.compile(rb"[\[{][ \t\r\n]*[\]}]")
_QUOTE, _COMMA = ord('"'), ord(",")
_STEPS = np.zeros(256, np.int8)  # change of depth at a character
_STEPS[[ord("["), ord("{")]], _STEPS[[ord("]"), ord("}")]] = 1, -1


class Bounds(Struct, frozen=True):
    """The settings that bound a list or an object, under their own names."""

    max_batch_items: int
    max_prompt_tokens: int
    max_model_len: int
    max_stop_strings: int
    max_stop_token_ids: int
    max_logit_bias: int

    @classmethod
    def of(cls, config: ResolvedConfig) -> Bounds:
        return cls(*(getattr(config, name) for name in cls.__struct_fields__))

    def values(self) -> tuple[int, ...]:
        return msgspec.structs.astuple(self)


class Limit(NamedTuple):
    """A setting that bounds a list, stated in the field's `Meta(extra={"limit": ...})`; a field
    that the client declares states the setting's name.
    """

    setting: str
    noun: str  # the members
    remedy: str = ""
    error: type[TltError] = InvalidRequest

    def exceeded(self, where: str, count: int, limit: int) -> TltError:
        remedy = f": {self.remedy}" if self.remedy else ""
        return self.error(
            f"{where} has {count} {self.noun}; the limit is {limit} ({self.setting}){remedy}"
        )


LIMITS = {
    limit.setting: limit
    for limit in (
        Limit("max_stop_strings", "strings", "leave some out"),
        Limit("max_stop_token_ids", "ids", "leave some out"),
        Limit("max_logit_bias", "entries", "leave some out"),
    )
}


class Members(NamedTuple):
    """The size of a list or an object. An empty one counts as one member."""

    own: int
    all: int  # members at all levels
    depth: int  # levels, itself included


def count(text: memoryview, character: bytes) -> int:
    return sum(
        bytes(text[at : at + SLICE_BYTES]).count(character)
        for at in range(0, len(text), SLICE_BYTES)
    )


def is_empty(text: memoryview) -> bool:
    """Return True if a list or an object has no member."""
    return _EMPTY.match(text) is not None


def members(text: memoryview) -> Members:
    """Count the members of a list or object, given as its text."""
    quotes = depth = own = commas = opened = deepest = 0
    escape = b""  # a backslash at the end of a slice, whose character comes with the next one
    for at in range(0, len(text), SLICE_BYTES):
        part = escape + bytes(text[at : at + SLICE_BYTES])
        escape = b""
        if b"\\" in part:
            part = part.replace(b"\\\\", b"")
            if part.endswith(b"\\"):
                part, escape = part[:-1], b"\\"
            part = part.replace(b'\\"', b"")
        codes = np.frombuffer(part.translate(None, _OTHERS), np.uint8)
        if not len(codes):
            continue
        seen = quotes + np.cumsum(codes == _QUOTE, dtype=np.int32)
        outside = seen % 2 == 0
        quotes = int(seen[-1]) % 2
        depths = depth + np.cumsum(_STEPS[codes] * outside, dtype=np.int32)
        separators = (codes == _COMMA) & outside
        own += int(np.count_nonzero(separators & (depths == 1)))
        commas += int(np.count_nonzero(separators))
        opened += int(np.count_nonzero((_STEPS[codes] == 1) & outside))
        depth, deepest = int(depths[-1]), max(deepest, int(depths.max()))
    # Each list or object has one member more than commas, but an empty one, which counts as one.
    return Members(own + 1, commas + opened, deepest)


class Length(NamedTuple):
    """The limits on the members of a list or an object."""

    least: int
    most: int
    limit: Limit | None  # the setting that `most` comes from

    def check(self, text: memoryview, begins: bytes = b",") -> None:
        """Refuse a text with too few or too many members.

        `begins`: the first character of a member of the right type. A text with few of them passes
        early, even if some members have another type: counting these characters is faster than
        parsing the members.
        """
        empty = is_empty(text)
        if self.least and (empty or (self.least > 1 and members(text).own < self.least)):
            raise must(text, f"have at least {self.least} item{'s' * (self.least > 1)}")
        if empty or len(text) // 2 <= self.most or count(text, begins) < self.most:
            return
        own, limit = members(text).own, self.limit
        if own > self.most and limit is None:
            raise must(text, f"have at most {self.most} item{'s' * (self.most > 1)}")
        if own > self.most and limit is not None:
            raise Wrong(lambda where: limit.exceeded(where, own, self.most))


def check_members(text: memoryview) -> None:
    """Refuse a text with too many members, or too deeply nested ones."""
    levels = count(text, b"[") + count(text, b"{")
    if len(text) <= MAX_MEMBERS and levels <= MAX_DEPTH:
        return  # they are few, which is quicker to see
    counted = members(text)
    if counted.all > MAX_MEMBERS:
        what, limit = f"{counted.all} members in all", MAX_MEMBERS
    elif counted.depth > MAX_DEPTH:
        what, limit = f"{counted.depth} levels", MAX_DEPTH
    else:
        return
    raise Wrong(
        lambda where: InvalidRequest(f"{where} has {what}; the limit is {limit}: send less")
    )
