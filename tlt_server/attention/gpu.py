"""Attention on a GPU by name: planned once per step for its rows, then called by every layer.

A backend is built as `Backend(heads=..., kv_heads=..., head_dim=..., context=..., device=...,
dtype=..., numerics=...)` and refuses unsupported models; `planned(rows)` returns the function for
passes of that many rows, with its own buffers, so that a captured graph may hold it. Partial
results of all passes share one workspace: only one runs at a time. In strict numerics a row's bits
depend only on its own query and keys, see `tlt_kernels.gpu.attention`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tlt_kernels import reference
from tlt_kernels.gpu import attention as kernels
from tlt_kernels.gpu.quantise import Quantised
from tlt_kernels.gpu.tensors import PAGE_SIZE, RowTable
from tlt_server.errors import StartupError

# Max rows of a pass that belong to requests with more than one row; plans of passes keep to it.
TREE_ROWS = 512
# Min partial results of a tree row: the one it shares with its tree, and up to two splits of its
# own.
STATES = 3


class Planned(Protocol):
    def plan(self, rows: RowTable, page_table_QP: Tensor) -> None:
        """Plan for the rows of the step."""

    def __call__(
        self,
        q_RND: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        *,
        first: int = 0,
        quantised: bool = False,
        scale_2KS: Tensor | None = None,
    ) -> Tensor | Quantised:
        """`quantised`: a matmul in FP8 reads the result, which may be quantised. `scale_2KS`: of
        keys and values in e4m3.
        """


class GpuAttention(Protocol):
    capturable: bool

    def planned(self, rows: int, *, requests: int = 1, prompt_rows: int = 0) -> Planned:
        """Return the attention of `rows` rows, the last `prompt_rows` of which are prompt rows.
        They belong to at least `requests` requests; if that equals `rows`, all to different ones.
        """


class TritonPaged:
    capturable = True

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        context: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        numerics: str = "strict",
    ) -> None:
        """Raise `StartupError` if the workspace has no room for TREE_ROWS."""
        room = (
            len(
                kernels.allocate(
                    rows=TREE_ROWS,
                    context=1,
                    heads=heads,
                    kv_heads=kv_heads,
                    width=head_dim,
                    device="meta",
                    programs=1,
                ).top_WN
            )
            // STATES
        )
        if room < TREE_ROWS:
            raise StartupError(
                f"the model has {heads} query heads of {head_dim}: attention triton has room for "
                f"{room} rows of draft "
                f"trees, and a step may have {TREE_ROWS}; start with --attention torch, which is "
                "slow, or serve a model "
                "with fewer heads"
            )
        self._shape = {
            "heads": heads,
            "kv_heads": kv_heads,
            "width": head_dim,
            "context": context,
            "device": device,
        }
        self._scale, self._strict = head_dim**-0.5, numerics == "strict"
        self._group = heads // kv_heads
        self._workspace: kernels.AttentionPlan | None = None

    def planned(self, rows: int, *, requests: int = 1, prompt_rows: int = 0) -> TritonPlanned:
        tile = kernels.tile_of(rows if prompt_rows else -(-rows // requests), self._group)
        plan = kernels.allocate(rows=rows, tiles=rows > requests, tile=tile, **self._shape)  # type: ignore[arg-type]
        if self._workspace is None or len(self._workspace.top_WN) < len(plan.top_WN):
            self._workspace = plan  # passes made before keep the one they have
        shared, states = self._workspace, len(plan.top_WN)
        plan = plan._replace(
            top_WN=shared.top_WN[:states],
            sum_WN=shared.sum_WN[:states],
            acc_WND=shared.acc_WND[:states],
        )
        return TritonPlanned(plan, self._scale, strict=self._strict)


class TritonPlanned:
    def __init__(self, plan: kernels.AttentionPlan, scale: float, *, strict: bool) -> None:
        self._plan, self._scale, self._strict = plan, scale, strict
        self._rows: kernels.PagedRows | None = None

    def plan(self, rows: RowTable, page_table_QP: Tensor) -> None:
        self._rows = kernels.PagedRows(
            rows.position_R, rows.batch_slot_R, rows.base_R, rows.path_RD, page_table_QP
        )
        kernels.fill_plan(self._rows, self._plan)

    def __call__(
        self,
        q_RND: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        *,
        first: int = 0,
        quantised: bool = False,
        scale_2KS: Tensor | None = None,
    ) -> Tensor | Quantised:
        assert self._rows is not None
        return kernels.attend(
            q_RND,
            k_SKD,
            v_SKD,
            self._rows,
            self._plan,
            first=first,
            scale=self._scale,
            strict=self._strict,
            quantised=quantised,
            scale_2KS=scale_2KS,
        )


class TorchGathered:
    """The slow twin: row by row. It waits for the device, so its passes are not captured."""

    capturable = False

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        context: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        numerics: str = "strict",
    ) -> None:
        self._scale = head_dim**-0.5

    def planned(self, rows: int, *, requests: int = 1, prompt_rows: int = 0) -> TorchPlanned:
        return TorchPlanned(self._scale)


class TorchPlanned:
    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._keys: reference.VisibleKeys | None = None

    def plan(self, rows: RowTable, page_table_QP: Tensor) -> None:
        each_R = torch.arange(len(rows.position_R), device=rows.position_R.device)
        self._keys = reference.VisibleKeys(
            rows.position_R,
            each_R,
            rows.base_R,
            page_table_QP[rows.batch_slot_R.long()],
            rows.path_RD,
            PAGE_SIZE,
        )

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
        assert self._keys is not None
        return reference.attend_rows(
            q_RND, k_SKD, v_SKD, self._keys, first, self._scale, scale_2KS=scale_2KS
        )
