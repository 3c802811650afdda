"""The translation of messages to JSON and back, by the names of their fields, by the rules at the
top of `clients/proto/rollout.proto`. A large reply becomes bytes a slice at a time: the bytes of
messages that hold some elements of a list each, put after one another, are those of the message
with the whole list, so no object of the whole message is ever made.

`tests/frontend/test_rpc_mirror.py` compares every message with its native type, so no field can be
missing here.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import msgspec
from google.protobuf.descriptor import FieldDescriptor, OneofDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import Raw

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.slices import CALL_VALUES, grouped, members, values
from tlt_server.frontend.rpc.weighing import malformed, members_apart

NULL = "_null"
OBJECT = "_object"  # ends the name of a field that is an object here and else something plainer
NUMBERS = 1024  # numbers of one list that are Python objects at once


def parsed(type: type[Message], data: bytes | memoryview) -> Message:
    try:
        return type.FromString(data)
    except DecodeError:
        raise malformed(len(data), type.DESCRIPTOR) from None


def read(type: type[Message], data: bytes | memoryview) -> dict[str, Any]:
    """Return the JSON object of a message that was weighed. In place of each list of messages it
    has an iterator that reads one member at a time, since all at once take ten times their bytes.
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
    """Return the fields that are set in a message as a JSON object. The same message always gives
    the same object.
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
    """Return the members of a list; of a long list of numbers only its JSON, since Python's numbers
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
    """Return the field of the union that holds a value of this type."""
    kind = (
        FieldDescriptor.CPPTYPE_STRING if isinstance(value, str) else FieldDescriptor.CPPTYPE_INT32
    )
    return next(field for field in union.fields if field.cpp_type == kind)


LENGTH_DELIMITED = 2  # wire type


def wired(kind: type[Message], content: Any) -> Generator[int, None, list[bytes]]:
    """Return the bytes, in parts, of the message with a reply's content. Yield after each slice of
    the work the number of bytes that it made.
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
    """Return what stands before the bytes of a message that is a field of another."""
    return _varint(field.number << 3 | LENGTH_DELIMITED) + _varint(size)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
