"""Steps of attention: rows of some requests over one cache that is NaN wherever no row may look."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.kernels.triton_tests import DEVICE

# isort: split

from tlt_kernels import reference
from tlt_kernels.gpu.attention import AttentionPlan, PagedRows, allocate, attend_into, fill_plan

PAGE = 16
TILE = 16  # in bit tests: the matmuls of the interpreter depend on the height of a tile


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@dataclass
class Step:
    """Rows of some requests over one cache; `rows_of[b]` are request b's."""

    q_RND: Tensor
    k_SKD: Tensor
    v_SKD: Tensor
    rows: PagedRows
    context: int
    rows_of: list[list[int]]
    scale_2KS: Tensor | None = None  # with keys and values in e4m3

    def only(self, chosen: list[int]) -> Step:
        rows = self.rows
        return replace(
            self,
            q_RND=self.q_RND[chosen].contiguous(),
            rows=PagedRows(
                rows.position_R[chosen],
                rows.batch_slot_R[chosen],
                rows.base_R[chosen],
                rows.path_RD[chosen].contiguous(),
                rows.page_table_QP,
            ),
        )

    def plan(self, **options) -> AttentionPlan:
        rows, heads, width = self.q_RND.shape
        return allocate(
            rows=rows,
            context=self.context,
            heads=heads,
            kv_heads=self.k_SKD.shape[1],
            width=width,
            device=DEVICE,
            **options,
        )

    def attend(
        self, first: int = 0, plan: AttentionPlan | None = None, *, strict: bool = True, **options
    ) -> Tensor:
        plan = plan or self.plan(**options)
        fill_plan(self.rows, plan)
        if DEVICE == "cuda":
            # `attend` reads the plan before it waits: in a step, other kernels run between them.
            torch.cuda.synchronize()
        out_RND = torch.full_like(self.q_RND, float("nan"), dtype=torch.float32)
        attend_into(
            out_RND,
            self.q_RND,
            self.k_SKD,
            self.v_SKD,
            self.rows,
            plan,
            first=first,
            scale=self.q_RND.shape[-1] ** -0.5,
            strict=strict,
            scale_2KS=self.scale_2KS,
        )
        assert not plan.counter_RK.any(), "counters were not left at zero"
        return out_RND

    def expected(self, first: int = 0) -> Tensor:
        rows = self.rows
        return reference.attend_rows(
            self.q_RND,
            self.k_SKD,
            self.v_SKD,
            reference.VisibleKeys(
                rows.position_R,
                torch.arange(len(rows.position_R)),
                rows.base_R,
                rows.page_table_QP[rows.batch_slot_R.long()],
                rows.path_RD,
                PAGE,
            ),
            first,
            self.q_RND.shape[-1] ** -0.5,
            double=True,
            scale_2KS=self.scale_2KS,
        )

    def in_e4m3(self) -> Step:
        """Return the step over keys and values in e4m3. Unread slots have NaN as their scales."""
        k_SKD, v_SKD, scale_2KS = self.k_SKD, self.v_SKD, []
        both = [reference.quantise_heads(cache) for cache in (k_SKD, v_SKD)]
        for cache, (_, scale_SK) in zip((k_SKD, v_SKD), both, strict=True):
            scale_SK[cache.isnan().any(-1)] = float("nan")
            scale_2KS.append(scale_SK.T.float())
        (k_SKD, _), (v_SKD, _) = both
        return replace(self, k_SKD=k_SKD, v_SKD=v_SKD, scale_2KS=torch.stack(scale_2KS))

    def of_products(self) -> Step:
        """Return the step over the e4m3 numbers times their scales, in the type of q."""
        assert self.scale_2KS is not None
        k_SKD, v_SKD = (
            (cache.float() * scale_KS.T[:, :, None]).to(self.q_RND.dtype)
            for cache, scale_KS in zip((self.k_SKD, self.v_SKD), self.scale_2KS, strict=True)
        )
        return replace(self, k_SKD=k_SKD, v_SKD=v_SKD, scale_2KS=None)


