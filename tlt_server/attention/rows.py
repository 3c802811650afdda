"""The input of the one operation: "extend each request by these rows".

Prefill, decode and verify all build a `Rows` and pass it to the model. A *certain* row (prompt
token, or the last known token) writes its KV straight into the request's pages; a *draft* row
writes into a scratch slot, and later rows find it through `path_RD`. Certain rows of a request come
first and fill positions up to `base`.

Legend: R rows, B requests, P pages per request, D longest draft path, H hidden, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt_server.attention.backing import Backing


@dataclass(frozen=True)
class Rows:
    """Rows to compute. Key position p of row r is at `page_table_BP[b, p // page_size] * page_size
    + p % page_size` for p < min(position_R[r] + 1, base_B[b]), and at `path_RD[r, p - base_B[b]]`
    for base_B[b] <= p <= position_R[r], where b = request_R[r].
    """

    token_R: Tensor  # int64
    position_R: Tensor  # int64, 0-based in prompt + output
    kv_slot_R: Tensor  # int64, where the row's own KV goes
    request_R: Tensor  # int32, index into B
    base_B: Tensor  # int32, positions held in pages once this step's certain rows are written
    page_table_BP: Tensor  # int32
    # int32 scratch slots of the in-flight ancestors and the row itself, root side first, -1 padded;
    # D may be 0.
    path_RD: Tensor

    def __len__(self) -> int:
        return self.token_R.shape[0]


class SavedPages(NamedTuple):
    k: Tensor  # [layers, slots, KV heads, head width], e4m3 as bytes
    v: Tensor
    features_SF: Tensor
    scale: Tensor | None  # [layers, 2, KV heads, slots]


class States(NamedTuple):
    """A drafter's inputs and teacher over the first T positions of a sequence."""

    features_TF: Tensor
    hidden_TH: Tensor  # after the final norm


class KVCache:
    """Flat paged KV of all layers: slot s of layer l is `k[l, s]`; page i owns slots [i *
    page_size, (i + 1) * page_size).

    The last `scratch` slots belong to no page; draft rows live there for one step. Keys and values
    in e4m3 have a scale per slot and head, a power of two: `scale[l, 0]` for keys, `scale[l, 1]`
    for values.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        scratch: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        features: int = 0,
        hidden: int = 0,
        quantised: bool = False,
        rounds: bool = False,
    ) -> None:
        """`hidden`: width of the last hidden states, if they are kept for a trainer. `quantised`:
        keys and values are e4m3. `rounds`: they have the values that they would have then.
        """
        self.pages, self.page_size, self.scratch = pages, page_size, scratch
        self.scratch_start = pages * page_size
        kv_slots = self.scratch_start + scratch
        self.rounds = rounds
        kept = torch.float8_e4m3fn if quantised else dtype
        self.k = _zeros(layers, kv_slots, kv_heads, head_dim, dtype=kept, device=device)
        self.v = _zeros(layers, kv_slots, kv_heads, head_dim, dtype=kept, device=device)
        self.scale = (
            torch.zeros(layers, 2, kv_heads, kv_slots, device=device) if quantised else None
        )
        self.features_SF = _zeros(
            kv_slots, features, dtype=dtype, device=device
        )  # the target's hidden states that a drafter reads
        # The target's last hidden states, after the final norm.
        self.hidden_SH = _zeros(kv_slots, hidden, dtype=dtype, device=device)
        self._arrays = [self.k, self.v, self.features_SF, self.hidden_SH]
        self._arrays += [] if self.scale is None else [self.scale]
        self._backings = [Backing(array) for array in self._arrays]
        # Called for pages that will hold other tokens, by those who keep values under our page ids.
        self.on_reuse: list[Callable[[Iterable[int]], None]] = []

    def reuse(self, pages: Iterable[int]) -> None:
        """Tell `on_reuse` that these pages are about to hold other tokens."""
        for forget in self.on_reuse:
            forget(pages)

    def free(self) -> None:
        """Free the memory with the content of every page; nothing may run before `reclaim`."""
        self.reuse(range(self.pages))
        for backing in self._backings:
            backing.free()

    def reclaim(self) -> None:
        """Allocate the memory again, with finite content. If there is too little,
        `torch.OutOfMemoryError`, and everything stays free.
        """
        try:
            for backing in self._backings:
                backing.reclaim()
        except torch.OutOfMemoryError:
            self.free()
            raise
        for backing in self._backings:
            if backing.storage.device.type != "cpu":  # the host's are zeros, or what they were
                backing.bytes.zero_()

    def save(self, pages: list[int]) -> SavedPages:
        """Copy the content of these pages, for a sequence that loses them and cannot recompute
        them.
        """
        kv_slots_S = self._kv_slots(pages)
        return SavedPages(
            _indexed(self.k)[:, kv_slots_S].cpu(),
            _indexed(self.v)[:, kv_slots_S].cpu(),
            self.features_SF[kv_slots_S].cpu(),
            None if self.scale is None else self.scale[..., kv_slots_S].cpu(),
        )

    def gather(self, pages: list[int], count: int) -> States:
        """Copy the states of the first `count` positions of these pages."""
        kv_slots_T = self._kv_slots(pages)[:count]
        return States(self.features_SF[kv_slots_T], self.hidden_SH[kv_slots_T])

    def restore(self, saved: SavedPages, pages: list[int]) -> None:
        """Write a copy into other pages; there may be more pages than were saved."""
        kv_slots_S, device = self._kv_slots(pages)[: saved.k.shape[1]], self.k.device
        _indexed(self.k)[:, kv_slots_S] = saved.k.to(device)
        _indexed(self.v)[:, kv_slots_S] = saved.v.to(device)
        self.features_SF[kv_slots_S] = saved.features_SF.to(device)
        if self.scale is not None and saved.scale is not None:
            self.scale[..., kv_slots_S] = saved.scale.to(device)

    def scales(self) -> Sequence[Tensor | None]:
        """Return the scales [2, KV heads, slots] of each layer; None without e4m3."""
        return [None] * len(self.k) if self.scale is None else self.scale.unbind(0)

    def _kv_slots(self, pages: list[int]) -> Tensor:
        first_P1 = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size
        return (first_P1 + torch.arange(self.page_size)).reshape(-1)

    @property
    def bytes_per_kv_slot(self) -> int:
        return sum(array.nbytes for array in self._arrays) // self.k.shape[1]


def _indexed(array: Tensor) -> Tensor:
    """Return keys or values in a type that can be indexed: e4m3 as bytes."""
    return array.view(torch.uint8) if array.element_size() == 1 else array


def _zeros(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros that take memory only once touched, if the host's allocator can do that."""
    if device == "cpu" and dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(*shape, dtype=dtype, device=device)
