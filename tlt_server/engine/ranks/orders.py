"""Orders of rank 0 to the other ranks of its target: everything that a rank does not decide.

An order travels in an envelope with its number and the epoch that it belongs to, so one that is
lost, repeated or of another epoch is refused. Arrays travel as their bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
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


class ExtendRows(Struct, frozen=True, tag="extend"):
    """Extend sequences by the rows of a step (`attention.rows.Rows`), and take part in their
    logits: those of `sampled_R`, then of each range of rows.
    """

    token_R: Array
    position_R: Array
    kv_slot_R: Array
    request_R: Array
    base_B: Array
    page_table_BP: Array
    path_RD: Array
    sampled_R: Array
    scored: list[tuple[int, int]]


class Keep(Struct, frozen=True, tag="keep"):
    """Copy the KV of accepted draft rows."""

    source_A: Array
    target_A: Array


class LoadShard(Struct, frozen=True, tag="load"):
    """Make a model on the memory that comes by the side channel under this key. `target`: the key
    of a drafter's target; 0: the model is a target.
    """

    key: int
    target: int = 0

    @property
    def waits(self) -> bool:
        """Return True if rank 0 waits until the model is made: it writes what a drafter begins
        with, its vocabulary map.
        """
        return self.target > 0


class UnmapShard(Struct, frozen=True, tag="unmap"):
    """Let go of the memory of the model of this key, which is about to be freed."""

    key: int


class MapShard(Struct, frozen=True, tag="map"):
    """Let the model of this key lie in the memory that comes by the side channel."""

    key: int
    waits: ClassVar[bool] = True


class CheckNumerics(Struct, frozen=True, tag="check"):
    """Test the numerics on the model of this key, and answer with the method of matmuls."""

    key: int


class Install(Struct, frozen=True, tag="install"):
    """Compute with the target, or draft with the drafter, of this key from the next step on."""

    key: int


class Drop(Struct, frozen=True, tag="drop"):
    """Forget models and saved pages, by key."""

    models: list[int]
    saved: list[int]


class Allocate(Struct, frozen=True, tag="allocate"):
    """Make KV pages for sequences of up to `max_model_len` tokens."""

    pages: int
    max_model_len: int


class Save(Struct, frozen=True, tag="save"):
    """Copy pages under a key."""

    key: int
    pages: list[int]


class Restore(Struct, frozen=True, tag="restore"):
    """Write what was saved under a key into these pages."""

    key: int
    pages: list[int]


class FreePages(Struct, frozen=True, tag="sleep"):
    """Give the memory of pages back."""


class ReclaimPages(Struct, frozen=True, tag="wake"):
    """Take it again."""


class Beat(Struct, frozen=True, tag="beat"):
    """Answer."""


# Orders that every kind of rank follows alike.
MemoryOrder = (
    LoadShard | UnmapShard | MapShard | Drop | Save | Restore | FreePages | ReclaimPages | Beat
)
Order = ExtendRows | Keep | CheckNumerics | Install | Allocate | MemoryOrder


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


def decoded(data: bytes, epoch: str, number: int, kind: Any = Order) -> Envelope[Any]:
    """Return the envelope. `EngineFailed` unless it is the one with this number, of this epoch.
    `kind`: the orders that the rank follows.
    """
    envelope = _decoder(kind).decode(data)
    if envelope.epoch != epoch:
        raise EngineFailed(f"an order of the epoch {envelope.epoch!r} came in the epoch {epoch!r}")
    if envelope.number != number:
        what = "was lost" if envelope.number > number else "came again"
        raise EngineFailed(f"order {envelope.number} came where order {number} was due: one {what}")
    return envelope


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Envelope[Any]]:
    return msgspec.msgpack.Decoder(Envelope[kind], dec_hook=_unpacked)


def _packed(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(type(array))
    return array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes()


def _unpacked(kind: type, packed: Any) -> NDArray[Any]:
    name, shape, data = packed
    if name not in DTYPES:
        raise ValueError(f"an order has an array of {name!r}; use {' or '.join(DTYPES)}")
    return np.frombuffer(bytearray(data), name).reshape(shape)
