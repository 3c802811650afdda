"""The reader of a value, and that of texts, numbers, truth values and words: each turns the JSON
text into the value, or says what it must be. `Wrong` carries that to the error, with the path.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import DecodeError, Meta, MsgspecError, ValidationError
from msgspec.json import Decoder, decode

from tlt_client.arguments import ADAPTER, ADAPTER_MUST, SEEN, SEEN_MUST, VERSION, VERSION_MUST
from tlt_server.errors import InvalidRequest, TltError
from tlt_server.frontend.http.fields import shown

MAX_PATH = 200  # characters of a path that an error shows
DIGITS = b"-0123456789"
KINDS: Mapping[Any, tuple[bytes, str]] = {  # type -> first characters, requirement
    str: (b'"', "be a string"),
    int: (DIGITS, "be a whole number"),
    float: (DIGITS, "be a number"),
    bool: (b"tf", "be true or false"),
}
_BOUNDS = (  # constraint of `Meta`, whether a value keeps it, requirement
    ("ge", lambda value, limit: value >= limit, "be at least {}"),
    ("gt", lambda value, limit: value > limit, "be greater than {}"),
    ("le", lambda value, limit: value <= limit, "be at most {}"),
    ("lt", lambda value, limit: value < limit, "be less than {}"),
)
_LENGTHS = (
    ("min_length", lambda value, limit: value >= limit, "have at least {} character{s}"),
    ("max_length", lambda value, limit: value <= limit, "have at most {} character{s}"),
)
# Patterns that are better said in words
_PATTERNS = {VERSION: VERSION_MUST, ADAPTER: ADAPTER_MUST, SEEN: SEEN_MUST}


class Wrong(Exception):
    """`say` makes the error from the path of the value; `path` has its steps, innermost first:
    names of fields, and places in lists.
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
    """Return what `make` makes of a part of a value; an error's path gets the step to the part."""
    try:
        return make(found)
    except Wrong as wrong:
        wrong.path.append(step)
        raise


def shown_text(text: memoryview) -> str:
    """Return a value in JSON as an error message shows it, without decoding a large one."""
    if len(text) <= 2**12:
        try:
            return shown(decode(text))
        except (ValueError, RecursionError):
            pass  # text that is not UTF-8, or a number of too many digits
    start = bytes(text[:400]).decode("utf-8", "replace")
    start = repr(start[1:]) if start.startswith('"') else start
    return start if len(start) <= 80 else start[:77] + "..."


class ValueReader(ABC):
    """Reads values of one type."""

    begins: bytes  # first characters of such a value
    requirement: str  # what another value must be

    def read(self, text: memoryview) -> Any:
        """Return the value, or raise `Wrong`."""
        if text[0] not in self.begins:
            raise must(text, self.requirement)
        return self._value(text)

    @abstractmethod
    def _value(self, text: memoryview) -> Any:
        """Return the value of a text that begins rightly, or raise `Wrong`."""

    def read_list(self, text: memoryview) -> list[Any]:
        """Read a list of such values in fewer calls, if that is possible; else or if one is
        refused, raise an error of msgspec, or `Wrong`.
        """
        raise MsgspecError


class Scalar(ValueReader):
    def __init__(self, type: Any, metas: tuple[Meta, ...]) -> None:
        self.type, self._metas = type, metas
        hint = Annotated[type, *metas] if metas else type
        self._decoder: Decoder[Any] = Decoder(hint)
        self._list: Decoder[list[Any]] = Decoder(list[hint])  # type: ignore[valid-type]
        self._is_word = get_origin(type) is Literal
        if self._is_word:
            *names, last = map(repr, get_args(type))
            self.begins = b'"'
            self.requirement = f"be {', '.join(names)} or {last}" if names else f"be {last}"
        else:
            self.begins, self.requirement = KINDS[type]
        self._most_bytes = self._bytes_at_most()
        # msgspec's own bounds fit into 63 bits, and its patterns let a line break follow.
        self._greatest = next(
            (m.extra["at_most"] for m in metas if m.extra and "at_most" in m.extra), None
        )
        self._pattern = next((m.pattern for m in metas if m.pattern is not None), None)

    def _bytes_at_most(self) -> int | None:
        """Return a bound on the bytes of a value, if there is one: a longer text is refused before
        it is decoded, since msgspec's error would hold a copy of it.
        """
        lengths = [meta.max_length for meta in self._metas if meta.max_length is not None]
        if self._is_word:
            lengths = [max(map(len, get_args(self.type)))]
        return 2 + 12 * min(lengths) if lengths else None  # an escaped character has 12 at most

    def _value(self, text: memoryview) -> Any:
        if self._most_bytes is not None and len(text) > self._most_bytes:
            raise must(text, self._too_long(text))
        try:
            value = self._decoder.decode(text)
        except ValidationError:
            raise must(text, self._requirement(text)) from None
        except (DecodeError, UnicodeDecodeError):
            raise no_text() from None
        if self._greatest is not None and value > self._greatest:
            raise must(text, f"be at most {self._greatest}")
        if self._pattern is not None and not re.fullmatch(self._pattern, value):
            raise must(text, self._match())
        return value

    def read_list(self, text: memoryview) -> list[Any]:
        if self._greatest is not None or self._pattern is not None or self._is_word:
            raise MsgspecError  # a member needs more than its decoder
        return self._list.decode(text)

    def _requirement(self, text: memoryview) -> str:
        """Return what the value, which was refused, must be."""
        if self.type not in (str, int, float):
            return self.requirement
        if self.type is str:
            return self._broken(_LENGTHS, len(decode(text, type=str))) or self._match()
        try:
            value = decode(text, type=self.type)
        except ValidationError:
            if self.type is float:
                return "be a finite number"
            if not bytes(text[1:20]).isdigit():
                return self.requirement
            value = float("-inf" if text[0] == ord("-") else "inf")
        return self._broken(_BOUNDS, value) or "be a smaller whole number"

    def _too_long(self, text: memoryview) -> str:
        return self._broken(_LENGTHS, len(text)) if self.type is str else self.requirement

    def _broken(self, bounds: Any, value: float) -> str:
        for meta in self._metas:
            for name, keeps, words in bounds:
                limit = getattr(meta, name)
                if limit is not None and not keeps(value, limit):
                    limit = int(limit) if int(limit) == limit else limit
                    return words.format(limit, s="" if limit == 1 else "s")
        return ""

    def _match(self) -> str:
        return _PATTERNS.get(self._pattern or "", f"match {self._pattern}")