def a_step(
    shape: tuple[int, int, int],
    requests: list[tuple[int, int] | tuple[int, int, str]],
    *,
    dtype: torch.dtype = torch.float32,
    dead: int = 0,
    root_in_pages: bool = True,
) -> Step:
    """Return the rows of requests given as (known, rows). Positive rows are a random tree of draft
    rows after position known - 1 (its root is the first), or a "chain"; negative rows are the last
    -rows of `known` prompt tokens. Batch slots are dealt in reverse, pages at random.
    """
    heads, kv_heads, width = shape
    generator = torch.Generator().manual_seed(sum(known + count for known, count, *_ in requests))
    depth = max([count for _, count, *_ in requests] + [1])
    context = max(known + max(count, 0) for known, count, *_ in requests)
    pages_each = -(-context // PAGE)
    pages = len(requests) * pages_each
    scratch = pages * PAGE
    kv_slots = scratch + sum(max(count, 0) for _, count, *_ in requests) + 3
    k_SKD, v_SKD = torch.full((2, kv_slots, kv_heads, width), float("nan"))
    table_QP = torch.full((len(requests) + 1, pages_each), -1, dtype=torch.int32)
    order = torch.randperm(pages, generator=generator).to(torch.int32)
    position, batch_slot, base, path, rows_of, taken = [], [], [], [], [], scratch
    for b, (known, count, *chain) in enumerate(requests):
        q = len(requests) - 1 - b
        used = -(-known // PAGE)
        table_QP[q, :used] = order[b * pages_each : b * pages_each + used]
        committed = known if count < 0 or root_in_pages else known - 1
        held = (
            table_QP[q, torch.arange(committed) // PAGE].long() * PAGE
            + torch.arange(committed) % PAGE
        )
        k_SKD[held] = noise(committed, kv_heads, width, seed=b)
        v_SKD[held] = noise(committed, kv_heads, width, seed=50 + b)
        rows_of.append(list(range(len(position), len(position) + abs(count))))
        if count < 0:
            position += range(known + count, known)
            path += [[]] * -count
        paths: list[list[int]] = []
        for r in range(max(count, 0)):
            parent = r - 1 if chain else int(torch.randint(max(r, 1), (), generator=generator))
            above = paths[parent] if r else []
            mine = [] if r == 0 and root_in_pages else [*above, taken + r]
            k_SKD[taken + r], v_SKD[taken + r] = (
                noise(kv_heads, width, seed=100 + taken + r),
                noise(kv_heads, width, seed=200 + taken + r),
            )
            paths.append(mine)
            position.append(committed - 1 + len(mine))
        path += paths
        batch_slot += [q] * abs(count)
        base += [committed] * abs(count)
        taken += max(count, 0)
    position += [-1] * dead
    batch_slot += [len(requests)] * dead
    base += [0] * dead
    path += [[]] * dead
    rows = PagedRows(
        *(
            torch.tensor(values, dtype=torch.int32, device=DEVICE)
            for values in (
                position,
                batch_slot,
                base,
                [row + [-1] * (depth - len(row)) for row in path],
            )
        ),
        table_QP.to(DEVICE),
    )
    q_RND = noise(len(position), heads, width) * 2
    return Step(
        q_RND.to(DEVICE, dtype),
        k_SKD.to(DEVICE, dtype),
        v_SKD.to(DEVICE, dtype),
        rows,
        context,
        rows_of,
    )


def committed(step: Step, row: int) -> Step:
    """Return a step with the row alone, after it and its ancestors moved from scratch to pages."""
    rows = step.rows
    batch_slot = int(rows.batch_slot_R[row])
    base = int(rows.base_R[row])
    last = int(rows.position_R[row])
    table_QP = rows.page_table_QP.clone()
    spare = (len(step.k_SKD) + PAGE - 1) // PAGE
    count = -(-(last + 1) // PAGE)
    more = (spare + count) * PAGE - len(step.k_SKD)
    kind, unread, scale_2KS = step.k_SKD.dtype, float("nan"), step.scale_2KS
    if scale_2KS is not None:
        kind, unread = torch.uint8, 0
        scale_2KS = pad(scale_2KS, (0, more), value=float("nan"))
    k_SKD, v_SKD = (
        pad(cache.view(kind), (0, 0, 0, 0, 0, more), value=unread)
        for cache in (step.k_SKD, step.v_SKD)
    )
    for page in range(count):
        if table_QP[batch_slot, page] < 0:
            table_QP[batch_slot, page] = spare + page
    for p in range(base, last + 1):
        to = int(table_QP[batch_slot, p // PAGE]) * PAGE + p % PAGE
        source = int(rows.path_RD[row, p - base])
        k_SKD[to], v_SKD[to] = k_SKD[source], v_SKD[source]
        if scale_2KS is not None:
            scale_2KS[..., to] = scale_2KS[..., source]
    alone = step.only([row])
    return replace(
        alone,
        k_SKD=k_SKD.view(step.k_SKD.dtype),
        v_SKD=v_SKD.view(step.v_SKD.dtype),
        scale_2KS=scale_2KS,
        rows=alone.rows._replace(
            base_R=torch.full_like(alone.rows.base_R, last + 1), page_table_QP=table_QP
        ),
    )
