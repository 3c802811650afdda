"""Messages between the loop and the reading process.

A message is frames: 4 bytes of length, then msgpack or plain bytes; an empty frame ends it. A
request is a header (job and arguments), then payload. A reply is a value of structs, lists and
dicts in pieces of bounded size, or an error.

Decoding one piece holds the interpreter for at most 3 ms, however large the value is. Long texts
become `PackedText`. The classes of structs are sent by name, and only those of this package are
found.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from msgspec.msgpack import Ext

from tlt_server.errors import InvalidRequest, from_code
from tlt_server.wire.packed import PART_CHARS, PackedText

FRAME_BYTES = 2**15  # size that pieces of a value aim at
MAX_FRAME_BYTES = 2**18  # no frame is larger; one that says so comes from a broken process
END = b""


def framed(data: bytes) -> bytes:
    assert len(data) <= MAX_FRAME_BYTES, f"a frame of {len(data)} bytes"
    return len(data).to_bytes(4, "little") + data


def sliced(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of all parts in frames of bounded size."""
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(part), FRAME_BYTES):
            yield bytes(view[at : at + FRAME_BYTES])


class Channel:
    """One lane's socket, on the loop. Other requests run between frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, side: socket.socket) -> Channel:
        return cls(*await asyncio.open_connection(sock=side, limit=2 * FRAME_BYTES))

    async def send(self, frames: Iterable[bytes]) -> None:
        """Send a message."""
        for frame in frames:
            self._writer.write(framed(frame))
            await self._writer.drain()
            await asyncio.sleep(0)
        self._writer.write(framed(END))
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next frame. `EOFError`: the process is gone."""
        length = int.from_bytes(await self._reader.readexactly(4), "little")
        if length > MAX_FRAME_BYTES:
            raise EOFError(f"a frame of {length} bytes")
        data = await self._reader.readexactly(length)
        await asyncio.sleep(0)
        return data

    def close(self) -> None:
        self._writer.transport.abort()


