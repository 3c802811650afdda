"""Orders of rank 0 to the other ranks of its target: everything that a rank does not decide. Here
are those that a rank of any device follows; `cpu/orders.py` and `gpu/orders.py` have the others.

An order travels in an envelope with its number and the epoch that it belongs to, so one that is
lost, repeated or of another epoch is refused. Arrays travel as their bytes. `RankOrders` sends
them; it is `NO_RANKS` for a target that this process has alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, reduce
from operator import or_
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tlt_server.engine.settings import DecidedSettings, decode_decided
from tlt_server.errors import EngineFailed

AnyOrder = TypeVar("AnyOrder")
Array = np.ndarray[Any, Any]
DTYPES = ("<i4", "<i8")


class RankOrder(Struct, frozen=True, tag=True):
    """Base of all orders, each of which travels under the name of its class."""


class LoadShard(RankOrder, frozen=True):
    """Make a model on the memory that comes by the side channel under this key. `target`: the key
    of a drafter's target; 0: the model is a target.
    """

    key: int
    target: int = 0

    @property
    def waits(self) -> bool:
        """Return True if rank 0 waits until the model is made: it writes the drafter's initial
        vocabulary map.
        """
        return self.target > 0


class UnmapShard(RankOrder, frozen=True):
    """Let go of the memory of the model of this key, which is about to be freed."""

    key: int


class MapShard(RankOrder, frozen=True):
    """Let the model of this key lie in the memory that comes by the side channel."""

    key: int
    waits: ClassVar[bool] = True


class Drop(RankOrder, frozen=True):
    """Forget models and saved pages, by key."""

    models: list[int]
    saved: list[int]


class Allocate(RankOrder, frozen=True):
    """Compute with these models from now on, and make KV pages for sequences of up to
    `max_model_len` tokens. `drafter`: 0 where the rank has none.
    """

    target: int
    drafter: int
    pages: int
    max_model_len: int


class Save(RankOrder, frozen=True):
    """Copy pages under a key."""

    key: int
    pages: list[int]


class Restore(RankOrder, frozen=True):
    """Write the pages saved under a key into these pages."""

    key: int
    pages: list[int]


class FreePages(RankOrder, frozen=True):
    """Give the memory of pages back."""


class ReclaimPages(RankOrder, frozen=True):
    """Take it again."""


class Beat(RankOrder, frozen=True):
    """Answer."""


class Envelope(Struct, Generic[AnyOrder], frozen=True):
    epoch: str
    number: int  # counts from 1
    asks: bool  # whether an answer is awaited
    order: AnyOrder


class RankAnswer(Struct, frozen=True):
    rank: int
    number: int
    text: str = ""
    error: str = ""
    exhausted: str = ""  # the allocator's error; the rank can go on
    refused: str = ""  # the message of its `Unavailable`; the rank can go on


class RankStart(Struct, frozen=True):
    """The first line of a rank's standard input."""

    epoch: str
    rank: int
    ranks: int
    device: str
    directory: str
    settings: str  # JSON of the engine's, but for the device
    max_position: int
    threads: int

    @property
    def decided(self) -> DecidedSettings:
        return replace(decode_decided(self.settings), device=self.device)  # type: ignore[arg-type]


def encoded(envelope: Envelope[Any]) -> bytes:
    return msgspec.msgpack.encode(envelope, enc_hook=_packed)


def decoded(data: bytes, epoch: str, number: int) -> Envelope[Any]:
    """Return the envelope. `EngineFailed` unless it is the one with this number, of this epoch."""
    envelope = _decoder(tuple(RankOrder.__subclasses__())).decode(data)
    if envelope.epoch != epoch:
        raise EngineFailed(f"an order of the epoch {envelope.epoch!r} came in the epoch {epoch!r}")
    if envelope.number != number:
        what = "was lost" if envelope.number > number else "came again"
        raise EngineFailed(f"order {envelope.number} came where order {number} was due: one {what}")
    return envelope


@cache
def _decoder(kinds: tuple[type[RankOrder], ...]) -> msgspec.msgpack.Decoder[Envelope[Any]]:
    return msgspec.msgpack.Decoder(Envelope[reduce(or_, kinds)], dec_hook=_unpacked)  # type: ignore[misc, arg-type]


def _packed(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(type(array))
    return array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes()


def _unpacked(kind: type, packed: Any) -> NDArray[Any]:
    name, shape, data = packed
    if name not in DTYPES:
        raise ValueError(f"an order has an array of {name!r}; use {' or '.join(DTYPES)}")
    return np.frombuffer(bytearray(data), name).reshape(shape)


Copiers = tuple[Callable[[list[int]], object], Callable[[Any, list[int]], None]]


class RankOrders:
    """Everything that rank 0 tells the other ranks, and their state: here, of a target that this
    process has alone. `ranks.Ranks` has others.
    """

    @property
    def pids(self) -> list[int]:
        return []

    def order(self, order: RankOrder, *, wait: bool = False) -> None:
        """Send an order. `wait`: until all have followed it; `EngineFailed` where one could not,
        `torch.OutOfMemoryError` where it had no room.
        """

    def ask(self, order: RankOrder) -> list[str]:
        """Send an order, and return the answers of all ranks. Errors as of `order`."""
        return []

    def begin(self, order: RankOrder) -> None:
        """Send an order whose answers are awaited later, by `done` or `finish`."""

    def done(self) -> bool:
        """Return True once all ranks have followed the begun order; does not wait. `Unavailable` if
        a rank could not follow it.
        """
        return True

    def finish(self) -> None:
        """Wait until all ranks have followed the begun order, with the errors of `order`."""

    def confirm(self) -> None:
        """Wait until all have followed every order so far, with the errors of `order`."""

    def check(self) -> None:
        """`EngineFailed` where a rank has ended, or is silent."""

    def ready(self) -> None:
        """Wait less from now on: all have warmed up, and compile nothing more."""

    def copiers(self, *own: *Copiers) -> Copiers:
        """Return what saves and restores pages on all ranks, from what does on this one."""
        return own


NO_RANKS = RankOrders()
