"""Errors that the adapters share."""

from __future__ import annotations

from tlt_client.errors import TltClientError, server_error
from tlt_client.wire import Choice, ItemResult


class NotServed(TltClientError, ValueError):
    """The trainer requests something that this server does not support; the message names the
    setting to change.
    """


def choices_of(result: ItemResult, where: str = "") -> list[Choice]:
    """Return an item's choices, or raise the `ServerError` that it ended with. `where`: prefix of
    the error's message.
    """
    if (error := result.error) is not None:
        message = where + error.message
        raise server_error(error.code, message, status=200, retryable=error.retryable)
    return result.choices
