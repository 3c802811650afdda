"""`tlt bench attention [case ...]`: rotary embedding, KV write and paged attention of one layer,
by shape of step. Where flash-attn is installed, whole prompts are timed with that backend, too.

A graph holds many layers, each with its own KV cache, so that keys come from device memory as they
do between the weights of a real step. Floor: reading every key and value of every request once.
Qwen2.5-7B: 28 query heads, 4 KV heads of 128, bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_kernels.gpu.attention import PagedRows, allocate, attend, fill_plan
from tlt_kernels.gpu.rope import rope_store
from tlt_kernels.gpu.tensors import PAGE_SIZE, RowTable
from tlt_server.attention.flash import FlashPaged
from tlt_server.bench.micro import Call, Case, TimedCalls, each, floor_us, measure
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
    pages = step.requests * pages_each
    table_QP = torch.randperm(pages, dtype=torch.int32).view(step.requests, pages_each)
    position, path, kv_slot, depth = [], [], [], min(step.rows, CHAIN)
    for b in range(step.requests):
        for r in range(step.rows):
            mine: list[int] = []
            p = step.context - step.rows + r
            if not step.prompt:
                if r:
                    node = pages * PAGE_SIZE + b * step.rows + r
                    mine = [node - i for i in reversed(range((r - 1) % depth + 1))]
                p = step.context - 1 + len(mine)
            page_slot = int(table_QP[b, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE
            position.append(p)
            path.append(mine + [-1] * (depth - len(mine)))
            kv_slot.append(mine[-1] if mine else page_slot)

    def integers(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = PagedRows(
        integers(position),
        integers([b for b in range(step.requests) for _ in range(step.rows)]),
        integers([step.context] * len(position)),
        integers(path),
        table_QP.to(device),
    )
    return rows, integers(kv_slot), pages * PAGE_SIZE + len(position)


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
    if step.prompt and step.rows == step.context:
        timed["sdpa_us"] = TimedCalls(sdpa(step, layers, device), layers)
        if find_spec("flash_attn") is not None:
            q_RND = random(count, HEADS, WIDTH)
            timed["flash_us"] = TimedCalls(flash(step, rows, q_RND, cache), layers)
    fill_plan(rows, plan)
    items = {"row_items": plan.count_2[0].item(), "tile_items": plan.count_2[1].item()}
    return Case({"case": name}, timed, {"floor_us": floor_us(kv_bytes), **items})


def sdpa(step: LayerCase, layers: int, device: str) -> Call:
    q, k, v = (
        torch.randn(
            layers, step.requests, heads, step.context, WIDTH, device=device, dtype=torch.bfloat16
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def run() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            for i in range(layers):
                torch.nn.functional.scaled_dot_product_attention(
                    q[i], k[i], v[i], is_causal=True, enable_gqa=True
                )

    return run


def flash(step: LayerCase, rows: PagedRows, q_RND: Tensor, cache: Tensor) -> Call:
    """Return the backend `flash_attn`, its gathering of keys and values included."""
    backend = FlashPaged(
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=WIDTH,
        context=step.context,
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

    def run() -> None:
        for keys, values in cache:
            planned(q_RND, keys, values)

    return run


def cases(names: Iterable[str], tile: int) -> Iterator[Case]:
    torch.manual_seed(0)
    for name in names:
        yield case_of(name, SHAPES[name], tile)


def run(args: argparse.Namespace) -> int:
    if unknown := [name for name in args.case if name not in SHAPES]:
        raise StartupError(f"no case {unknown[0]!r}; there are {', '.join(SHAPES)}")
    return measure(args, "attention", cases(args.case or SHAPES, args.tile))
