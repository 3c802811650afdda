"""A further rank of a CPU that has no room to take its pages again, the first time: `python -m
tests.engine.short_rank DESCRIPTOR PARENT`.
"""

from __future__ import annotations

import torch

from tlt_server.attention.rows import KVCache
from tlt_server.engine.ranks.rank import main

reclaim = KVCache.reclaim


def out_of_memory(cache: KVCache) -> None:
    KVCache.reclaim = reclaim  # type: ignore[method-assign]
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


if __name__ == "__main__":
    KVCache.reclaim = out_of_memory  # type: ignore[method-assign]
    main()
