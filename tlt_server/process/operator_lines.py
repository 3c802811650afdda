"""The stream of lines for an operator: logs, and the report of the start."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import TextIO, cast


class _Lasting(io.TextIOBase):
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


def lasting(stream: TextIO) -> TextIO:
    """Return a stream whose lines are lost where the given one takes none, such as a closed pipe
    or a full disk: no request fails for a line about it.
    """
    return cast(TextIO, _Lasting(stream))
