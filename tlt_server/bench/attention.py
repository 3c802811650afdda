"""`tlt bench attention [case ...]`: rotary embedding, KV write and paged attention of one layer,
by shape of step.

A graph holds many layers, each with its own KV cache, so that keys come from device memory as they
do between the weights of a real step. Floor: reading every key and value of every request once.
Qwen2.5-7B: 28 query heads, 4 KV heads of 128, bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_kernels.gpu.attention import PagedRows, allocate, attend, fill_plan
from tlt_kernels.gpu.rope import rope_store
from tlt_kernels.gpu.tensors import PAGE_SIZE
from tlt_server.bench.micro import Case, TimedCalls, each, floor_us, measure, row_of
from tlt_server.errors import StartupError

HEADS, KV_HEADS, WIDTH = 28, 4, 128
CACHED_BYTES = 400_000_000  # KV cache of all layers, of which there are 4 to 96
CHAIN = 8  # nodes of a draft path
PLANS = 50  # in a graph


class LayerCase(NamedTuple):
    requests: int
    context: int
    rows: int  # per request
    prompt: bool = False


SHAPES = {
    "b1 640": LayerCase(1, 640, 1),
    "b1 16k": LayerCase(1, 16384, 1),
    "b1 tree32 640": LayerCase(1, 640, 32),
    "b1 tree32 16k": LayerCase(1, 16384, 32),
    "b8 chain8 640": LayerCase(8, 640, 8),
    "b32 chain8 400": LayerCase(32, 400, 8),
    "b64 400": LayerCase(64, 400, 1),
    "b256 400": LayerCase(256, 400, 1),
    "b256 640": LayerCase(256, 640, 1),
    "prefill 8x2048": LayerCase(8, 2048, 2048, True),
    "prefill 64 of 16k": LayerCase(1, 16384, 64, True),
}


def rows_of(step: LayerCase, device: str) -> tuple[PagedRows, Tensor, int]:
    """Return the step's rows, the KV slots that they write, and the cache's slots. Drafts are
    chains below the root, each node in scratch.
    """
    pages_each = -(-(step.context + step.rows) // PAGE_SIZE)
    pages, depth = step.requests * pages_each, min(step.rows, CHAIN)
    table_QP = torch.randperm(pages, dtype=torch.int32).view(step.requests, pages_each)
    request_R = torch.arange(step.requests).repeat_interleave(step.rows)
    row_R = torch.arange(step.rows).repeat(step.requests)
    scratch_R = pages * PAGE_SIZE + torch.arange(len(row_R))
    above_R = torch.where(row_R > 0, (row_R - 1) % depth + 1, 0) * (not step.prompt)
    position_R = step.context - 1 + above_R
    if step.prompt:
        position_R = step.context - step.rows + row_R
    ago_RD = above_R[:, None] - 1 - torch.arange(depth)
    path_RD = torch.where(ago_RD >= 0, scratch_R[:, None] - ago_RD, -1)
    slot_R = table_QP[request_R, position_R // PAGE_SIZE] * PAGE_SIZE + position_R % PAGE_SIZE
    kv_slot_R = torch.where(above_R > 0, scratch_R, slot_R)
    context_R = torch.full_like(row_R, step.context)
    numbers = (position_R, request_R, context_R, path_RD, table_QP, kv_slot_R)
    *rows, kv_slot_R = (each.to(device, torch.int32) for each in numbers)
    return PagedRows(*rows), kv_slot_R, pages * PAGE_SIZE + len(row_R)


def case_of(
    name: str, step: LayerCase, tile: int, device: str = "cuda", layers: int | None = None
) -> Case:
    rows, kv_slot_R, kv_slots = rows_of(step, device)
    count, kv_bytes = len(kv_slot_R), step.requests * step.context * KV_HEADS * WIDTH * 4
    layers = layers or max(4, min(96, CACHED_BYTES // kv_bytes))

    # Triton's interpreter has no bfloat16 constants.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    cache = random(layers, 2, kv_slots, KV_HEADS, WIDTH)
    qkv_RX = random(count, (HEADS + 2 * KV_HEADS) * WIDTH)
    angle = torch.randn(step.context + 64, WIDTH // 2, device=device)
    plan = allocate(
        rows=count,
        context=step.context + 16,
        heads=HEADS,
        kv_heads=KV_HEADS,
        width=WIDTH,
        device=device,
        tiles=step.rows > 1,
        tile=tile,
    )
    rotate = partial(rope_store, qkv_RX, rows.position_R, kv_slot_R, angle.cos(), angle.sin())

    def rope(keys: Tensor, values: Tensor) -> Tensor:
        return rotate(keys, values, heads=HEADS)

    def all_layers() -> None:
        fill_plan(rows, plan)
        for keys, values in cache:
            q_RND = rope(keys, values)
            attend(q_RND, keys, values, rows, plan, first=0, scale=WIDTH**-0.5)

    timed = {
        "us": TimedCalls(all_layers, layers),
        "rope_us": each([partial(rope, *layer) for layer in cache], layers),
        "plan_us": each([partial(fill_plan, rows, plan)], PLANS),
    }
    fill_plan(rows, plan)
    items = {"row_items": plan.count_2[0].item(), "tile_items": plan.count_2[1].item()}
    return Case({"case": name}, timed, {"floor_us": floor_us(kv_bytes), **items})


def cases(names: Iterable[str], tile: int) -> Iterator[Case]:
    torch.manual_seed(0)
    for name in names:
        yield case_of(name, SHAPES[name], tile)


def run(args: argparse.Namespace) -> int:
    if unknown := [name for name in args.case if name not in SHAPES]:
        raise StartupError(f"no case {unknown[0]!r}; there are {', '.join(SHAPES)}")
    return measure(args, "attention", map(row_of, cases(args.case or SHAPES, args.tile)))
