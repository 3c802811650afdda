"""One reader per type of a value: it turns the JSON text into the value, or says what is wrong.

An object is first decoded to the texts of its fields, which makes nothing of what is in them. A
list is counted in its text, and refused if it is too long, before its members are decoded. Then
msgspec decodes what it can in one call. Where it refuses, the same text is read again member by
member, which finds the one that is wrong.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np
from msgspec import UNSET, DecodeError, Meta, MsgspecError, Raw, Struct, UnsetType, ValidationError
from msgspec.json import Decoder, decode

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http import counting
from tlt_server.frontend.http.bounds import MAX_INT32, Bounds, Limit
from tlt_server.frontend.http.fields import Open, Tolerant
from tlt_server.frontend.http.scalars import DIGITS, Scalar
from tlt_server.frontend.http.wrong import MAX_PATH, Wrong, must, no_text
from tlt_server.packed import PackedIds
from tlt_server.wording import nearest

MAX_MEMBERS = 2**17  # of a value that may be any JSON, at all its levels
MAX_DEPTH = 64  # levels of such a value
NULL = b"null"
ID = Annotated[int, Meta(ge=0, le=MAX_INT32)]
_FRACTION = re.compile(rb"[.eE]")
LONG = re.compile(rb"[0-9]{19}")  # may be more than 64 bits hold


class Length(NamedTuple):
    """The limits on the members of a list or an object."""

    least: int
    most: int
    limit: Limit | None  # the setting that `most` comes from

    def check(self, text: memoryview, begins: bytes = b",") -> None:
        """Refuse a text of too few or too many members.

        With the character that begins each member of the right type, the text may also pass if a
        member is of another type: few such characters are quicker to see than where members end.
        """
        if counting.is_empty(text):
            if self.least:
                raise must(text, f"have at least {self.least} item{'s' * (self.least > 1)}")
            return
        if len(text) // 2 <= self.most or counting.count(text, begins) < self.most:
            return
        count, limit = counting.members(text).own, self.limit
        if count > self.most and limit is None:
            raise must(text, f"have at most {self.most} item{'s' * (self.most > 1)}")
        if count > self.most and limit is not None:
            raise Wrong(lambda where: limit.exceeded(where, count, self.most))


class ManyReader(ABC):
    """Reads the members of a list or an object."""

    begins: bytes
    requirement: str

    def __init__(self, type: Any, element: Reader, length: Length) -> None:
        self._decoder: Decoder[Any] = Decoder(type)
        self._element, self._length = element, length
        self.member_begins = [bytes([first]) for first in element.begins]

    def read(self, text: memoryview) -> Any:
        if text[0] not in self.begins:
            raise must(text, self.requirement)
        begins = self._element.begins
        self._length.check(text, begins if len(begins) == 1 else b",")
        try:
            return self._quick(text)
        except (MsgspecError, UnicodeDecodeError):
            self._length.check(text)
            return self._each(text)

    def _quick(self, text: memoryview) -> Any:
        """Decode all members in one call; this or `Wrong` if one of them is refused."""
        if not isinstance(self._element, Scalar):
            raise MsgspecError
        return self._decoder.decode(text)

    @abstractmethod
    def _each(self, text: memoryview) -> Any:
        """Read one member after another."""


class ListReader(ManyReader):
    begins, requirement = b"[", "be a list"

    def _quick(self, text: memoryview) -> list[Any]:
        if not isinstance(self._element, ObjectReader):
            return super()._quick(text)
        return self._each_of(self._element.outlines(text), self._element.make)

    def _each(self, text: memoryview) -> list[Any]:
        read = self._element.read
        return self._each_of(decode(text, type=list[Raw]), lambda member: read(memoryview(member)))

    def _each_of(self, members: list[Any], make: Callable[[Any], Any]) -> list[Any]:
        values: list[Any] = []
        try:
            for member in members:
                values.append(make(member))  # noqa: PERF401  # an error needs the index
        except Wrong as wrong:
            wrong.path.append(f"[{len(values)}]")
            raise
        return values


class AlikeReader:
    """Reads a list whose members are all of the type of the first one."""

    begins, requirement = b"[", "be a list"

    def __init__(self, lists: list[ListReader]) -> None:
        self._lists = lists

    def read(self, text: memoryview) -> list[Any]:
        first = bytes(text[1 : 2**10]).lstrip()[:1]
        fitting = (reader for reader in self._lists if first in reader.member_begins)
        return next(fitting, self._lists[0]).read(text)


class DictReader(ManyReader):
    begins, requirement = b"{", "be an object"

    def _each(self, text: memoryview) -> dict[str, Any]:
        name, values = "", {}
        try:
            for name, member in _texts(text).items():
                values[name] = self._element.read(memoryview(member))
        except Wrong as wrong:
            wrong.path.append(f".{name[:MAX_PATH]}")
            raise
        return values


class IdsReader:
    begins, requirement = b"[", "be a list"

    def __init__(self, length: Length) -> None:
        self._length = length
        self._each = ListReader(
            list[ID], Scalar(int, (Meta(ge=0, le=MAX_INT32),)), Length(0, length.most, None)
        )

    def read(self, text: memoryview) -> PackedIds:
        if text[0] not in self.begins:
            raise must(text, self.requirement)
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


class JsonReader:
    """Reads any JSON of a type that may hold any, which is bounded at all its levels."""

    def __init__(self, type: Any) -> None:
        self._decoder: Decoder[Any] = Decoder(type)
        self.begins, self.requirement = {
            list: (b"[", "be a list"),
            dict: (b"{", "be an object"),
        }.get(get_origin(type) or type, (b'"[{tfn' + DIGITS, "be valid"))

    def read(self, text: memoryview) -> Any:
        if text[0] not in self.begins:
            raise must(text, self.requirement)
        check_members(text)
        try:
            value = self._decoder.decode(text)
            if LONG.search(text):
                msgspec.msgpack.encode(value)
        except ValidationError as error:
            if "range" in str(error):
                raise must(text, "hold no number of more than 64 bits") from None
            raise self._member(text) from None
        except OverflowError:
            raise must(text, "hold no number of more than 64 bits") from None
        except (DecodeError, UnicodeDecodeError):
            raise no_text() from None
        return value

    @staticmethod
    def _member(text: memoryview) -> Wrong:
        """Return the error about the first member of a list that is no object."""
        members = [memoryview(member) for member in decode(text, type=list[Raw])]
        at = next(at for at, member in enumerate(members) if member[0] not in b"{")
        wrong = must(members[at], "be an object")
        wrong.path.append(f"[{at}]")
        return wrong


def check_members(text: memoryview) -> None:
    """Refuse a text that holds too many members, or holds them too deep."""
    counted = counting.members(text)
    if counted.all > MAX_MEMBERS:
        what, limit = f"{counted.all} members in all", MAX_MEMBERS
    elif counted.depth > MAX_DEPTH:
        what, limit = f"{counted.depth} levels", MAX_DEPTH
    else:
        return
    raise Wrong(
        lambda where: InvalidRequest(f"{where} has {what}; the limit is {limit}: send less")
    )


class NullReader:
    """Reads a value that may be null."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.begins: bytes = reader.begins + b"n"
        self.requirement: str = reader.requirement

    def read(self, text: memoryview) -> Any:
        return None if text == NULL else self._reader.read(text)


