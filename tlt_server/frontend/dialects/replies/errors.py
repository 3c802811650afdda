"""Errors that many routes raise."""

from tlt_server.errors import (
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Poisoned,
    QueueFull,
    QueueTimeout,
    Unavailable,
)

GONE = (EngineFailed, Unavailable)  # the engine does not answer
UNFINISHED = (  # a request is not admitted, or does not end with a result
    QueueFull,
    Overloaded,
    QueueTimeout,
    DeadlineExceeded,
    EngineFailed,
    Poisoned,
    Unavailable,
)