class BlockingChannel:
    """The other end, in a thread of the reading process."""

    def __init__(self, side: socket.socket) -> None:
        self._file = side.makefile("rb", buffering=2**18)
        self._side = side

    def send(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self._side.sendall(framed(frame))
        self._side.sendall(framed(END))

    def receive(self) -> bytes:
        head = self._file.read(4)
        data = self._file.read(int.from_bytes(head, "little"))
        if len(head) < 4:
            raise EOFError("the server is gone")
        return data

    def message(self) -> Iterator[bytes]:
        """Yield frames up to the end of the message."""
        while data := self.receive():
            yield data


STRUCT, TEXT = 1, 2  # codes of msgpack extensions
PACKED_CHARS = 2**18  # a text this long stays packed
# Fields of structs that may hold such a text, and names in objects below them.
LONG_TEXTS = frozenset({"prompt", "text", "content", "input", "output"})
MAX_KEY_CHARS = 2**12
SCALARS = frozenset({int, float, bool, str, type(None)})
SCALAR_BYTES = 9  # a number of 64 bits
MEMBERS, NUMBERS = 32, 4096  # members of a list, or numbers, that are encoded at once

_encode = msgspec.msgpack.Encoder().encode


def name_of(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def named(name: str) -> Any:
    """Return the class or function of this package with this name. Its module must have been
    imported when this process started, since the files may be of another version by now.
    """
    module, _, path = name.partition(":")
    assert module.startswith("tlt_server."), f"{module} is not of this package"
    return getattr(sys.modules[module], path)


def cut(value: Any) -> Iterator[bytes]:
    """Yield the pieces of a value. `InvalidRequest`: a text is too long for its field."""
    return _Cutter().cut(value, "the body", True)


class _Cutter:
    def __init__(self) -> None:
        self._kinds: dict[type, int] = {}  # class of structs -> its number in this value
        self._new: list[bytes] = []  # pieces that say the numbers

    def cut(self, value: Any, where: str, long: bool) -> Iterator[bytes]:
        """`long`: long texts are allowed here."""
        if isinstance(value, Struct):
            whole = self._small(value)
            if whole is not None:
                yield from self._said()
                yield whole
                return
            number = self._kind(type(value))
            yield from self._said()
            yield _encode(["S", number])
            yield from self._entries(_fields(value), where, True)
        elif isinstance(value, dict):
            yield _encode(["{"])
            yield from self._entries(value, where, long)
        elif isinstance(value, list | tuple):
            yield _encode(["["])
            count = NUMBERS if value and type(value[0]) in (int, float) else MEMBERS
            for at in range(0, len(value), count):
                yield from self._members(value[at : at + count], where, long)
        else:
            yield from self._leaf(value, where, long)
            return
        yield _encode(["]"])

    def _leaf(self, value: Any, where: str, long: bool) -> Iterator[bytes]:
        if isinstance(value, bytes) and len(value) > FRAME_BYTES:
            yield from _parts("B", sliced([value]))
        elif isinstance(value, PackedText):
            yield from _parts("T", value.parts, len(value))
        elif isinstance(value, str) and len(value) > PART_CHARS:
            if len(value) >= PACKED_CHARS and not long:
                raise InvalidRequest(
                    f"{where} has a text of {len(value)} characters; the limit of this field is "
                    f"{PACKED_CHARS}: shorten it"
                )
            yield from _parts("T", PackedText.of(value).parts, len(value))
        else:
            yield _encode(["v", value])

    def _entries(self, entries: dict[str, Any], where: str, long: bool) -> Iterator[bytes]:
        simple: dict[str, Any] = {}
        chars = 0  # in it
        for key, value in entries.items():
            if isinstance(key, str) and len(key) > MAX_KEY_CHARS:
                raise InvalidRequest(
                    f"{where} has a field name of {len(key)} characters; the limit is "
                    f"{MAX_KEY_CHARS}: shorten it"
                )
            if type(value) in SCALARS and (type(value) is not str or len(value) < 256):
                simple[key] = value
                chars += len(key) if isinstance(key, str) else 0
                if len(simple) == MEMBERS or chars > MAX_KEY_CHARS:
                    yield _encode(["i", simple])
                    simple, chars = {}, 0
            else:
                yield _encode(["k", key])
                name = key if isinstance(key, str) else where
                yield from self.cut(value, name, long and name in LONG_TEXTS)
        if simple:
            yield _encode(["i", simple])

    def _members(self, members: Any, where: str, long: bool) -> Iterator[bytes]:
        whole = self._small([*members], "m")
        if whole is not None:
            yield from self._said()
            yield whole
        elif len(members) > 1:
            yield from self._members(members[: len(members) // 2], where, long)
            yield from self._members(members[len(members) // 2 :], where, long)
        else:
            yield from self.cut(members[0], where, long)

    def _small(self, value: Any, kind: str = "v") -> bytes | None:
        """Return the value as one piece, or None if that would be too large."""
        self._room = FRAME_BYTES
        try:
            return _encode([kind, self._plain(value)])
        except _TooWide:
            return None

    def _plain(self, value: Any) -> Any:
        """Return the value with structs and packed values as extensions."""
        match value:
            case str() | bytes():
                self._spend(len(value))
            case list() | tuple():
                self._spend(SCALAR_BYTES * len(value))
                return [self._plain(member) for member in value]
            case dict():
                self._spend(SCALAR_BYTES * len(value))
                return {self._plain(key): self._plain(field) for key, field in value.items()}
            case Struct():
                self._spend(len(value.__struct_fields__))
                fields = {name: self._plain(field) for name, field in _fields(value).items()}
                return Ext(STRUCT, _encode([self._kind(type(value)), fields]))
            case PackedText():
                self._spend(sum(map(len, value.parts)))
                return Ext(TEXT, _encode([value.parts, len(value)]))
        return value

    def _spend(self, room: int) -> None:
        self._room -= room
        if self._room < 0:
            raise _TooWide

    def _kind(self, kind: type) -> int:
        number = self._kinds.get(kind)
        if number is None:
            number = self._kinds[kind] = len(self._kinds)
            self._new.append(_encode(["c", number, name_of(kind)]))
        return number

    def _said(self) -> Iterator[bytes]:
        while self._new:
            yield self._new.pop(0)


class _TooWide(Exception):
    """The value does not fit in one piece."""


def _parts(kind: str, parts: Iterable[bytes], *facts: int) -> Iterator[bytes]:
    for part in parts:
        yield _encode(["b", part])
    yield _encode([kind, *facts])


def _fields(value: Struct) -> dict[str, Any]:
    """Return the set fields of a struct."""
    found = {name: getattr(value, name) for name in value.__struct_fields__}
    return {name: field for name, field in found.items() if field is not UNSET}


class Builder:
    """Builds one value from its pieces. Without `packs`, no text is packed."""

    def __init__(self, *, packs: bool = True) -> None:
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode
        self._packs = packs
        self._kinds: dict[int, type[Struct]] = {}
        self._parts: list[bytes] = []
        self._open: list[_Open] = [_Open([], list)]
        self._operations: dict[str, Callable[..., None]] = {
            "v": lambda value: self._open[-1].add(value),
            "m": lambda members: self._open[-1].content.extend(members),
            "i": lambda entries: self._open[-1].content.update(entries),
            "k": lambda key: setattr(self._open[-1], "key", key),
            "b": self._parts.append,
            "B": lambda: self._open[-1].add(b"".join(self._collected())),
            "T": lambda chars: self._open[-1].add(self._text(self._collected(), chars)),
            "[": lambda: self._open.append(_Open([], list)),
            "{": lambda: self._open.append(_Open({}, dict)),
            "c": self._say,
            "S": self._begin,
            "]": self._end,
            "e": _refuse,
        }

    def take(self, piece: bytes) -> None:
        """Add a piece. Raise the typed error if one was sent in place of a value."""
        operation, *arguments = self._decode(piece)
        self._operations[operation](*arguments)

    @property
    def value(self) -> Any:
        [value] = self._open[0].content
        return value

    def _say(self, number: int, name: str) -> None:
        kind = named(name)
        assert issubclass(kind, Struct), f"{name} is no struct"
        self._kinds[number] = kind

    def _begin(self, number: int) -> None:
        kind = self._kinds[number]
        self._open.append(_Open({}, lambda fields: kind(**fields)))

    def _end(self) -> None:
        done = self._open.pop()
        self._open[-1].add(done.close(done.content))

    def _collected(self) -> tuple[bytes, ...]:
        parts = tuple(self._parts)
        self._parts.clear()
        return parts

    def _extension(self, code: int, data: memoryview) -> Any:
        content = self._decode(data)
        if code == STRUCT:
            number, fields = content
            return self._kinds[number](**fields)
        parts, chars = content
        return self._text(tuple(parts), chars)

    def _text(self, parts: tuple[bytes, ...], chars: int) -> Any:
        text = PackedText(parts, chars)
        return text if self._packs and chars >= PACKED_CHARS else text.whole()


def _refuse(code: str, message: str, retry_after_s: float | None) -> None:
    error = from_code(code, message)
    error.retry_after_s = retry_after_s
    raise error


class _Open:
    """A list, dict or struct whose end has not arrived."""

    def __init__(self, content: Any, close: Callable[[Any], Any]) -> None:
        self.content, self.close = content, close
        self.key: Any = None

    def add(self, value: Any) -> None:
        if isinstance(self.content, list):
            self.content.append(value)
        else:
            self.content[self.key] = value
