"""Parses request bodies into their structs: `parse` is the only entry.

It stops at the first error, and creates no object for a list that is too long, so a refusal costs
little more memory than the body and a few nanoseconds per byte. It needs only the body and the
limits, so it may run in any process. `Bodies` parses a small, simple body at once, any other in the
reading process. It counts the parts first, since 64 KiB of tiny objects take 30 ms but a text of
that size takes none.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import NoneType
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import UNSET, DecodeError, Meta, MsgspecError, Raw, Struct, UnsetType, ValidationError
from msgspec.json import Decoder

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.counting import LIMITS, Bounds, Length, check_members
from tlt_server.frontend.http.fields import (
    MAX_PATH,
    Open,
    RefusedField,
    Tolerant,
    Wrong,
    is_union,
    no_text,
    part,
    shown_text,
)
from tlt_server.frontend.http.readers import (
    NULL,
    AlikeReader,
    DictReader,
    IdsReader,
    JsonReader,
    ListReader,
    NullReader,
    Scalar,
    UnionReader,
    ValueReader,
    texts_of,
)
from tlt_server.frontend.reading.asking import ask
from tlt_server.frontend.reading.frames import name_of, named, sliced
from tlt_server.frontend.reading.jobs import Slice
from tlt_server.settings.wording import nearest
from tlt_server.wire.packed import PackedIds

ANY = JsonReader(Any)
# Limits on what is parsed at once; on a slow core it takes up to 3 ms.
INLINE_BYTES = 2**16
INLINE_OBJECTS = 128  # with lists
INLINE_QUOTES = 2**12
DIGEST_BYTES = 2**20  # hashed at once, which takes 1 ms
MAX_OFF_BYTES = 256  # no value that asks for nothing is as long
_SPACE = re.compile(rb"[ \t\r\n]*")
Body = TypeVar("Body", covariant=True)


class Field(NamedTuple):
    name: str  # in JSON
    attribute: str
    reader: ValueReader
    required: bool


class ObjectReader(ValueReader):
    begins, requirement = b"{", "be an object"

    def __init__(self, type: type[Struct], bounds: Bounds, ignored: Iterable[str] = ()) -> None:
        """`ignored`: extra names that an object may have."""
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
        self._refused = type.refused if issubclass(type, Tolerant) else {}
        names = {field.attribute: field.name for field in self._fields}
        assert not self._refused.keys() & {*names.values()}, "a field is read and refused"
        others = (*ignored, *self._refused)
        names |= {name: name for name in others if name not in names.values()}
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

    def read_list(self, text: memoryview) -> list[Any]:
        if self._open:
            check_members(text)
        found = enumerate(self._outlines.decode(text))
        return [part(at, self._made, outline) for at, outline in found]

    def _value(self, text: memoryview) -> Any:
        if self._open:
            return self._make_open(texts_of(text))
        try:
            outline = self._outline.decode(text)
        except UnicodeDecodeError:
            raise no_text() from None
        except ValidationError as error:  # an unknown field, said if the others are right
            self._made(self._known.decode(text))
            raise self._unknown(str(error)) from None
        return self._made(outline)

    def _made(self, outline: Any) -> Any:
        if isinstance(outline, Raw):
            return self.read(memoryview(outline))
        return self._make(outline.__getattribute__)

    def _make_open(self, texts: dict[str, Raw]) -> Any:
        known = {field.attribute: texts.pop(field.name, UNSET) for field in self._fields}
        more = {
            name: part(name, ANY.read, memoryview(text))
            for name, text in texts.items()
            if memoryview(text) != NULL
        }
        return self._make(known.__getitem__, more=more)

    def _make(self, raw_of: Callable[[str], Any], **values: Any) -> Any:
        """Return the object. `raw_of`: returns the text of a field, or UNSET."""
        name = ""
        try:
            for name, attribute, reader, required in self._fields:  # noqa: B007 (in the handler)
                raw = raw_of(attribute)
                if raw is UNSET or (self._tolerant and memoryview(raw) == NULL):
                    if required:
                        raise Wrong(_missing)
                    continue
                values[attribute] = reader.read(memoryview(raw))
            for name, refused in self._refused.items():
                raw = raw_of(name)
                if raw is not UNSET and not _is_off(memoryview(raw), refused):
                    raise _refusal(memoryview(raw), refused)
        except Wrong as wrong:  # like `part`, which takes longer
            wrong.path.append(name)
            raise
        return self._type(**values)

    def _unknown(self, message: str) -> Wrong:
        """Return the error about an unknown field named in msgspec's message."""
        name = message[: 2 * MAX_PATH].partition("`")[2].removesuffix("`")[:MAX_PATH]
        known = [field.name for field in self._fields]
        return Wrong(
            lambda where: InvalidRequest(
                f"unknown field {where}{nearest(name, known)} (known: {', '.join(known)})"
            ),
            name,
        )


def _is_off(text: memoryview, refused: RefusedField) -> bool:
    """Return True if the value of a refused field requests nothing."""
    if text == NULL:
        return True
    if len(text) > MAX_OFF_BYTES:
        return False
    try:
        value = msgspec.json.decode(text)
    except (MsgspecError, UnicodeDecodeError):
        return False
    return any(type(value) is type(off) and value == off for off in refused.off)


def _refusal(text: memoryview, refused: RefusedField) -> Wrong:
    value = shown_text(text)
    return Wrong(lambda where: InvalidRequest(f"{where} is {value}; {refused.why}"))


