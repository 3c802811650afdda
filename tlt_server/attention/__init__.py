"""Attention over paged KV: one file and one table line per backend; those of a GPU are built as
`gpu.py` describes.

A backend of a CPU is a class built as `Backend(page_size=..., heads=..., kv_heads=...,
head_dim=...)` with one method: `attend(q_RND, k_SKD, v_SKD, rows, first=0) -> out_RND` where row r
sees key positions [first, position_R[r]]. In strict numerics its bits depend only on the row's own
query and keys: chunks of 64 absolute positions, each with its own max, sum and accumulator, merged
in chunk order.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tlt_server.attention.rows import Rows
from tlt_server.registry import Registry

CHUNK = 64  # key positions per softmax chunk, aligned to absolute position

BACKENDS = Registry(
    "attention backend",
    {
        "cpu": "tlt_server.attention.cpu:CpuPaged",
        "torch": "tlt_server.attention.torch_reference:TorchReference",
    },
)
GPU_BACKENDS = Registry(
    "GPU attention backend",
    {
        "triton": "tlt_server.attention.gpu:TritonPaged",
        "torch": "tlt_server.attention.gpu:TorchGathered",
        "flash_attn": "tlt_server.attention.flash:FlashPaged",
    },
)


class Attention(Protocol):
    def attend(
        self, q_RND: Tensor, k_SKD: Tensor, v_SKD: Tensor, rows: Rows, first: int = 0
    ) -> Tensor: ...
