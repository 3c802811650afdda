"""Rotary embedding, KV write and paged attention of one layer, per shape of step: microseconds
inside a CUDA graph.

`tlt bench attention [case ...]` prints a table and, as its last line, the same as JSON. Where
flash-attn is installed, whole prompts are timed with that backend, too.
A graph holds many layers, each with its own KV cache, so that keys come from device memory as they
do between the weights of a real step. Floor: reading every key and value of every request once at
4.3 TB/s. Qwen2.5-7B: 28 query heads, 4 KV heads of 128, bfloat16.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt_kernels.gpu.attention import PagedRows, allocate, attend, fill_plan
from tlt_kernels.gpu.rope import rope_store
from tlt_kernels.gpu.tensors import PAGE_SIZE, RowTable
from tlt_server.attention.flash import FlashPaged
from tlt_server.bench.graph_time import microseconds, require_gpu
from tlt_server.bench.record import finish
from tlt_server.errors import StartupError

HEADS, KV_HEADS, WIDTH = 28, 4, 128
BANDWIDTH = 4.3e12


class AttentionCase(NamedTuple):
    requests: int
    context: int
    rows: int  # per request
    prompt: bool = False


CASES = {
    "b1 640": AttentionCase(1, 640, 1),
    "b1 16k": AttentionCase(1, 16384, 1),
    "b1 tree32 640": AttentionCase(1, 640, 32),
    "b1 tree32 16k": AttentionCase(1, 16384, 32),
    "b8 chain8 640": AttentionCase(8, 640, 8),
    "b32 chain8 400": AttentionCase(32, 400, 8),
    "b64 400": AttentionCase(64, 400, 1),
    "b256 400": AttentionCase(256, 400, 1),
    "b256 640": AttentionCase(256, 640, 1),
    "prefill 8x2048": AttentionCase(8, 2048, 2048, True),
    "prefill 64 of 16k": AttentionCase(1, 16384, 64, True),
}


def rows_of(case: AttentionCase, device: str) -> tuple[PagedRows, torch.Tensor, int]:
    """The step's rows, the slots they write, and the cache's slots."""
    pages_each = -(-(case.context + case.rows) // PAGE_SIZE)
    pages = case.requests * pages_each
    table_QP = torch.randperm(pages, dtype=torch.int32).view(case.requests, pages_each)
    position, base, path, kv_slot, depth = [], [], [], [], min(case.rows, 8)
    for b in range(case.requests):
        for r in range(case.rows):
            if case.prompt:
                p, mine, seen = case.context - case.rows + r, [], case.context
            else:  # chains of 8 below the root, each node in scratch
                mine = (
                    [
                        pages * PAGE_SIZE + b * case.rows + r - i
                        for i in reversed(range((r - 1) % depth + 1))
                    ]
                    if r
                    else []
                )
                p, seen = case.context - 1 + len(mine), case.context
            position.append(p)
            base.append(seen)
            path.append(mine + [-1] * (depth - len(mine)))
            kv_slot.append(
                mine[-1] if mine else int(table_QP[b, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE
            )
    batch_slot = [b for b in range(case.requests) for _ in range(case.rows)]

    def integers(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    kv_slots = pages * PAGE_SIZE + len(position)
    return (
        PagedRows(
            integers(position),
            integers(batch_slot),
            integers(base),
            integers(path),
            table_QP.to(device),
        ),
        integers(kv_slot),
        kv_slots,
    )


def sdpa(case: AttentionCase, layers: int) -> float:
    q, k, v = (
        torch.randn(
            layers, case.requests, heads, case.context, WIDTH, device="cuda", dtype=torch.bfloat16
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def run() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            for i in range(layers):
                torch.nn.functional.scaled_dot_product_attention(
                    q[i], k[i], v[i], is_causal=True, enable_gqa=True
                )

    return microseconds(run, 7) / layers


def flash(case: AttentionCase, rows: PagedRows, q_RND: Tensor, cache: Tensor) -> float:
    """Time the backend `flash_attn`, its gathering of keys and values included."""
    backend = FlashPaged(
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=WIDTH,
        context=case.context,
        device=q_RND.device,
        dtype=q_RND.dtype,
        numerics="fast",
    )
    count = len(q_RND)
    table = RowTable.allocate(count, 1)._replace(
        position_R=rows.position_R, batch_slot_R=rows.batch_slot_R
    )
    planned = backend.planned(count, prompt_rows=count)
    planned.plan(table, rows.page_table_QP)

    def layers() -> None:
        for keys, values in cache:
            planned(q_RND, keys, values)

    return microseconds(layers, 7) / len(cache)


def measure(case: AttentionCase, tile: int) -> dict[str, float]:
    rows, kv_slot_R, kv_slots = rows_of(case, "cuda")
    count, kv_bytes = len(kv_slot_R), case.requests * case.context * KV_HEADS * WIDTH * 4
    layers = max(4, min(96, 400_000_000 // kv_bytes))
    cache = torch.randn(layers, 2, kv_slots, KV_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    qkv_RX = torch.randn(count, (HEADS + 2 * KV_HEADS) * WIDTH, device="cuda", dtype=torch.bfloat16)
    angle = torch.randn(case.context + 64, WIDTH // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    plan = allocate(
        rows=count,
        context=case.context + 16,
        heads=HEADS,
        kv_heads=KV_HEADS,
        width=WIDTH,
        device="cuda",
        tiles=case.rows > 1,
        tile=tile,
    )
    scale = WIDTH**-0.5

    def layer(i: int) -> None:
        q_RND = rope_store(
            qkv_RX, rows.position_R, kv_slot_R, cos, sin, cache[i, 0], cache[i, 1], heads=HEADS
        )
        attend(q_RND, cache[i, 0], cache[i, 1], rows, plan, first=0, scale=scale)

    def only_rope() -> None:
        for i in range(layers):
            rope_store(
                qkv_RX, rows.position_R, kv_slot_R, cos, sin, cache[i, 0], cache[i, 1], heads=HEADS
            )

    def step() -> None:
        fill_plan(rows, plan)
        for i in range(layers):
            layer(i)

    def only_plan() -> None:
        for _ in range(50):
            fill_plan(rows, plan)

    result = {
        "us": microseconds(step) / layers,
        "rope_us": microseconds(only_rope) / layers,
        "plan_us": microseconds(only_plan) / 50,
    }
    result |= {
        "floor_us": kv_bytes / BANDWIDTH * 1e6,
        "row_items": plan.count_2[0].item(),
        "tile_items": plan.count_2[1].item(),
    }
    if case.prompt and case.rows == case.context:
        result["sdpa_us"] = sdpa(case, layers)
        if find_spec("flash_attn") is not None:
            q_RND = torch.randn(count, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
            result["flash_us"] = flash(case, rows, q_RND, cache)
    return result


def run(args: argparse.Namespace) -> int:
    if unknown := [name for name in args.case if name not in CASES]:
        raise StartupError(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    require_gpu()
    torch.manual_seed(0)
    found = []
    for name in args.case or CASES:
        measured = measure(CASES[name], args.tile)
        found.append({"case": name, **{key: round(value, 2) for key, value in measured.items()}})
        print(
            f"{name:20}" + "".join(f"  {key} {value:9.2f}" for key, value in measured.items()),
            flush=True,
        )
    finish(args, {"bench": "attention", "rows": found}, on_gpu=True)
    return 0
