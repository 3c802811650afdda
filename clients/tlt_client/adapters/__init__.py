"""Adapters: what trainers ask for that take an object instead of an address. One file each, over `Client` and the channels alone.

Nothing of a trainer is imported before it calls, so each is importable where the trainer, and torch, are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlt_client.errors import TltClientError


class NotLive(TltClientError):
    """A push was taken, and what it brought is not what the server generates with."""


def check_live(reply: Mapping[str, Any], version: str) -> None:
    """Of a push that was to commit by itself; raises `NotLive`."""
    if reply["state"] not in ("committed", "unchanged"):
        raise NotLive(f"version {version!r} is {reply['state']}, not live: somebody has begun a weight update on this server and not ended "
                      "it (POST /finish_weight_update or /end_weight_update); end it, then push again")
