"""The record of which weights are live, under the state directory: `weights/current.json`.

The engine's spool writes it with every commit; the frontend reads it to hand out the drafter.
"""

from __future__ import annotations

from msgspec import Struct

WEIGHTS, CURRENT = "weights", "current.json"


class KeptVersion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The live version of a role, or of an adapter, and where its files are."""

    version: str
    digest: str
    directory: str  # below the spool; empty: the model directory the server was started with


class Current(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str  # the directory the server was started with
    roles: dict[str, KeptVersion]
    adapters: dict[str, KeptVersion] = {}  # LoRA adapters by name
