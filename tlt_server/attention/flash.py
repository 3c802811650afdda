"""The `flash_attn` backend: prompt rows of large steps through FlashAttention (flash-attn-4, whose
wheels compile for the present GPU), every other row through Triton.

The library adds in its own order, so this is only for numerics `fast`. It reads contiguous keys
(its own pages would be multiples of 256 positions), so each layer gathers the keys of the step's
prompts. Their number determines tensor sizes, which the host has to know: `plan` copies two small
tensors from the device and waits for them. Steps with more than LARGE prompt rows are not captured;
smaller ones, and drafters' passes, use only Triton.

Legend: R rows, P prompt rows, W runs of a call, T keys of a call, Q batch slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.tensors import PAGE_SIZE, RowTable
from tlt_server.attention.gpu import Planned, TritonPaged
from tlt_server.errors import StartupError

LARGE = (
    512  # prompt rows; passes with no more may be captured, where nothing can be copied to the host
)
GATHERED = (
    256 << 20
)  # bytes of keys and values that lie together for one call, unless one request alone has more
DTYPES = (torch.bfloat16, torch.float16)
Attend = Callable[..., tuple[Tensor, Tensor | None]]  # the output, and its log-sum-exp if asked for


class Run(NamedTuple):
    """Rows of one request at consecutive positions. `row`: index among the prompt rows. `keys`:
    positions that the last row sees.
    """

    row: int
    rows: int
    batch_slot: int
    keys: int


class PackedCall(NamedTuple):
    """Runs that one library call computes."""

    row: int
    rows: int
    kv_slot_T: Tensor
    first_row_W1: Tensor  # int32, and where the last run ends
    first_key_W1: Tensor
    max_rows: int
    max_keys: int


class PromptStep(NamedTuple):
    """The prompt rows of a step."""

    runs: list[Run]
    page_table_QP: Tensor
    calls: dict[int, list[PackedCall]]  # by the first position seen; made by the first layer


class FlashPaged:
    capturable = True  # what is captured is Triton's

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        context: int,
        device: torch.device,
        dtype: torch.dtype,
        numerics: str,
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        if numerics != "fast":
            raise StartupError(
                f"attention is flash_attn and numerics is {numerics}: the library adds in an order "
                "of its own, so bits "
                "would change with the batch; use attention triton, or numerics fast"
            )
        if dtype not in DTYPES:
            raise StartupError(
                f"attention is flash_attn and dtype is {name}: the library computes in bfloat16 "
                "and float16 only; "
                "use attention triton, or one of those types"
            )
        try:
            from flash_attn.cute import flash_attn_varlen_func
        except ImportError as error:
            raise StartupError(
                f"attention is flash_attn, but flash-attn-4 cannot be imported ({error}); use "
                "attention triton, or install it: pip install 'tlt-server[flash-attn]'"
            ) from error
        self._function: Attend = flash_attn_varlen_func
        self._triton = TritonPaged(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, context=context, device=device
        )
        self._scale, self._max_keys = (
            head_dim**-0.5,
            GATHERED // (2 * kv_heads * head_dim * dtype.itemsize),
        )

    def planned(self, rows: int, *, requests: int = 1, prompt_rows: int = 0) -> Planned:
        if prompt_rows <= LARGE:
            return self._triton.planned(rows, requests=requests, prompt_rows=prompt_rows)
        others = rows - prompt_rows
        planned = self._triton.planned(others, requests=requests) if others else None
        return FlashPlanned(planned, others, self._function, self._scale, self._max_keys)


class FlashPlanned:
    def __init__(
        self, planned: Planned | None, others: int, function: Attend, scale: float, max_keys: int
    ) -> None:
        """`planned`: for the first `others` rows; the rest are prompt rows."""
        self._planned, self._others = planned, others
        self._function, self._scale, self._max_keys = function, scale, max_keys
        self._step = PromptStep([], torch.empty(0, 0, dtype=torch.int32), {})

    def plan(self, rows: RowTable, page_table_QP: Tensor) -> None:
        if self._planned is not None:
            self._planned.plan(rows.part(0, self._others), page_table_QP)
        position_P, batch_slot_P = (
            torch.stack([rows.position_R[self._others :], rows.batch_slot_R[self._others :]])
            .cpu()
            .numpy()
        )  # waits
        self._step = PromptStep(runs_of(position_P, batch_slot_P), page_table_QP, {})

    def __call__(
        self,
        q_RND: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        *,
        first: int = 0,
        quantised: bool = False,
        scale_2KS: Tensor | None = None,
    ) -> Tensor:
        assert scale_2KS is None, "see `devices.choice`"
        out_RND = torch.empty_like(q_RND)
        if self._planned is not None:
            found = self._planned(q_RND[: self._others], k_SKD, v_SKD, first=first)
            assert isinstance(found, Tensor)
            out_RND[: self._others] = found
        for call in self._calls_from(first):
            rows = slice(self._others + call.row, self._others + call.row + call.rows)
            out_RND[rows], _ = self._function(
                q_RND[rows],
                k_SKD.index_select(0, call.kv_slot_T),
                v_SKD.index_select(0, call.kv_slot_T),
                cu_seqlens_q=call.first_row_W1,
                cu_seqlens_k=call.first_key_W1,
                max_seqlen_q=call.max_rows,
                max_seqlen_k=call.max_keys,
                softmax_scale=self._scale,
                causal=True,  # the last row of a run sees its last key
            )
        return out_RND

    def _calls_from(self, first: int) -> list[PackedCall]:
        step = self._step
        if first not in step.calls:
            runs = [run._replace(keys=max(run.keys - first, 0)) for run in step.runs]
            step.calls[first] = [
                call_of(part, first, step.page_table_QP) for part in parts_of(runs, self._max_keys)
            ]
        return step.calls[first]


def runs_of(position_P: NDArray[np.int32], batch_slot_P: NDArray[np.int32]) -> list[Run]:
    """Return the runs; dead rows come last."""
    alive = int((position_P >= 0).sum())
    position_P, batch_slot_P = position_P[:alive], batch_slot_P[:alive]
    assert (position_P >= 0).all(), "a dead row stands before a live prompt row"
    first_W = np.flatnonzero(
        (np.diff(batch_slot_P, prepend=-1) != 0) | (np.diff(position_P, prepend=-2) != 1)
    ).tolist()
    return [
        Run(row, end - row, int(batch_slot_P[row]), int(position_P[end - 1]) + 1)
        for row, end in pairwise([*first_W, alive])
    ]


def parts_of(runs: list[Run], max_keys: int) -> Iterator[list[Run]]:
    """Yield the runs in order, cut so that no part but a single run has more keys."""
    part: list[Run] = []
    for run in runs:
        if part and sum(other.keys for other in part) + run.keys > max_keys:
            yield part
            part = []
        part.append(run)
    if part:
        yield part


def call_of(runs: list[Run], first: int, page_table_QP: Tensor) -> PackedCall:
    """Return the call for these runs. `keys` of the runs count from position `first`."""
    rows_W, keys_W = [run.rows for run in runs], [run.keys for run in runs]
    of_W1 = [
        [0, *np.cumsum(rows_W)],
        [0, *np.cumsum(keys_W)],
        [*(run.batch_slot for run in runs), -1],
    ]
    first_row_W1, first_key_W1, batch_slot_W1 = torch.tensor(
        np.array(of_W1, np.int32), device=page_table_QP.device
    )
    keys = sum(keys_W)
    # With the size given, the host does not wait.
    run_T = torch.repeat_interleave(first_key_W1.diff(), output_size=keys)
    position_T = torch.arange(keys, device=run_T.device) - first_key_W1[run_T] + first
    page_T = page_table_QP[batch_slot_W1[run_T].long(), position_T // PAGE_SIZE]
    kv_slot_T = page_T.long() * PAGE_SIZE + position_T % PAGE_SIZE
    return PackedCall(
        runs[0].row, sum(rows_W), kv_slot_T, first_row_W1, first_key_W1, max(rows_W), max(keys_W)
    )
