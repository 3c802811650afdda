"""The weight of a message, found in its bytes before anything is made of it.

An empty submessage takes two bytes on the wire and over a hundred once it is parsed, so parts are
counted first, and too many are refused. What weighs little is parsed at once, the rest by the
reading process.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tlt_server.errors import InvalidRequest, TooLarge

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
    """Return the weight of a message in bytes, without what is only copied. It is at least
    `enough` as soon as that is reached. `TooLarge`: it has too many parts.
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
    """Return the bytes of a message, which was weighed, without its lists of messages, and the
    bytes of each member of those lists.
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
    """Refuse too many numbers, each of which ends with its only byte below 128."""
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
    """Return where a value begins and ends; its end is after `end` if it has none."""
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
