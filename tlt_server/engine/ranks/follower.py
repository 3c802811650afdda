"""The loop of a worker rank: computes its shard on rank 0's orders. It has no scheduler and no
policy. The device's half creates the objects and executes the orders.

`rank.py` starts it, with a `RankStart` on its standard input, and ends it with rank 0. A failed
order is answered if rank 0 expects an answer; else it ends this process, and so does a failed
exchange. Nothing waits longer than an exchange's limit.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn, Protocol

import msgspec
import torch
import zmq
from msgspec import structs

from tlt_server.engine.ranks.memory import Handlers
from tlt_server.engine.ranks.orders import RankAnswer, RankOrder, RankStart, decoded
from tlt_server.errors import EngineFailed, TltError, Unavailable
from tlt_server.process.faults import trace
from tlt_server.registry import Registry

Socket = zmq.Socket[bytes]


class RankHalf(Protocol):
    handlers: Handlers  # grows, as an order makes what later ones need


FOLLOWING = Registry(
    "kind of rank",
    {
        "cpu": "tlt_server.engine.cpu.rank:CpuRank",
        "cuda": "tlt_server.engine.gpu.rank:GpuRank",
        "interpreter": "tlt_server.engine.gpu.rank:GpuRank",
    },
)
# The field of an answer that tells of an error; the first kind that fits counts.
ANSWERS: dict[type[Exception], str] = {
    torch.OutOfMemoryError: "exhausted",
    Unavailable: "refused",
    TltError: "error",
}


@torch.inference_mode()
def execute(rank: RankHalf, order: RankOrder) -> str:
    """Execute an order and return the text of its answer."""
    handler = rank.handlers.get(type(order))
    if handler is None:
        raise EngineFailed(f"{type(order).__name__} came before the objects that it needs")
    return handler(order) or ""


def serve(start: RankStart, side: socket.socket, inbox: Socket, outbox: Socket) -> NoReturn:
    """Execute orders. `EngineFailed` if an order without an answer fails."""
    number, here = 0, msgspec.msgpack.encode(RankAnswer(start.rank, 0))
    outbox.send(here)
    rank: RankHalf = FOLLOWING.resolve(start.device)(start, side)
    outbox.send(here)
    while True:
        number += 1
        envelope = decoded(inbox.recv(), start.epoch, number)
        answer = RankAnswer(start.rank, number)
        try:
            answer = structs.replace(answer, text=execute(rank, envelope.order))
        except (torch.OutOfMemoryError, TltError) as cause:
            why = cause.message if isinstance(cause, TltError) else str(cause)[:200]
            if not envelope.asks:
                order = type(envelope.order).__name__
                raise EngineFailed(f"order {number} ({order}): {why}") from None
            field = next(name for kind, name in ANSWERS.items() if isinstance(cause, kind))
            answer = structs.replace(answer, **{field: why})
        if envelope.asks:
            outbox.send(msgspec.msgpack.encode(answer))


def follow(descriptor: int) -> NoReturn:
    """Run the rank that standard input describes. `descriptor`: of the socket that brings
    memory.
    """
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankStart)
    torch.set_num_threads(start.threads)
    side, context = socket.socket(fileno=descriptor), zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(f"ipc://{start.directory}/{start.rank}")
    outbox.connect(f"ipc://{start.directory}/0")
    try:
        serve(start, side, inbox, outbox)
    except TltError as error:
        print(f"tlt: rank {start.rank}: {error.message}", file=sys.stderr)
        status = 2
    except Exception as error:
        print(trace(error, ready=True), file=sys.stderr)
        status = 1
    sys.stderr.flush()
    os._exit(status)  # without gloo's destructor, which may wait for a peer
