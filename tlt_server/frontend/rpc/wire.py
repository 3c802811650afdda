"""A large reply as the bytes of its message, made a slice at a time.

The bytes of messages that hold some elements of a list each, put after one another, are those of
the message with the whole list. So no object of the whole message is ever made.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tlt_server.frontend.http.slices import CALL_VALUES, grouped, members, values
from tlt_server.frontend.rpc.messages import fill

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
