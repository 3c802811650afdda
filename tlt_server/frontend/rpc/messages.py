"""The weight of messages, and their translation to JSON and back, by field names and the rules at
the top of `clients/proto/rollout.proto`. A message is weighed in its bytes before it is parsed: an
empty submessage takes two bytes on the wire and over a hundred once parsed, so parts are counted
first, and too many are refused.

A large reply is encoded in slices: the concatenated bytes of messages with some elements of a list
each are the bytes of the message with the whole list, so no object of the whole message is ever
created.

`tests/frontend/test_rpc_mirror.py` compares every message with its native type, so no field can be
missing here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import Raw

from tlt_server.errors import InvalidRequest, TooLarge
from tlt_server.frontend.http.slices import CALL_VALUES, grouped, members, values

NULL = "_null"
OBJECT = "_object"  # ends the name of a field that is an object here and else something plainer
NUMBERS = 1024  # numbers of one list that are Python objects at once


def parsed(type: type[Message], data: bytes | memoryview) -> Message:
    try:
        return type.FromString(data)
    except DecodeError:
        raise malformed(len(data), type.DESCRIPTOR) from None


def read(type: type[Message], data: bytes | memoryview) -> dict[str, Any]:
    """Return the JSON object of a weighed message. In place of each list of messages it has an
    iterator that reads one member at a time, since all at once take ten times their bytes.
    """
    rest, lists = members_apart(data, type.DESCRIPTOR)
    found = plain(parsed(type, rest))
    for field, each in lists.items():
        found[field.name] = _each(field, each)
    order = {_json_name(field): field.number for field in type.DESCRIPTOR.fields}
    return dict(sorted(found.items(), key=lambda entry: order[entry[0]]))


def _each(field: FieldDescriptor, members: list[memoryview]) -> Iterator[dict[str, Any]]:
    kind = GetMessageClass(field.message_type)
    for i, member in enumerate(members):
        yield plain(parsed(kind, member), f"{field.name}[{i}]")


def plain(message: Message, where: str = "") -> dict[str, Any]:
    """Return the set fields of a message as a JSON object. The same message always gives the same
    object.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(
            f"{where or 'the message'} has the field number {unknown[0].field_number}, which the "
            f"{message.DESCRIPTOR.full_name} of this server does not have; leave it out, or use a "
            "newer server"
        )
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        path = f"{where}.{field.name}" if where else field.name
        if field.enum_type is not None:  # the only one is NullValue
            found[_json_name(field)] = None
        elif field.message_type is None:
            found[field.name] = _listed(value) if field.is_repeated else _finite(value, path)
        elif field.message_type.GetOptions().map_entry:
            found[field.name] = {
                str(key): _finite(value[key], f"{path}[{key}]") for key in sorted(value)
            }
        elif field.is_repeated:
            found[field.name] = [plain(part, f"{path}[{i}]") for i, part in enumerate(value)]
        else:
            found[_json_name(field)] = plain(value, path)
    return found


def _json_name(field: FieldDescriptor) -> str:
    return field.name.removesuffix(NULL).removesuffix(OBJECT)


def _listed(values: Any) -> list[Any] | Raw:
    """Return the members of a list; for a long list of numbers, its JSON, since Python's numbers
    take twenty times the bytes of the message.
    """
    if len(values) <= NUMBERS or not isinstance(values[0], int):
        return list(values)
    some = (values[at : at + NUMBERS] for at in range(0, len(values), NUMBERS))
    return Raw(b"[" + b",".join(msgspec.json.encode(few)[1:-1] for few in some) + b"]")


