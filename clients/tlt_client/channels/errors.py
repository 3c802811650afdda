"""Errors of channels, raised by both halves. The server answers a push with their codes."""

from __future__ import annotations

from typing import ClassVar

from tlt_client.errors import TltClientError


class ChannelError(TltClientError):
    """Base of these errors; `code` is the server's name."""

    code: ClassVar[str]


class ContentRefused(ChannelError):
    """The content is not what a push may hold; the same content is refused again."""

    code = "weights_refused"


class PlaceForbidden(ChannelError):
    """The path leads to a place from which pushes are not allowed."""

    code = "forbidden"


class ChannelLost(ChannelError):
    """The other side went away, fell silent or sent too little."""

    code = "channel_broken"
