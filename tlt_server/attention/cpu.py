"""The `cpu` attention backend: the compiled paged kernel, cut by rows over a few threads in large
calls.

One per model, called by every layer. Bits do not depend on the cut: each piece runs the same
compiled function, and a row reads nothing from another row.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt_kernels.cpu import attention as kernel
from tlt_server.attention import CHUNK
from tlt_server.attention.rows import Rows

# Multiply-adds of one piece: 60 us from warm caches, far more from memory. Waking a thread costs
# 30 to 50 us.
WORTH_A_THREAD = 1 << 21

assert CHUNK == kernel.CHUNK
_attend_rows: Any = kernel.attend_rows


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")


class CpuPaged:
    def __init__(
        self,
        *,
        page_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        threads: int | None = None,
    ) -> None:
        assert heads % kv_heads == 0, f"{heads} query heads do not divide over {kv_heads} KV heads"
        self.page_size, self.heads, self.head_dim = page_size, heads, head_dim
        self.scale = head_dim**-0.5
        self.threads = threads  # None: as many as torch has
        self._rows: Rows | None = None
        self._arrays: tuple = ()
        self._pieces: list[tuple[int, int]] = []

    def attend(
        self, q_RND: Tensor, k_SKD: Tensor, v_SKD: Tensor, rows: Rows, first: int = 0
    ) -> Tensor:
        """Return [R, N, D] float32; see `tlt_server.attention` for the keys that a row sees."""
        if rows is not self._rows:
            self._plan(rows)
        out_RND = torch.empty_like(q_RND)
        arguments = (
            q_RND.numpy(),
            k_SKD.numpy(),
            v_SKD.numpy(),
            *self._arrays,
            self.page_size,
            first,
            self.scale,
            out_RND.numpy(),
        )
        if len(self._pieces) == 1:
            _attend_rows(*arguments, 0, len(rows))
            return out_RND
        own, *others = self._pieces
        pending = [_pool(len(others)).submit(_attend_rows, *arguments, *piece) for piece in others]
        _attend_rows(*arguments, *own)
        for piece in pending:
            piece.result()
        return out_RND

    def _plan(self, rows: Rows) -> None:
        """Prepare views of the row tables, and pieces of near-equal work; kept while the same
        `rows` pass through the layers.
        """
        self._rows = rows
        self._arrays = tuple(
            tensor.contiguous().numpy()
            for tensor in (
                rows.position_R,
                rows.request_R,
                rows.base_B,
                rows.page_table_BP,
                rows.path_RD,
            )
        )
        position_R = self._arrays[0]
        work = 2 * self.heads * self.head_dim  # multiply-adds per row and key
        pieces = min(
            self.threads or torch.get_num_threads(),
            int(position_R.sum() + len(rows)) * work // WORTH_A_THREAD,
            len(rows),
        )
        if pieces < 2:
            self._pieces = [(0, len(rows))]
            return
        upto_R = np.cumsum(position_R + 1)
        edges = np.searchsorted(upto_R, np.arange(1, pieces) * (upto_R[-1] / pieces)).tolist()
        self._pieces = list(zip([0, *edges], [*edges, len(rows)], strict=True))
