"""One sequence on pages of its own, extended by any number of certain or draft rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_server.attention.rows import KVCache, Rows


def certain_rows(tokens: Tensor, start: int, table_P: Tensor, page_size: int) -> Rows:
    """Rows of one request for `tokens` at positions from `start` on."""
    position_R = torch.arange(start, start + len(tokens))
    kv_slot_R = table_P[position_R // page_size].long() * page_size + position_R % page_size
    return Rows(
        tokens,
        position_R,
        kv_slot_R,
        torch.zeros(len(tokens), dtype=torch.int32),
        torch.tensor([start + len(tokens)], dtype=torch.int32),
        table_P[None].to(torch.int32),
        torch.full((len(tokens), 0), -1, dtype=torch.int32),
    )


def batch(parts: list[Rows]) -> Rows:
    """Several requests' rows as one step."""
    width = max(part.page_table_BP.shape[1] for part in parts)
    depth = max(part.path_RD.shape[1] for part in parts)

    def pad(tensor: Tensor, size: int) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, size - tensor.shape[1]), value=-1)

    offsets = torch.tensor([0, *(len(part.base_B) for part in parts)]).cumsum(0).tolist()
    return Rows(
        torch.cat([part.token_R for part in parts]),
        torch.cat([part.position_R for part in parts]),
        torch.cat([part.kv_slot_R for part in parts]),
        torch.cat(
            [part.request_R + offset for part, offset in zip(parts, offsets, strict=False)]
        ).to(torch.int32),
        torch.cat([part.base_B for part in parts]),
        torch.cat([pad(part.page_table_BP, width) for part in parts]).contiguous(),
        torch.cat([pad(part.path_RD, depth) for part in parts]).contiguous(),
    )


class Sequence:
    def __init__(
        self,
        model,
        capacity: int,
        *,
        cache: KVCache | None = None,
        table_P: Tensor | None = None,
        page_size: int = 16,
    ) -> None:
        self.model, self.page_size, self.length = model, page_size, 0
        pages = -(-capacity // page_size)
        self.cache = cache if cache is not None else model.make_cache(pages + 1, page_size, 32)
        self.table_P = (
            table_P
            if table_P is not None
            else torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        )

    def rows(self, tokens: Tensor) -> Rows:
        part = certain_rows(tokens, self.length, self.table_P, self.page_size)
        self.length += len(tokens)
        return part

    def extend(self, tokens: Tensor):
        return self.model.forward(self.rows(tokens), self.cache)
