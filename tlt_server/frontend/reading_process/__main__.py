"""Serves the lanes, each in a thread, until the server is gone: standard input has ended."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # The parent decides: on Ctrl-C it drains. Imports take a second or two.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import ctypes
import gc
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tlt_server.errors import TltError, TooLarge
from tlt_server.frontend.dialects import DIALECTS
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.reading.frames import BlockingChannel
from tlt_server.frontend.reading.trees import cut
from tlt_server.frontend.reading_process.jobs import JOBS, Payload
from tlt_server.frontend.rpc import methods  # noqa: F401 (large messages name its function)

NICENESS = 7  # the engine's is lower, so it goes first
_libc = ctypes.CDLL(None)


def main(arguments: list[str]) -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.readline())
    os.nice(NICENESS)
    text = Text.load(Path(settings["model"]))
    for dialect in DIALECTS:  # with every type of a body
        DIALECTS.resolve(dialect)
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)  # a parsed body has many objects and no cycles
    _bound_memory(settings["memory_mb"])
    for number in arguments:
        channel = BlockingChannel(socket.socket(fileno=int(number)))
        threading.Thread(target=_serve, args=(channel, text), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)


def _bound_memory(memory_mb: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _serve(channel: BlockingChannel, text: Text) -> None:
    try:
        while True:
            name, *arguments = msgspec.msgpack.decode(channel.receive())
            payload = Payload(channel)
            channel.send(_answer(name, arguments, payload, text))
            if payload.bytes > 2**20:
                gc.collect()
                _libc.malloc_trim(0)
    finally:
        os._exit(0)  # the server is gone, or the lane has failed and all of them start again


def _answer(name: str, arguments: list[Any], payload: Payload, text: Text) -> Iterator[bytes]:
    """Yield the pieces of the job's value, or of its error, after the whole payload was read."""
    try:
        try:
            yield from cut(JOBS[name](text, payload, *arguments))
        finally:
            payload.skip()
    except TltError as error:
        yield _refusal(error)
    except MemoryError:
        yield _refusal(
            TooLarge(
                "the request needs more memory than the reading process may use; send it in "
                "smaller parts"
            )
        )
    except Exception as error:  # a bug of ours; its message may quote a prompt
        yield _refusal(TltError(f"unexpected {type(error).__name__} in the reading process"))


def _refusal(error: TltError) -> bytes:
    return msgspec.msgpack.encode(["e", error.code, error.message, error.retry_after_s])


if __name__ == "__main__":
    main(sys.argv[1:])
