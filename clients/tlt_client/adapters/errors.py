"""The error that the adapters share."""

from __future__ import annotations

from tlt_client.errors import TltClientError


class NotServed(TltClientError, ValueError):
    """The trainer asks for what this server does not do; the message names what to set instead."""
