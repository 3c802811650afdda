"""The limits on lists and texts of requests that settings decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import Struct

from tlt_server.errors import InvalidRequest, TltError

if TYPE_CHECKING:  # it brings pydantic along
    from tlt_server.config import ResolvedConfig


class Bounds(Struct, frozen=True):
    """The settings that bound a list or an object, under their own names."""

    max_batch_items: int
    max_prompt_tokens: int
    max_model_len: int
    max_stop_strings: int
    max_stop_token_ids: int
    max_logit_bias: int

    @classmethod
    def of(cls, config: ResolvedConfig) -> Bounds:
        return cls(*(getattr(config, name) for name in cls.__struct_fields__))

    def values(self) -> tuple[int, ...]:
        return msgspec.structs.astuple(self)


class Limit(NamedTuple):
    """A setting that bounds a list, stated in the field's `Meta(extra={"limit": ...})`, there
    as its name for a field that the client declares.
    """

    setting: str
    noun: str  # the members
    remedy: str = ""
    error: type[TltError] = InvalidRequest

    def exceeded(self, where: str, count: int, limit: int) -> TltError:
        remedy = f": {self.remedy}" if self.remedy else ""
        return self.error(
            f"{where} has {count} {self.noun}; the limit is {limit} ({self.setting}){remedy}"
        )


LIMITS = {
    limit.setting: limit
    for limit in (
        Limit("max_stop_strings", "strings", "leave some out"),
        Limit("max_stop_token_ids", "ids", "leave some out"),
        Limit("max_logit_bias", "entries", "leave some out"),
    )
}
