"""Errors of channels, raised by both halves. The server's replies to a push have their codes."""

from __future__ import annotations

from typing import ClassVar

from tlt_client.errors import TltClientError


class ChannelError(TltClientError):
    """Base of these errors; `code` is the server's name."""

    code: ClassVar[str]


class ContentRefused(ChannelError):
    """The content is not allowed in a push; the same content is refused again."""

    code = "weights_refused"


class PlaceForbidden(ChannelError):
    """The path leads to a place from which pushes are forbidden."""

    code = "forbidden"


class ChannelLost(ChannelError):
    """The other side disconnected, fell silent or sent too little."""

    code = "channel_broken"
