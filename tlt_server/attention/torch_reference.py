"""The `torch` attention backend: gather and softmax, row by row. The slow twin of every other
backend.

Obviously correct and slow; its bits depend only on the row, because it has no batch dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels import reference
from tlt_server.attention.rows import Rows


class TorchReference:
    def __init__(self, *, page_size: int, heads: int, kv_heads: int, head_dim: int) -> None:
        self.page_size, self.scale = page_size, head_dim**-0.5

    def attend(
        self, q_RND: Tensor, k_SKD: Tensor, v_SKD: Tensor, rows: Rows, first: int = 0
    ) -> Tensor:
        """Return [R, N, D] float32; see `tlt_server.attention` for the keys that a row sees."""
        keys = reference.VisibleKeys(
            rows.position_R,
            rows.request_R,
            rows.base_B,
            rows.page_table_BP,
            rows.path_RD,
            self.page_size,
        )
        return reference.attend_rows(q_RND, k_SKD, v_SKD, keys, first, self.scale).to(torch.float32)