def _missing(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is missing; it is required")


def reader_of(hint: Any, bounds: Bounds, metas: tuple[Meta, ...] = ()) -> ValueReader:
    """Return the reader of a type in the annotation of a struct's field."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *own = get_args(hint)
        return reader_of(inner, bounds, (*metas, *(meta for meta in own if isinstance(meta, Meta))))
    if is_union(hint):
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
            ListReader(reader_of(part, bounds), length)
            for part in (get_args(element) if is_union(element) else (element,))
        ]
        return lists[0] if len(lists) == 1 else AlikeReader(lists)
    if origin is dict:
        element = get_args(hint)[1]
        return DictReader(reader_of(element, bounds), _length(hint, metas, bounds))
    if isinstance(hint, type) and issubclass(hint, Struct):
        return ObjectReader(hint, bounds)
    return Scalar(hint, metas)


def _length(hint: Any, metas: tuple[Meta, ...], bounds: Bounds) -> Length:
    """Return the limits of a list, which its annotation must state."""
    least = next((meta.min_length for meta in metas if meta.min_length is not None), 0)
    for meta in metas:
        limit = (meta.extra or {}).get("limit")
        if limit is not None:
            limit = LIMITS.get(limit, limit)
            return Length(least, getattr(bounds, limit.setting), limit)
        if meta.max_length is not None:
            return Length(least, meta.max_length, None)
    raise TypeError(f"{hint} has no limit on its length; state one in its annotation")


def _holds_any(hint: Any) -> bool:
    return hint is Any or any(_holds_any(part) for part in get_args(hint))


class Forms(NamedTuple, Generic[Body]):
    """The forms of a route's body, distinguished by their fields.

    `choose`: gets each present name of `names`, with whether it is null, and returns a form, which
    may leave the other fields unread.
    """

    names: tuple[str, ...]
    choose: Callable[[Mapping[str, bool]], type[Body]]


def parse(kind: type[Body] | Forms[Body], body: bytes | bytearray, bounds: Bounds) -> Body:
    """Return the struct of a body. `TltError`, with the reason, if it does not have the form."""
    text = memoryview(body)
    try:
        names = kind.names if isinstance(kind, Forms) else ()
        content = _object(text, kind)
        form: Any = kind.choose(_null(kind, content)) if isinstance(kind, Forms) else kind
        return cast(Body, _reader(form, bounds, names).read(content))
    except Wrong as wrong:
        raise wrong.error() from None
    except RecursionError:
        raise _no_json("it is nested too deeply") from None
    except DecodeError as error:
        raise _no_json(str(error)) from None


def any_json(text: str) -> Any:
    """Return the value of a JSON text of unknown type. `InvalidRequest` if it is invalid or too
    large.
    """
    try:
        return ANY.read(memoryview(text.strip().encode("utf-8", "replace")))
    except (Wrong, IndexError, RecursionError):
        raise _no_json("a text in it is invalid") from None


def _null(forms: Forms[Any], text: memoryview) -> dict[str, bool]:
    found = _outline(forms.names).decode(text)
    texts = {name: getattr(found, name) for name in forms.names}
    return {name: memoryview(text) == NULL for name, text in texts.items() if text is not UNSET}


def _object(text: memoryview, kind: Any) -> memoryview:
    """Return the text of an object, from its brace on."""
    space = _SPACE.match(text)
    content = text[space.end() :] if space else text
    if bytes(content[:1]) != b"{":
        value = memoryview(msgspec.json.decode(text, type=Raw))
        raise InvalidRequest(
            f"the body is {shown_text(value)}; it must be a JSON object with the field "
            f"{_needed(kind)}"
        )
    return content


def _needed(kind: Any) -> str:
    """Return the name of a field that a body must have or, if none is required, may have."""
    if isinstance(kind, Forms):
        return kind.names[0]
    fields = msgspec.structs.fields(kind)
    names = [field.encode_name for field in fields if field.required]
    return next(iter((*names, *(field.encode_name for field in fields), "nothing")))


def _no_json(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not JSON: {why}; send one UTF-8 encoded JSON object")


@lru_cache(maxsize=256)
def _reader(kind: type[Any], bounds: Bounds, ignored: tuple[str, ...] = ()) -> ObjectReader:
    return ObjectReader(kind, bounds, ignored)


@lru_cache(maxsize=32)
def _outline(names: tuple[str, ...]) -> Decoder[Any]:
    return Decoder(msgspec.defstruct("Form", [(name, Raw | UnsetType, UNSET) for name in names]))


class Bodies:
    """Reads bodies within the server's limits."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    async def read(self, kind: type[Body] | Forms[Body], body: bytes) -> Body:
        if _is_simple(body):
            return parse(kind, body, self._bounds)
        names = kind.names if isinstance(kind, Forms) else None
        name = name_of(kind.choose if isinstance(kind, Forms) else kind)
        arguments = (PARSED_APART, name, names, self._bounds.values())
        slices = [Slice(("parse", *arguments), lambda: sliced([body]))]
        [value] = await ask(slices, total=len(body), largest=len(body))
        return cast(Body, value)


def _is_simple(body: bytes) -> bool:
    return (
        len(body) <= INLINE_BYTES
        and body.count(b"{") + body.count(b"[") <= INLINE_OBJECTS
        and body.count(b'"') <= INLINE_QUOTES
    )


def parsed_apart(body: bytearray, name: str, names: list[str] | None, bounds: list[int]) -> object:
    """Return the result of `parse`: a job of the reading process."""
    found = named(name)
    kind = found if names is None else Forms[object](tuple(names), found)
    return parse(kind, body, Bounds(*bounds))


PARSED_APART = name_of(parsed_apart)


async def digest(body: bytes) -> str:
    """Return the SHA-256 of a body, while other requests run."""
    sum = hashlib.sha256()
    view = memoryview(body)
    for at in range(0, len(body), DIGEST_BYTES):
        sum.update(view[at : at + DIGEST_BYTES])
        await asyncio.sleep(0)
    return sum.hexdigest()
