"""A validated batch: items, each a prompt with its choices, and the names that its client knows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tlt_server.wire.records import GenerateRequest

NOTHING: Mapping[str, str] = MappingProxyType({})


class RequestItem(NamedTuple):
    """One prompt and its n choices; choice i is `requests[i]`."""

    id: str
    requests: list[GenerateRequest]


class Words(NamedTuple):
    """The names that a dialect's users know, for messages; `{i}` is the item's index."""

    item: str  # one item's prompt
    field: str  # prefix of an item's field
    sampling: str  # prefix of a sampling field
    renamed: Mapping[str, str] = NOTHING  # sampling field -> its path, where its name differs
    clamps: bool = False  # a longer output than the prompt leaves is shortened, not refused

    def called(self, field: str) -> str:
        """Return the path of a sampling field."""
        return self.renamed.get(field, self.sampling + field)

    def structured_by(self, field: str) -> Words:
        """Return the words for a request that asks for its structure in this field."""
        path = self.sampling + field
        return self._replace(renamed={**self.renamed, "structured_outputs": path})


class PromptReading(NamedTuple):
    """The reading of prompts, where a dialect lets its users choose."""

    special: bool = True  # texts get what the tokenizer puts around them
    keep: int | None = None  # last tokens of each prompt; -1: as many as fit; None: all


WHOLE = PromptReading()
NATIVE = Words("requests[{i}]", "requests[{i}].", "sampling.")


class RequestBatch(NamedTuple):
    items: list[RequestItem]
    stream: bool
    deadline_s: float
