"""The KV on the device: the target's pages, the KV of a drafter with a network, and captured states
and adapters if there are any.

Legend: P pages, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_server.attention.rows import KVCache, SavedPages
from tlt_server.engine.gpu.memory.budget import MemoryPlan
from tlt_server.engine.gpu.memory.hidden_states.pages import PageStates
from tlt_server.engine.gpu.steps.state import KVSlots
from tlt_server.models.gpu.adapted import GpuAdapterSlots


@dataclass(frozen=True)
class DraftKV:
    """The KV of a drafter's network."""

    cache: KVCache
    # The hint after each page's last position, for sequences that find the page by its prefix.
    page_hint_PH: Tensor


@dataclass(frozen=True)
class GpuKV:
    plan: MemoryPlan
    slots: KVSlots
    cache: KVCache
    draft: DraftKV | None  # None without a drafter with a network
    stream: torch.cuda.Stream | None
    states: PageStates | None = None  # None: no states are captured
    adapters: GpuAdapterSlots | None = None  # None: the server takes no adapters

    @property
    def caches(self) -> list[KVCache]:
        return [self.cache, *([self.draft.cache] if self.draft else [])]

    @property
    def page_hint_PH(self) -> Tensor | None:
        return self.draft.page_hint_PH if self.draft else None

    def save(self, pages: list[int]) -> object:
        """Copy pages after the step in flight, which may still write to them."""
        with torch.cuda.stream(self.stream):
            hints = self.draft.page_hint_PH[pages].cpu() if self.draft else None
            return [cache.save(pages) for cache in self.caches], hints

    def restore(self, saved: tuple[list[SavedPages], Tensor | None], pages: list[int]) -> None:
        """Write pages between the step in flight, which may still write to them, and the next
        step.
        """
        kept, hints = saved
        with torch.cuda.stream(self.stream):
            for cache, pieces in zip(self.caches, kept, strict=True):
                cache.restore(pieces, pages)
            if self.draft and hints is not None:
                page_hint_PH = self.draft.page_hint_PH
                page_hint_PH[pages[: len(hints)]] = hints.to(page_hint_PH.device)