class UnionReader:
    """Reads a value of one of several types, told apart by its first character."""

    def __init__(self, readers: Iterable[Reader]) -> None:
        self._readers = [*readers]
        self.begins: bytes = b"".join(reader.begins for reader in self._readers)
        requirements = " or ".join(reader.requirement for reader in self._readers)
        self.requirement: str = requirements.replace(" or be ", " or ")

    def read(self, text: memoryview) -> Any:
        fitting = [reader for reader in self._readers if text[0] in reader.begins]
        if not fitting:
            raise must(text, self.requirement)
        return (fitting[0] if len(fitting) == 1 else self._likelier(fitting, text)).read(text)

    @staticmethod
    def _likelier(fitting: list[Reader], text: memoryview) -> Reader:
        """Return the reader of two: for a list, of ids or of something else; for a number, whole or
        not.
        """
        if text[0] == ord("["):
            inner = bytes(text[1 : 2**10]).lstrip()[:1]
            likely = inner != b"" and inner in DIGITS + b"tf"
            return next(r for r in fitting if isinstance(r, IdsReader) == likely)
        whole = not _FRACTION.search(text)
        return next(r for r in fitting if (isinstance(r, Scalar) and r.type is int) == whole)


class Field(NamedTuple):
    name: str  # in JSON
    attribute: str
    reader: Reader
    required: bool


