"""The process that runs templates of requests: `python -m ...reading_process.templates FD`.

It receives one socket per template over FD. Each is served by a fork of this process, which has
limits on memory and time, may open no file, and ends with its answer. So a template can neither
harm nor observe another.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # The parent decides: on Ctrl-C it drains. Imports take a second.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import contextlib
import ctypes
import gc
import os
import resource
import socket
import sys
import unicodedata  # noqa: F401 (texts in templates may name characters)
from functools import partial
from pathlib import Path

import msgspec

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.openai import messages  # noqa: F401 (messages that come in)
from tlt_server.frontend.generation.templates import ChatTemplate, check_length, for_template
from tlt_server.frontend.reading.frames import BlockingChannel
from tlt_server.frontend.reading.renderer import MEMORY_MB, PROCESSOR_S, READ_BYTES_S
from tlt_server.frontend.reading_process.answers import Payload, answered, bound_memory
from tlt_server.wire.packed import PackedText

NICENESS = 7  # as the reading process
# Templates that use what is loaded or made at its first use, a failure among it.
WARM = (
    r"{{ '\u00e9%s{}'.format(messages | tojson(indent=1)) | upper }}{{ strftime_now('%d') }}",
    "{{ raise_exception('no') }}",
    "{{",
)
PR_SET_PDEATHSIG = 1


def main(number: str) -> None:
    os.nice(NICENESS)
    for template in WARM:
        with contextlib.suppress(InvalidRequest):
            ChatTemplate.brought(template, {}).render([{"role": "user", "content": "hi"}])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so forks leave nothing when they end
    gc.freeze()
    control = socket.socket(fileno=int(number))
    while True:
        data, sides, *_ = socket.recv_fds(control, 1, 1)
        if not data:  # the server is gone
            return
        for side in sides:
            with contextlib.suppress(OSError):  # no fork: the socket ends without a word
                if os.fork() == 0:
                    control.close()
                    _serve(side)
            os.close(side)


def _serve(side: int) -> None:
    """Run one template, and end."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        channel = BlockingChannel(socket.socket(fileno=side))
        channel.send([msgspec.msgpack.encode(os.getpid())])
        [size] = msgspec.msgpack.decode(channel.receive())
        payload = Payload(channel)
        memory = MEMORY_MB * 2**20 + 16 * size
        _limit(memory, PROCESSOR_S + size // READ_BYTES_S)
        channel.send(answered(partial(_render, payload), payload))
    finally:
        os._exit(0)


def _limit(memory: int, processor_s: int) -> None:
    bound_memory(memory)
    resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s))
    for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
        resource.setrlimit(what, (0, 0))


def _render(payload: Payload) -> PackedText:
    given, tools, options, source, tokens, open_end = payload.tree()
    said = for_template(given)
    try:
        template = ChatTemplate.brought(source, tokens)
        text = template.render(said, tools, options, open_end=open_end)
        check_length("chat_template", text)
        return PackedText.of(text)
    except MemoryError:
        raise InvalidRequest(
            f"chat_template needs more than {MEMORY_MB} MiB of memory: simplify it"
        ) from None
    except UnicodeEncodeError:
        raise InvalidRequest(
            "chat_template makes a text with half a character; write a whole one"
        ) from None


if __name__ == "__main__":
    main(sys.argv[1])
