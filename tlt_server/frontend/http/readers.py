"""The readers of values in a body: each turns the JSON text of a value into the value, or raises
`Wrong` with the requirement.

An object is first decoded to the texts of its fields, without decoding their content. A list is
counted in its text, and refused if it is too long, before its members are decoded. Then msgspec
decodes as much as possible in one call. If that fails, the same text is read again member by
member, to find the wrong one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import numpy as np
from msgspec import DecodeError, Meta, MsgspecError, Raw, ValidationError
from msgspec.json import Decoder, decode

from tlt_client.arguments import ADAPTER, ADAPTER_MUST, SEEN, SEEN_MUST, VERSION, VERSION_MUST
from tlt_client.fields import MAX_INT32
from tlt_server.frontend.http.counting import Length, check_members
from tlt_server.frontend.http.fields import Wrong, must, no_text, part
from tlt_server.wire.packed import PackedIds

DIGITS = b"-0123456789"
NULL = b"null"
_FRACTION = re.compile(rb"[.eE]")
_FIRST = re.compile(rb"\[[ \t\r\n]*([^ \t\r\n\]])")
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
        """Return the value of a text with the right first character, or raise `Wrong`."""

    def read_list(self, text: memoryview) -> list[Any]:
        """Read a list of such values in fewer calls, if possible; otherwise, or if one is refused,
        raise an error of msgspec, or `Wrong`.
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
        """Return a bound on the bytes of a value, if there is one. A longer text is refused before
        it is decoded, since msgspec's error would contain a copy of it.
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
        """Return the requirement that the refused value does not meet."""
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


class ListReader(ValueReader):
    begins, requirement = b"[", "be a list"

    def __init__(self, element: ValueReader, length: Length) -> None:
        self.element, self._length = element, length

    def _value(self, text: memoryview) -> list[Any]:
        begins, read = self.element.begins, self.element.read
        self._length.check(text, begins if len(begins) == 1 else b",")
        try:
            return self.element.read_list(text)
        except (MsgspecError, UnicodeDecodeError):
            self._length.check(text)
            found = enumerate(decode(text, type=list[Raw]))
            return [part(at, read, memoryview(member)) for at, member in found]


class AlikeReader(ValueReader):
    """Reads a list whose members are all of the type of the first one."""

    begins, requirement = b"[", "be a list"

    def __init__(self, lists: list[ListReader]) -> None:
        self._lists = lists

    def _value(self, text: memoryview) -> list[Any]:
        first = first_of(text)
        fitting = (reader for reader in self._lists if first and first in reader.element.begins)
        return next(fitting, self._lists[0]).read(text)


class DictReader(ValueReader):
    begins, requirement = b"{", "be an object"

    def __init__(self, element: ValueReader, length: Length) -> None:
        self._element, self._length = element, length

    def _value(self, text: memoryview) -> dict[str, Any]:
        self._length.check(text)
        return {
            name: part(name, self._element.read, memoryview(member))
            for name, member in texts_of(text).items()
        }


class IdsReader(ValueReader):
    begins, requirement = b"[", "be a list"

    def __init__(self, length: Length) -> None:
        self._length = length
        self._each = ListReader(Scalar(int, (Meta(ge=0, le=MAX_INT32),)), length)

    def _value(self, text: memoryview) -> PackedIds:
        self._length.check(text)
        ids = _packed(text)
        return PackedIds.of(self._each.read(text)) if ids is None else ids


def _packed(text: memoryview) -> PackedIds | None:
    """Return the ids of a list, or None if a member may not be an id."""
    numbers = bytes(text)[1:-1].strip()
    if numbers.translate(None, b"0123456789,").strip():
        return None
    ids = np.fromstring(numbers, np.int64, sep=",")  # one of too many digits is the greatest
    if len(ids) and ids.max() > MAX_INT32:
        return None
    return PackedIds(ids.astype(np.int32).tobytes())


class JsonReader(ValueReader):
    """Reads any JSON, bounded at all levels."""

    def __init__(self, type: Any) -> None:
        self._decoder: Decoder[Any] = Decoder(type)
        self.begins, self.requirement = {
            list: (b"[", "be a list"),
            dict: (b"{", "be an object"),
        }.get(get_origin(type) or type, (b'"[{tfn' + DIGITS, "be valid"))

    def _value(self, text: memoryview) -> Any:
        check_members(text)
        try:
            value = self._decoder.decode(text)
            msgspec.msgpack.encode(value)  # as it may travel to another process
        except ValidationError as error:
            if "range" in str(error):
                raise must(text, "hold no number of more than 64 bits") from None
            raise self._no_object(text) from None
        except OverflowError:
            raise must(text, "hold no number of more than 64 bits") from None
        except (DecodeError, UnicodeDecodeError):
            raise no_text() from None
        return value

    @staticmethod
    def _no_object(text: memoryview) -> Wrong:
        """Return the error about a list with a member that is not an object."""
        for at, member in enumerate(decode(text, type=list[Raw])):
            if memoryview(member)[0] != ord("{"):
                return must(memoryview(member), "be an object", at)
        return must(text, "be a list of objects")


class NullReader(ValueReader):
    """Reads a value that may be null."""

    def __init__(self, reader: ValueReader) -> None:
        self._reader = reader
        self.begins, self.requirement = reader.begins + b"n", reader.requirement

    def _value(self, text: memoryview) -> Any:
        return None if text == NULL else self._reader.read(text)


class UnionReader(ValueReader):
    """Reads a value of one of several types, distinguished by its first character."""

    def __init__(self, readers: Iterable[ValueReader]) -> None:
        self._readers = [*readers]
        self.begins = b"".join(reader.begins for reader in self._readers)
        requirements = " or ".join(reader.requirement for reader in self._readers)
        self.requirement = requirements.replace(" or be ", " or ")

    def _value(self, text: memoryview) -> Any:
        fitting = [reader for reader in self._readers if text[0] in reader.begins]
        return (fitting[0] if len(fitting) == 1 else self._likelier(fitting, text)).read(text)

    @staticmethod
    def _likelier(fitting: list[ValueReader], text: memoryview) -> ValueReader:
        """Return one of two readers: for a list, of ids or of something else; for a number, whole
        or not.
        """
        if text[0] == ord("["):
            first = first_of(text)
            likely = first != b"" and first in DIGITS + b"tf"
            return next(r for r in fitting if isinstance(r, IdsReader) == likely)
        whole = not _FRACTION.search(text)
        return next(r for r in fitting if (isinstance(r, Scalar) and r.type is int) == whole)


def texts_of(text: memoryview) -> dict[str, Raw]:
    """Return the texts of an object's fields."""
    try:
        return decode(text, type=dict[str, Raw])
    except (MsgspecError, UnicodeDecodeError):
        raise no_text() from None


def first_of(text: memoryview) -> bytes:
    """Return the first character of the first member of a list, if there is one."""
    found = _FIRST.match(text)
    return found[1] if found else b""
