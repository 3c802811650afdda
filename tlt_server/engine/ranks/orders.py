"""Orders of rank 0 to the worker ranks: everything that a worker does not decide. These are the
orders for any device; `cpu/orders.py` and `gpu/orders.py` have the others.

An order travels in an envelope with its number and epoch, so a lost or repeated order, or one of
another epoch, is refused. Arrays travel as bytes. `RankOrders` sends orders; `NO_RANKS` is its
instance for a target in one process.
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
    """Base of all orders. An order travels under its class's name."""


class LoadShard(RankOrder, frozen=True):
    """Build a model on the memory that the side channel brings under this key. `target`: the key of
    a drafter's target; 0: the model is a target.
    """

    key: int
    target: int = 0

    @property
    def waits(self) -> bool:
        """Return True if rank 0 waits for the model, because the rank writes the drafter's initial
        vocabulary map.
        """
        return self.target > 0


class UnmapShard(RankOrder, frozen=True):
    """Unmap the memory of this model, which is about to be freed."""

    key: int


class MapShard(RankOrder, frozen=True):
    """Move this model to the memory that the side channel brings."""

    key: int
    waits: ClassVar[bool] = True


class Drop(RankOrder, frozen=True):
    """Drop models and saved pages, by key."""

    models: list[int]
    saved: list[int]


class Allocate(RankOrder, frozen=True):
    """Compute with these models from now on, and allocate KV pages for sequences of up to
    `max_model_len` tokens. `drafter`: 0 if the rank has none.
    """

    target: int
    drafter: int
    pages: int
    max_model_len: int


class Save(RankOrder, frozen=True):
    """Save pages under a key."""

    key: int
    pages: list[int]


class Restore(RankOrder, frozen=True):
    """Write the pages saved under a key into these pages."""

    key: int
    pages: list[int]


class FreePages(RankOrder, frozen=True):
    """Free the pages' memory."""


class ReclaimPages(RankOrder, frozen=True):
    """Allocate the pages' memory again."""


class Beat(RankOrder, frozen=True):
    """Answer: a sign of life."""


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
    threads: int

    @property
    def decided(self) -> DecidedSettings:
        return replace(decode_decided(self.settings), device=self.device)  # type: ignore[arg-type]


def encoded(envelope: Envelope[Any]) -> bytes:
    return msgspec.msgpack.encode(envelope, enc_hook=_packed)


def decoded(data: bytes, epoch: str, number: int) -> Envelope[Any]:
    """Return the envelope. `EngineFailed` unless it has this number and epoch."""
    envelope = _decoder(tuple(RankOrder.__subclasses__())).decode(data)
    if envelope.epoch != epoch:
        raise EngineFailed(f"an order of epoch {envelope.epoch!r} came in epoch {epoch!r}")
    if envelope.number != number:
        what = "was lost" if envelope.number > number else "came again"
        raise EngineFailed(f"order {envelope.number} came instead of order {number}: one {what}")
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
    """Orders to the worker ranks, and their state. This base class is for a target in one process;
    `ranks.Ranks` has workers.
    """

    @property
    def pids(self) -> list[int]:
        return []

    def order(self, order: RankOrder, *, wait: bool = False) -> None:
        """Send an order. `wait`: until all ranks have executed it. `EngineFailed` if one could not,
        `torch.OutOfMemoryError` if one was out of memory.
        """

    def ask(self, order: RankOrder) -> list[str]:
        """Send an order and return the answers of all ranks. Raises as `order` does."""
        return []

    def begin(self, order: RankOrder) -> None:
        """Send an order whose answers `done` or `finish` will await."""

    def done(self) -> bool:
        """Return True once all ranks have executed the begun order; does not wait. `Unavailable` if
        a rank could not execute it.
        """
        return True

    def finish(self) -> None:
        """Wait until all ranks have executed the begun order. Raises as `order` does."""

    def confirm(self) -> None:
        """Wait until all ranks have executed every order sent so far. Raises as `order` does."""

    def check(self) -> None:
        """Raise `EngineFailed` if a rank has died or is silent."""

    def ready(self) -> None:
        """Shorten the waits: all ranks are warm and compile nothing more."""

    def copiers(self, *own: *Copiers) -> Copiers:
        """Return copiers that save and restore pages on all ranks; `own`: those of this rank."""
        return own


NO_RANKS = RankOrders()
