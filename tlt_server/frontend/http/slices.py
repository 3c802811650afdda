"""Large contents in slices, and the turns of keys for that work, so that other requests run in
between.

JSON is encoded one bounded part at a time. Content may contain packed ids and texts, and iterators
in place of lists, whose parts are created as they are encoded.

Each pass of the event loop has a share for reading outputs and encoding replies, divided by key. A
task asks before each slice of such work. A slice that does not fit in one pass waits for the next
ones, in turns by key, so one key with many streams cannot take the loop from another. Probes and
small requests never ask, and wait for one pass at most. `watch_turns` samples how long a pass holds
the loop: while it computes, nothing is answered, probes included.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import msgspec
from msgspec import UNSET, Struct

from tlt_server.metrics import Metrics
from tlt_server.process.turns import Turns
from tlt_server.wire.packed import PackedIds, PackedText, json_ids, json_text
from tlt_server.wire.records import TokenLogprobs

SLICE_BYTES = 32 * 1024  # about 1 ms of encoding on a slow core
CALL_VALUES = 2048  # numbers, at most, that one call of the encoder takes
FEW = 64  # numbers that are looked at in no time
SMALL_VALUES = 4096  # those of a content that takes one call in all: 1 ms on a slow core
NUMBERS = frozenset((int, float, bool, type(None)))


class KnownWeight:
    """Content that knows its number of `values`, which takes longer to count than to encode."""

    __slots__ = ()

    def weight(self) -> float:
        raise NotImplementedError


def json_slices(content: Any, *, head: bytes = b"", tail: bytes = b"") -> Iterator[bytes]:
    """Yield the JSON of a content between `head` and `tail`, the same bytes as in one piece. All
    slices but the last have at least `SLICE_BYTES`. Small content is one slice, made in one call,
    and no small member is cut.
    """
    if values(content, SMALL_VALUES) <= SMALL_VALUES:
        yield head + msgspec.json.encode(content) + tail
        return
    parts: list[bytes] = []
    size = 0
    for part in chain((head,), _parts(content), (tail,)):
        parts.append(part)
        size += len(part)
        if size >= SLICE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def _parts(content: Any) -> Iterator[bytes]:
    if values(content) <= CALL_VALUES:
        yield msgspec.json.encode(content)
    elif isinstance(content, str | PackedText):
        yield from json_text(content)
    elif isinstance(content, PackedIds):
        yield from json_ids(content)
    elif isinstance(content, dict | Struct):
        yield from _object(members(content))
    else:
        yield from _array(content)


def _object(members: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    start = b"{"
    for name, value in members:
        yield start + msgspec.json.encode(name) + b":"
        yield from _parts(value)
        start = b","
    yield b"}" if start == b"," else b"{}"


def _array(members: Iterable[Any]) -> Iterator[bytes]:
    """Encode small members together, and large ones in parts."""
    start = b"["
    for few in grouped(members):
        if len(few) == 1:
            yield start
            yield from _parts(few[0])
        else:
            yield start + msgspec.json.encode(few)[1:-1]
        start = b","
    yield b"]" if start == b"," else b"[]"


def grouped(members: Iterable[Any]) -> Iterator[list[Any]]:
    """Group members into lists of at most `CALL_VALUES` values, or of a single member."""
    if isinstance(members, list) and are_numbers(members[:CALL_VALUES]):
        for start in range(0, len(members), CALL_VALUES):
            yield members[start : start + CALL_VALUES]
        return
    few: list[Any] = []
    held = 0.0
    for member in members:
        size = _cheap(member) or values(member)
        if few and held + size > CALL_VALUES:
            yield few
            few, held = [], 0.0
        few.append(member)
        held += size
    if few:
        yield few


def members(content: dict[str, Any] | Struct) -> Iterable[tuple[str, Any]]:
    """Return the members that msgspec would encode, by name."""
    return content.items() if isinstance(content, dict) else _fields(content)


def _fields(content: Struct) -> Iterator[tuple[str, Any]]:
    config = content.__struct_config__
    assert not config.array_like and not config.omit_defaults and config.tag is None
    for field, name in zip(
        content.__struct_fields__, content.__struct_encode_fields__, strict=True
    ):
        value = getattr(content, field)
        if value is not UNSET:
            yield name, value


def values(content: Any, limit: float = CALL_VALUES) -> float:
    """Return the number of numbers that take about as long to encode as this content. Counting
    stops above `limit`, so larger content takes no longer.
    """
    if size := _cheap(content):
        return size
    if isinstance(content, TokenLogprobs):
        return 2 * len(content.token_ids)
    if isinstance(content, list | tuple):
        if len(content) > limit or are_numbers(content):
            return 1 + len(content)
        return _summed(content, limit)
    if isinstance(content, dict):
        if len(content) > limit or are_numbers(content.values()):
            return 1 + 2 * len(content)
        return _summed(content.values(), limit)
    if isinstance(content, PackedIds | PackedText) or hasattr(content, "__next__"):
        return math.inf  # the encoder does not know it
    if isinstance(content, KnownWeight):
        return content.weight()
    if isinstance(content, Struct):
        return _summed([getattr(content, field) for field in content.__struct_fields__], limit)
    return 1


def _summed(held: Iterable[Any], limit: float) -> float:
    count = 1.0
    for member in held:
        count += _cheap(member) or values(member, limit - count)
        if count > limit:
            break
    return count


def _cheap(content: Any) -> int:
    """Return the number of values without members or with a few numbers; 0 for anything else."""
    kind = type(content)
    if kind in NUMBERS:
        return 1
    if kind is str:
        return 1 + len(content) // 16
    if kind is dict and len(content) < FEW and are_numbers(content.values()):
        return 1 + 2 * len(content)
    return 0


def are_numbers(content: Collection[Any]) -> bool:
    """Return True if a collection has only numbers and nulls."""
    return len(content) > 0 and NUMBERS.issuperset(map(type, content))


# About 2 ms of work on a slow core. More would show in the latency of small requests, which take
# some 15 passes; less would cost passes, of 0.05 ms each.
PASS_BYTES = 64 * 1024

FREED = 128  # members of a list that are freed at once, in about 1 ms on a slow core

Turn = Callable[[int], Awaitable[None]]  # LoopShare.turn for one owner
EVERY_S = 0.005


async def emptied(members: list[Any], turn: Turn) -> None:
    """Empty a list a few members at a time. Freeing the outputs of thousands of sequences at once
    would hold the loop for 30 ms.
    """
    while members:
        del members[-FREED:]
        await turn(PASS_BYTES // 2)


class LoopShare:
    def __init__(self) -> None:
        self._turns = Turns(PASS_BYTES)
        self._lines: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # by owner
        self._room = PASS_BYTES  # bytes that may still be worked on in this pass
        self._renewing = False

    def of(self, owner: str) -> Turn:
        return partial(self.turn, owner)

    async def turn(self, owner: str, size: int) -> None:
        """Wait until a slice of work may run. `owner`: name of the key. `size`: bytes of JSON; a
        size above `PASS_BYTES` counts as that, since such a slice is already encoded and only
        copied.
        """
        size = min(size, PASS_BYTES)
        if self._room > 0 and not self._lines:
            self._spend(size)
            return
        granted = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append((granted, size))
        self._turns.wait(owner)
        await granted

    def _spend(self, size: int) -> None:
        self._room -= size
        if not self._renewing:
            self._renewing = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Start a pass, and grant the work that fits in it."""
        self._renewing = False
        self._room = PASS_BYTES
        while self._room > 0 and self._lines:
            owner = next(self._turns.order())
            line = self._lines[owner]
            granted, size = line.popleft()
            if not granted.done():  # else the task that waited is cancelled
                granted.set_result(None)
                self._turns.charge(owner, size)
                self._spend(size)
            if not line:
                del self._lines[owner]
                self._turns.leave(owner)


async def watch_turns(metrics: Metrics) -> NoReturn:
    """Sample for ever how late a timer is. A hold shorter than the interval may be missed, and the
    measured time of a longer one is too short by up to an interval.
    """
    longest_s = 0.0
    while True:
        due_s = time.perf_counter() + EVERY_S
        await asyncio.sleep(EVERY_S)
        held_s = max(0.0, time.perf_counter() - due_s)
        metrics.exchanges.loop_held_s.observe(held_s)
        if held_s > longest_s:
            longest_s = held_s
            metrics.exchanges.loop_held_longest_s.set(held_s)
