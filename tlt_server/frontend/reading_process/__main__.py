"""Serves the lanes, each in a thread, until the server is gone: standard input has ended."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # The parent decides: on Ctrl-C it drains. Imports take a second or two.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import ctypes
import gc
import os
import socket
import sys
import threading
from functools import partial
from pathlib import Path

import msgspec

from tlt_server.frontend.dialects import DIALECTS
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.reading.frames import BlockingChannel
from tlt_server.frontend.reading_process.answers import Payload, answered, bound_memory
from tlt_server.frontend.reading_process.jobs import JOBS
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
    bound_memory(settings["memory_mb"] * 2**20)
    for number in arguments:
        channel = BlockingChannel(socket.socket(fileno=int(number)))
        threading.Thread(target=_serve, args=(channel, text), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)


def _serve(channel: BlockingChannel, text: Text) -> None:
    try:
        while True:
            name, *arguments = msgspec.msgpack.decode(channel.receive())
            payload = Payload(channel)
            channel.send(answered(partial(JOBS[name], text, payload, *arguments), payload))
            if payload.bytes > 2**20:
                gc.collect()
                _libc.malloc_trim(0)
    finally:
        os._exit(0)  # the server is gone, or the lane has failed and all of them start again


if __name__ == "__main__":
    main(sys.argv[1:])
