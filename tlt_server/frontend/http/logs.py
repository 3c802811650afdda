"""Log lines: one stream and one format for our lines and those of the libraries.

No line contains a prompt, a completion or a key. Our lines name their contents. Libraries may quote
their input, so only their warnings and errors are written. Any exception is written as its type and
traceback positions, never with its message.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
import sys
import traceback
from contextlib import suppress
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor

log = structlog.get_logger()


def write_logs(
    level: str, format: Literal["console", "json"] | None, stream: TextIO = sys.stderr
) -> None:
    """Set up structlog and the standard library's logging; `auto` is console on a terminal, JSON
    elsewhere.
    """
    stream = lasting(stream)
    colours = stream.isatty()
    console = format == "console" or (format is None and colours)
    render: Processor = (
        structlog.dev.ConsoleRenderer(colors=colours)
        if console
        else structlog.processors.JSONRenderer(sort_keys=False)
    )
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        without_message,
    ]
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(
        level=max(logging.WARNING, getattr(logging, level.upper())), handlers=[handler], force=True
    )


def without_message(logger: Any, method: str, event: EventDict) -> EventDict:
    """Replace an exception by its type and traceback positions."""
    caught = event.pop("exc_info", None)
    error = (
        caught[1] if isinstance(caught, tuple) else sys.exc_info()[1] if caught is True else caught
    )
    if isinstance(error, BaseException):
        event.update(type=type(error).__name__, frames=frames(error))
    return event


def frames(error: BaseException) -> list[str]:
    """Return file, line and function of each frame of an exception, outermost first."""
    return [
        f"{frame.filename}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]


def left_behind(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that no task awaited. The loop's own handler would print its message, and
    the arguments of a callback.
    """
    error = context.get("exception")
    what = re.split(r"[<(]", context["message"])[0].strip()
    log.error("left_behind", what=what, **({"exc_info": error} if error is not None else {}))


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
    """Return a stream that drops lines when the given one fails, such as a closed pipe or a full
    disk: no request fails because of a log line.
    """
    return cast(TextIO, _Lasting(stream))