class ObjectReader:
    begins, requirement = b"{", "be an object"

    def __init__(self, type: type[Struct], bounds: Bounds, ignored: Iterable[str] = ()) -> None:
        """`ignored` are names that an object may have though the type does not."""
        self._type = type
        hints = get_type_hints(type, include_extras=True)
        self._fields = [
            Field(
                about.encode_name, about.name, reader_of(hints[about.name], bounds), about.required
            )
            for about in msgspec.structs.fields(type)
            if not (issubclass(type, Open) and about.name == "more")
        ]
        self._tolerant, self._open = issubclass(type, Tolerant), issubclass(type, Open)
        names = {field.attribute: field.name for field in self._fields}
        names |= {name: name for name in ignored if name not in names.values()}
        outline = msgspec.defstruct(
            type.__name__,
            [(attribute, Raw | UnsetType, UNSET) for attribute in names],
            rename=names,
            forbid_unknown_fields=type.__struct_config__.forbid_unknown_fields,
        )
        self._outline: Decoder[Any] = Decoder(outline)
        self._known: Decoder[Any] = Decoder(
            msgspec.defstruct("Known", [], bases=(outline,), forbid_unknown_fields=False)
        )
        self._outlines: Decoder[list[Any]] = Decoder(list[Raw if self._open else outline])  # type: ignore[misc]
        self._any = JsonReader(Any)

    def outlines(self, text: memoryview) -> list[Any]:
        """Decode a list of objects to their fields' texts."""
        if self._open:
            check_members(text)
        return self._outlines.decode(text)

    def read(self, text: memoryview) -> Any:
        if text[0] not in self.begins:
            raise must(text, self.requirement)
        if self._open:
            return self._make_open(_texts(text))
        try:
            outline = self._outline.decode(text)
        except UnicodeDecodeError:
            raise no_text() from None
        except ValidationError as error:  # an unknown field, said if the others are right
            self.make(self._known.decode(text))
            raise self._unknown(str(error)) from None
        return self.make(outline)

    def make(self, outline: Any) -> Any:
        if isinstance(outline, Raw):
            return self.read(memoryview(outline))
        return self._make({name: getattr(outline, name) for name in outline.__struct_fields__})

    def _make_open(self, texts: dict[str, Raw]) -> Any:
        known = {field.attribute: texts.pop(field.name, UNSET) for field in self._fields}
        more, name = {}, ""
        try:
            for name, text in texts.items():
                if memoryview(text) != NULL:
                    more[name] = self._any.read(memoryview(text))
        except Wrong as wrong:
            wrong.path.append(f".{name[:MAX_PATH]}")
            raise
        return self._make(known, more=more)

    def _make(self, texts: dict[str, Any], **values: Any) -> Any:
        for name, attribute, reader, required in self._fields:
            text = texts[attribute]
            if text is not UNSET and self._tolerant and memoryview(text) == NULL:
                text = UNSET
            if text is not UNSET:
                try:
                    values[attribute] = reader.read(memoryview(text))
                except Wrong as wrong:
                    wrong.path.append(f".{name}")
                    raise
            elif required:
                raise _missing(name)
        return self._type(**values)

    def _unknown(self, message: str) -> Wrong:
        """Return the error about an unknown field that msgspec names in its message."""
        name = message.partition("`")[2].removesuffix("`")[:MAX_PATH]
        known = [field.name for field in self._fields]
        wrong = Wrong(
            lambda where: InvalidRequest(
                f"unknown field {where}{nearest(name, known)} (known: {', '.join(known)})"
            )
        )
        wrong.path.append(f".{name}")
        return wrong


def _missing(name: str) -> Wrong:
    wrong = Wrong(lambda where: InvalidRequest(f"{where} is missing; it is required"))
    wrong.path.append(f".{name}")
    return wrong


Reader: TypeAlias = (
    Scalar
    | ListReader
    | AlikeReader
    | DictReader
    | IdsReader
    | JsonReader
    | NullReader
    | UnionReader
    | ObjectReader
)


def _texts(text: memoryview) -> dict[str, Raw]:
    try:
        return decode(text, type=dict[str, Raw])
    except (MsgspecError, UnicodeDecodeError):
        raise no_text() from None


def reader_of(hint: Any, bounds: Bounds, metas: tuple[Meta, ...] = ()) -> Reader:
    """Return the reader of a type, as a field of a struct is annotated with it."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *own = get_args(hint)
        return reader_of(inner, bounds, (*metas, *(meta for meta in own if isinstance(meta, Meta))))
    if _is_union(hint):
        parts = [part for part in get_args(hint) if part is not UnsetType]
        readers = [reader_of(part, bounds) for part in parts if part is not NoneType]
        reader = readers[0] if len(readers) == 1 else UnionReader(readers)
        return NullReader(reader) if NoneType in parts else reader
    if _holds_any(hint):
        return JsonReader(hint)
    if hint is PackedIds:
        return IdsReader(_length(hint, metas, bounds))
    if origin is list:
        [element], length = get_args(hint), _length(hint, metas, bounds)
        lists = [
            ListReader(list[part], reader_of(part, bounds), length)  # type: ignore[valid-type]
            for part in (get_args(element) if _is_union(element) else (element,))
        ]
        return lists[0] if len(lists) == 1 else AlikeReader(lists)
    if origin is dict:
        element = get_args(hint)[1]
        return DictReader(hint, reader_of(element, bounds), _length(hint, metas, bounds))
    if isinstance(hint, type) and issubclass(hint, Struct):
        return ObjectReader(hint, bounds)
    return Scalar(hint, metas)


def _length(hint: Any, metas: tuple[Meta, ...], bounds: Bounds) -> Length:
    """Return the limits of a list, which its annotation must state."""
    least = next((meta.min_length for meta in metas if meta.min_length is not None), 0)
    for meta in metas:
        limit = (meta.extra or {}).get("limit")
        if limit is not None:
            return Length(least, getattr(bounds, limit.setting), limit)
        if meta.max_length is not None:
            return Length(least, meta.max_length, None)
    raise TypeError(f"{hint} has no limit on its length; state one in its annotation")


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _holds_any(hint: Any) -> bool:
    return hint is Any or any(_holds_any(part) for part in get_args(hint))
