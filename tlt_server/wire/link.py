"""Records of a link, by which a gateway of a fleet uses a server's engine from another host.

One gRPC stream of bytes in both directions carries them as msgpack: a command in each message, or a
list of events. They are those of an engine, except that a gateway attaches first and a server says
last why it ends the stream, as it does when its engine dies. A status would be lost if a command
crossed it. Clocks of two hosts differ, so deadlines cross as seconds left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from tlt_server.wire.commands import (
    Abort,
    ControlCommand,
    Recompute,
    SetPolicy,
    Submit,
    WeightCommand,
)
from tlt_server.wire.events import (
    ControlReport,
    Ending,
    Outputs,
    Phase,
    PhaseProgress,
    Ready,
    WeightReport,
)
from tlt_server.wire.records import GenerateRequest, encode

METHOD = "/tlt.Link/Stream"
PING_S = 1.0  # from one ping of a gateway to the next
PART_BYTES = 2**22  # requests or outputs share a message up to this size
SPARE_BYTES = 2**26  # for an event without log-probs: 2**16 ids of 1 kB
POSITION_BYTES, ALTERNATIVE_BYTES = 48, 14  # log-probs of a position, and of each alternative


class Attach(Struct, frozen=True, kw_only=True, tag="attach"):
    """The first command of a stream. Others may follow once the server has sent `Ready`."""

    fleet: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]  # id of the state directory
    epoch: Annotated[int, Meta(ge=1, le=2**53)]  # grows with each start of the gateway
    gateway: Annotated[str, Meta(max_length=256)] = ""  # its address, for people
    take_over: bool = False  # also from a living gateway of another fleet


class Ping(Struct, frozen=True, tag="ping"):
    """A sign of life of a gateway, which the server returns."""


class Attached(Struct, frozen=True, tag="attached"):
    """The gateway has the server; `Ready` follows as soon as there is an engine."""

    epoch: int
    url: Annotated[str, Meta(max_length=256, pattern=r"^\S+\Z")]  # the server's own, for its peers


class Ended(Struct, frozen=True, tag="ended"):
    """The last event: the server refuses or ends the stream, or its engine has died."""

    code: str
    message: str
    ending: Ending = "exited"
    started: list[str] = []  # at a death: ids of the sequences that ran, and `OTHERS`
    restart_in_s: float | None = 0.0  # None: never
    start_s: float = 0.0  # time that a start took before

    @classmethod
    def of(cls, error: Any) -> Ended:
        """`error`: a `TltError`."""
        return cls(error.code, error.message)


LinkCommand = (
    Attach | Ping | Submit | Abort | SetPolicy | Recompute | ControlCommand | WeightCommand
)
LinkEvent = (
    Attached | Ping | Ended | Ready | Phase | PhaseProgress | Outputs | WeightReport | ControlReport
)
# Both raise `msgspec.DecodeError` for bytes that are malformed or of another type.
decode_link_command = msgspec.msgpack.Decoder(LinkCommand).decode
decode_link_events = msgspec.msgpack.Decoder(list[LinkEvent]).decode


def command_messages(command: LinkCommand, now_s: float) -> Iterator[bytes]:
    """Yield the messages of a command: one, or for a large batch several smaller batches."""
    if not isinstance(command, Submit):
        yield encode(command)
        return
    for requests in _parts(shifted(request, -now_s) for request in command.requests):
        yield encode(Submit(requests))


def event_messages(events: Iterable[LinkEvent]) -> Iterator[bytes]:
    """Yield the messages of events, which share one up to `PART_BYTES`."""
    for part in _parts(piece for event in events for piece in _pieces(event)):
        yield encode(part)


def _pieces(event: LinkEvent) -> Iterator[LinkEvent]:
    """Yield the event, or large outputs as several. The last has the cycle."""
    if not isinstance(event, Outputs):
        yield event
        return
    *first, last = _parts(event.outputs)
    for outputs in first:
        yield Outputs(outputs, event.gauges)
    yield msgspec.structs.replace(event, outputs=last)


def largest_event(tokens: int, alternatives: int) -> int:
    """Return the most bytes of an event: the log-probs of a prompt of these tokens, with this
    number of alternatives at each.
    """
    return SPARE_BYTES + tokens * (POSITION_BYTES + ALTERNATIVE_BYTES * (1 + alternatives))


def _parts(members: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield encoded members in lists of at most `PART_BYTES`, or one member; at least one list."""
    part: list[Raw] = []
    size = 0
    for member in members:
        data = encode(member)
        if part and size + len(data) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(Raw(data))
        size += len(data)
    yield part


def shifted(request: GenerateRequest, by_s: float) -> GenerateRequest:
    """Return the request with its deadlines moved, at least to 0. Before a link `by_s` is less this
    host's monotonic clock, which leaves seconds; after it the clock of the other host.
    """
    times = {name: getattr(request, name) for name in ("deadline_s", "begin_by_s")}
    moved = {name: max(0.0, at + by_s) for name, at in times.items() if at is not None}
    return msgspec.structs.replace(request, **moved) if moved else request