def _finite(value: Any, path: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{path} is {value}; it must be a finite number")
    return value


def fill(message: Message, content: Mapping[str, Any]) -> None:
    """Set the fields of a message to those of a reply's JSON object."""
    about = message.DESCRIPTOR
    for name, value in content.items():
        if value is None:
            continue
        field = about.fields_by_name.get(name) or _member(about.oneofs_by_name[name], value)
        if field.message_type is None and not field.is_repeated:
            setattr(message, field.name, value)
            continue
        there = getattr(message, field.name)
        if field.message_type is None:
            there.extend(value)
        elif field.message_type.GetOptions().map_entry or isinstance(there, Struct):
            there.update(value)
        elif field.is_repeated:
            for part in value:
                _fill_part(there.add(), part)
        else:
            there.SetInParent()
            fill(there, value)


def _fill_part(message: Message, part: Any) -> None:
    """Fill an element of a list from an object, a list of its fields in order, or null."""
    if isinstance(part, list):
        part = dict(zip(message.DESCRIPTOR.fields_by_name, part, strict=True))
    fill(message, part or {})


def _member(union: OneofDescriptor, value: str | int) -> FieldDescriptor:
    """Return the union's field for a value of this type."""
    kind = (
        FieldDescriptor.CPPTYPE_STRING if isinstance(value, str) else FieldDescriptor.CPPTYPE_INT32
    )
    return next(field for field in union.fields if field.cpp_type == kind)


LENGTH_DELIMITED = 2  # wire type


def wired(kind: type[Message], content: Any) -> Generator[int, None, list[bytes]]:
    """Return the bytes, in parts, of the message with a reply's content. After each slice of work,
    yield the number of bytes made.
    """
    small: dict[str, Any] = {}
    large: list[tuple[FieldDescriptor, Any]] = []
    for name, value in members(content):
        field = kind.DESCRIPTOR.fields_by_name.get(name)
        if field is None or not _holds_messages(field) or values(value) <= CALL_VALUES:
            small[name] = value
        else:
            large.append((field, value))
    parts = [_filled(kind, small)]
    yield len(parts[0])
    for field, value in large:
        for few in grouped(value) if field.is_repeated else [[value]]:
            if len(few) == 1 and values(few[0]) > CALL_VALUES:
                inner = yield from wired(GetMessageClass(field.message_type), few[0])
                parts.append(_head(field, sum(map(len, inner))))
                parts += inner
            else:
                parts.append(_filled(kind, {field.name: few}))
                yield len(parts[-1])
    return parts


def _holds_messages(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


def _filled(kind: type[Message], content: dict[str, Any]) -> bytes:
    message = kind()
    fill(message, msgspec.to_builtins(content))
    return message.SerializeToString()


def _head(field: FieldDescriptor, size: int) -> bytes:
    """Return the bytes before a message that is a field of another."""
    return _varint_of(field.number << 3 | LENGTH_DELIMITED) + _varint_of(size)


def _varint_of(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


MAX_PARTS = 2**19  # fields of a message, and of all messages in it
MAX_MEMBERS = 2**16  # members of one list, without numbers in packed form
MAX_NUMBERS = 2**22  # numbers of one list in packed form
PART_WEIGHT = 32  # bytes that one part weighs
DEPTH = 64  # levels of messages in messages
_CONTINUES = bytes(range(128, 256))  # bytes of a number after which more follow


class _Field(NamedTuple):
    name: str
    message: Descriptor | None
    weightless: bool  # its bytes are taken as they are
    packed: bool  # a list of numbers
    about: FieldDescriptor

    @property
    def lists_messages(self) -> bool:
        return (
            self.message is not None
            and self.about.is_repeated
            and not self.message.GetOptions().map_entry
        )


def weigh(
    data: bytes | bytearray | memoryview, about: Descriptor, enough: int | None = None
) -> int:
    """Return the weight of a message in bytes, without data that is only copied. Stops at `enough`,
    if given. `TooLarge` if it has too many parts.
    """
    view = memoryview(data)
    weight = parts = 0
    waiting = [(0, len(view), about, 0)]
    while waiting:
        at, end, about, depth = waiting.pop()
        fields, members = _fields(about), Counter[int]()
        while at < end:
            parts, weight = parts + 1, weight + PART_WEIGHT
            if enough is not None and weight >= enough:
                return weight
            if parts > MAX_PARTS:
                raise TooLarge(
                    f"the message has more than {MAX_PARTS} fields in all, those of its members "
                    "included: send several requests"
                )
            tag, at = _varint(view, at, end)
            number, kind = tag >> 3, tag & 7
            field = fields.get(number)
            members[number] += 1
            if members[number] > MAX_MEMBERS:
                name = field.name if field is not None else f"the field number {number}"
                raise TooLarge(
                    f"{name} has more than {MAX_MEMBERS} members; that is the limit: send several "
                    "requests"
                )
            start, at = _value(view, at, end, kind)
            if at > end or depth > DEPTH:
                raise malformed(len(view), about)
            if kind == 2 and field is not None and field.message is not None:
                waiting.append((start, at, field.message, depth + 1))
            elif field is None or not field.weightless:
                weight += at - start
                if enough is None and field is not None and field.packed:
                    _check_numbers(field.name, view[start:at])
    return weight


def members_apart(
    data: bytes | bytearray | memoryview, about: Descriptor
) -> tuple[bytes, dict[FieldDescriptor, list[memoryview]]]:
    """Return the bytes of a weighed message without its lists of messages, and the bytes of each
    member of those lists.
    """
    view, fields = memoryview(data), _fields(about)
    rest: list[memoryview] = []
    members: dict[FieldDescriptor, list[memoryview]] = {}
    at = 0
    while at < len(view):
        begin = at
        tag, at = _varint(view, at, len(view))
        start, at = _value(view, at, len(view), tag & 7)
        field = fields.get(tag >> 3)
        if field is not None and field.lists_messages and tag & 7 == 2:
            members.setdefault(field.about, []).append(view[start:at])
        else:
            rest.append(view[begin:at])
    return b"".join(rest), members


def _check_numbers(name: str, packed: memoryview) -> None:
    """Refuse too many numbers; each ends with its only byte below 128."""
    if len(packed) > MAX_NUMBERS:
        count = len(bytes(packed).translate(None, _CONTINUES))
        if count > MAX_NUMBERS:
            raise TooLarge(
                f"{name} has {count} numbers; the limit is {MAX_NUMBERS}: send several requests"
            )


def malformed(size: int, about: Descriptor) -> InvalidRequest:
    return InvalidRequest(
        f"the message of {size} bytes is no {about.full_name}; send what rollout.proto defines, "
        "made with a compiler of protocol buffers"
    )


def _value(view: memoryview, at: int, end: int, kind: int) -> tuple[int, int]:
    """Return the start and end of a value; without a value, the end is after `end`."""
    match kind:
        case 0:
            return at, _varint(view, at, end)[1]
        case 1:
            return at, at + 8
        case 2:
            length, start = _varint(view, at, end)
            return start, start + length
        case 5:
            return at, at + 4
    return at, end + 1


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, end + 1


@cache
def _fields(about: Descriptor) -> dict[int, _Field]:
    return {
        field.number: _Field(
            field.name,
            field.message_type,
            field.type == FieldDescriptor.TYPE_BYTES,
            field.is_packed,
            field,
        )
        for field in about.fields
    }
