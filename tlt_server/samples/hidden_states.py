"""Features and last hidden states of one finished sequence, as bytes.

A trainer finds them by the sequence's tokens and the weight version: in strict numerics every other
sequence with the same tokens has the same bits. The last token has no states, since nothing was
computed after it. Numbers have the engine's dtype: float32 on a CPU, bfloat16 on a GPU.

Legend: T tokens with states, F feature width, H hidden.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec
import xxhash
from msgspec import Meta, Struct

from tlt_server.samples.ring import Buffer
from tlt_server.samples.sample import Count, Name

KEY_BYTES = 16
BFLOAT16: Literal[2] = 2  # bytes of a number
FLOAT32: Literal[4] = 4
EMPTY = msgspec.msgpack.encode(b"")
BIN32 = struct.Struct(">BI")  # msgpack has a type and a length before long bytes
BEYOND = 8192  # bytes of an entry next to its states, at most


class Captured(Struct, frozen=True, array_like=True, kw_only=True):
    version: Name  # weight version that computed all of it
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]  # see `key_of`
    length: Count  # T
    item: Literal[2, 4]  # BFLOAT16 or FLOAT32
    feature_width: Annotated[int, Meta(ge=1, le=2**24)]
    hidden_width: Annotated[int, Meta(ge=1, le=2**24)]
    features: bytes  # [T, F]
    hidden: bytes  # [T, H], after the final norm


def key_of(tokens: bytes) -> bytes:
    """Return the key of a sequence from its int32 tokens, prompt and output."""
    return xxhash.xxh3_128_digest(tokens)


def state_bytes(feature_width: int, hidden_width: int, item: int) -> int:
    """Return the bytes of one token's states."""
    return item * (feature_width + hidden_width)


def captured_parts(captured: Captured, features: Buffer, hidden: Buffer) -> list[Buffer]:
    """Return the bytes of `captured` with these states added, without copying them."""
    assert not captured.features and not captured.hidden
    # Its last two fields are empty: each is a type and a length of 0.
    before = msgspec.msgpack.encode(captured)[: -2 * len(EMPTY)]
    parts: list[Buffer] = [before]
    for states in (features, hidden):
        parts += [BIN32.pack(0xC6, memoryview(states).nbytes), states]
    return parts


_CAPTURED = msgspec.msgpack.Decoder(Captured)


def decode_captured(data: bytes) -> Captured:
    """Parse the states. `ValueError` with both values if the sizes do not match."""
    captured = _CAPTURED.decode(data)
    for name, width in (("features", captured.feature_width), ("hidden", captured.hidden_width)):
        found, expected = len(getattr(captured, name)), captured.item * captured.length * width
        if found != expected:
            raise ValueError(
                f"{name} has {found} bytes, {captured.length} tokens of width {width} {expected}"
            )
    return captured
