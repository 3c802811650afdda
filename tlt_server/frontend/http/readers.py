"""The readers of lists, of values that may be null, and of those of several types.

An object is first decoded to the texts of its fields, which makes nothing of what is in them. A
list is counted in its text, and refused if it is too long, before its members are decoded. Then
msgspec decodes what it can in one call. Where it refuses, the same text is read again member by
member, which finds the one that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_origin

import msgspec
import numpy as np
from msgspec import DecodeError, Meta, MsgspecError, Raw, ValidationError
from msgspec.json import Decoder, decode

from tlt_client.fields import MAX_INT32
from tlt_server.frontend.http.counting import Length, check_members
from tlt_server.frontend.http.scalars import DIGITS, Scalar, ValueReader, Wrong, must, no_text, part
from tlt_server.wire.packed import PackedIds

NULL = b"null"
_FRACTION = re.compile(rb"[.eE]")
_FIRST = re.compile(rb"\[[ \t\r\n]*([^ \t\r\n\]])")


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
    """Return the ids of a list, or None if a member may be no id."""
    numbers = bytes(text)[1:-1].strip()
    if numbers.translate(None, b"0123456789,").strip():
        return None
    ids = np.fromstring(numbers, np.int64, sep=",")  # one of too many digits is the greatest
    if len(ids) and ids.max() > MAX_INT32:
        return None
    return PackedIds(ids.astype(np.int32).tobytes())


class JsonReader(ValueReader):
    """Reads any JSON of a type that may hold any, which is bounded at all its levels."""

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
        """Return the error about a list with a member that is no object."""
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
    """Reads a value of one of several types, told apart by its first character."""

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
        """Return the reader of two: for a list, of ids or of something else; for a number, whole or
        not.
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
