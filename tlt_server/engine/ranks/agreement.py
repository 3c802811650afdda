"""The states that ranks of a CPU compare after each step. Those of GPUs: `gpu/agreement.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels.cpu.checksums import mixed_sum
from tlt_server.attention.rows import Rows


def sum_of_states(hidden_RH: Tensor, rows: Rows) -> int:
    """Return a 64-bit sum over what every rank holds alike after a step: the last normed rows, and
    the layout of the rows that gave them.
    """
    laid_out = torch.cat([rows.token_R, rows.position_R, rows.kv_slot_R, rows.request_R])
    return (mixed_sum(hidden_RH)[0] + 3 * mixed_sum(laid_out)[0]) % 2**64
