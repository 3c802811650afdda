"""The positive answer of a probe; a negative one is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct


class Status(Struct, frozen=True):
    status: Annotated[Literal["ok"], "the answer is yes; a no is an error"] = "ok"
