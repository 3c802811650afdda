"""What can go wrong with a channel. The server answers a push with these codes; a trainer's half
raises the same classes.
"""

from __future__ import annotations

from typing import ClassVar

from tlt_client.errors import TltClientError


class ChannelError(TltClientError):
    """Base; `code` is the server's name of it."""

    code: ClassVar[str]


class ContentRefused(ChannelError):
    """What came is not what a push may hold; the same again will not do."""

    code = "weights_refused"


class PlaceForbidden(ChannelError):
    """It would lead where nobody may push from."""

    code = "forbidden"


class ChannelLost(ChannelError):
    """The other side went away, fell silent or sent too little."""

    code = "channel_broken"
