"""A request to a reading process, and its answer in frames: the pieces of a value, or an error."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tlt_server.errors import TltError, TooLarge
from tlt_server.frontend.reading.frames import BlockingChannel, Builder, cut


class Payload:
    """The frames after a request's header."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._frames, self.bytes = channel.message(), 0

    def __iter__(self) -> Iterator[bytes]:
        for frame in self._frames:
            self.bytes += len(frame)
            yield frame

    def joined(self) -> bytearray:
        data = bytearray()
        for frame in self:
            data += frame
        return data

    def tree(self) -> Any:
        """Return a value that was sent in pieces, without packed values."""
        builder = Builder(packs=False)
        for frame in self:
            builder.take(frame)
        return builder.value

    def skip(self) -> None:
        for _ in self:
            pass


def answered(work: Callable[[], Any], payload: Payload) -> Iterator[bytes]:
    """Yield the pieces of the work's result, or of its error. Read the whole payload first."""
    try:
        try:
            yield from cut(work())
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
    # A client's half of a character is an escape in the message.
    message = error.message.encode(errors="backslashreplace").decode()
    return msgspec.msgpack.encode(["e", error.code, message, error.retry_after_s])


def bound_memory(more: int) -> None:
    """Limit this process's memory to its present size plus this many bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
