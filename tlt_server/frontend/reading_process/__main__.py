"""Serves the lanes, each in a thread, until standard input ends: the server is gone.

A job takes the text, the payload and the arguments of its request, and returns a value.
"""

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
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec

from tlt_server.frontend.dialects import DIALECTS
from tlt_server.frontend.generation.templates import for_template
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.reading.frames import BlockingChannel, named
from tlt_server.frontend.reading_process.answers import Payload, answered, bound_memory
from tlt_server.frontend.rpc import methods  # noqa: F401 (large messages name its function)
from tlt_server.grammars.compiler import Compiler
from tlt_server.grammars.forms import grammar_of
from tlt_server.wire.packed import PackedIds, PackedText
from tlt_server.wire.records import Grammar

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


def ready(text: Text, payload: Payload) -> None:
    """Answer, which shows the server that the process has started."""


def encode(text: Text, payload: Payload, lengths: list[int], special: bool) -> list[PackedIds]:
    """Return the token ids of each text. The payload is their concatenated UTF-8."""
    data = payload.joined()
    texts, at = [], 0
    for length in lengths:
        texts.append(data[at : at + length].decode())
        at += length
    del data
    return [*map(PackedIds.of, text.encode(texts, special=special))]


def decode(text: Text, payload: Payload, special: bool) -> PackedText:
    """Return the text of packed token ids."""
    ids = PackedIds(bytes(payload.joined()))
    assert text.tokenizer is not None
    # A batch of one, since only a batch lets the other lanes run meanwhile.
    [found] = text.tokenizer.decode_batch([ids.list()], skip_special_tokens=not special)
    return PackedText.of(found)


def render(
    text: Text, payload: Payload, open_end: bool = False, name: str | None = None
) -> PackedText:
    """Return the conversation in the chat template of this name, or the one that suits it."""
    messages, tools, options = payload.tree()
    messages = for_template(messages)
    return PackedText.of(text.render(messages, tools, options, open_end=open_end, name=name))


def parse(text: Text, payload: Payload, function: str, *arguments: Any) -> Any:
    """Return the result of one of our functions for a body."""
    return named(function)(payload.joined(), *arguments)


def grammar(
    text: Text, payload: Payload, form: str, vocab_size: int, eos_token_ids: list[int]
) -> Grammar:
    """Return the compiled grammar of a structure."""
    found = grammar_of(form, payload.joined().decode(), text.specials)
    _compiler(text.directory, vocab_size, tuple(eos_token_ids)).compile(found)
    return found


@lru_cache(1)
def _compiler(model: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Compiler:
    return Compiler(model, vocab_size, eos_token_ids)


JOBS: dict[str, Callable[..., Any]] = {
    "ready": ready,
    "encode": encode,
    "decode": decode,
    "render": render,
    "parse": parse,
    "grammar": grammar,
}


if __name__ == "__main__":
    main(sys.argv[1:])
