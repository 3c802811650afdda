"""Kernels of ranks, compiled for compute capability 9.0 without a GPU: run it without Triton's
interpreter, `python -m tests.kernels.for_hopper`. It prints one JSON object: PTX and layouts of the
exchanges, by name, way and hidden size; layouts of each variant of the kernels that add floats on
one GPU and on ranks alike, by name and number; PTX of the streaming matmul of e4m3 operands, by
kind.
"""

from __future__ import annotations

import json
from itertools import product

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tlt_kernels.gpu import gemm_stream
from tlt_kernels.gpu.compiler import FixedTarget
from tlt_kernels.gpu.exchange import Way, WindowSizes, peer_windows, window_bytes
from tlt_kernels.gpu.gemm_tiles import LEAF_UNIT, Kind, stream_tile
from tlt_kernels.gpu.norm import add_rms_norm_into
from tlt_kernels.gpu.quantise import E4M3, Matrix, Quantised, empty_rows
from tlt_kernels.gpu.rope import rope_store
from tlt_kernels.gpu.sampling import BLOCK, block_words, blocks_of_rank, sample, sample_shared
from tlt_kernels.gpu.tensors import BatchSlots, RowTable
from tlt_kernels.gpu.variants import Variant, listed, preload

RANKS, ROWS, HIDDEN = 2, 4, (3584, 5120, 8192)
# Vocabulary and ranks, which own 38, 32 or 75 of its blocks; the last size is aligned to nothing.
SAMPLES = 16  # so that what a rank has found begins at 64 bytes
SAMPLED = ((151936, 1), (151936, 2), (151936, 4), (128256, 1), (128256, 4), (32003, 1), (32003, 2))
HEADS, KV_HEADS, WIDTH = 32, 8, 128


class Target(FixedTarget):
    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(Target(GPUTarget("cuda", 90, 32)))
    texts = {}
    for hidden, way, kind in product(HIDDEN, Way, ("", " quantised")):
        for variant in variants(hidden, way, quantised=bool(kind)):
            asm = preload(variant).asm
            name = f"{variant.kernel} {way.value} {hidden}{kind}"
            texts[name] = {"ptx": asm["ptx"], "layouts": asm["ttgir"]}
    alike = [
        *(each for vocabulary, ranks in SAMPLED for each in sampling(vocabulary, ranks)),
        *(each for ranks in (1, 4, 8) for each in rotation(ranks)),
    ]
    for number, variant in enumerate(dict.fromkeys(alike)):
        texts[f"{variant.kernel} {number}"] = {"layouts": preload(variant).asm["ttgir"]}
    for kind in (Kind.FOLDED, Kind.GATED):
        texts[f"_stream {kind.value}"] = {"ptx": preload(scaled_matmul(kind)).asm["ptx"]}
    print(json.dumps(texts))


def variants(hidden: int, way: Way, *, quantised: bool) -> list[Variant]:
    landing = way.landed(RANKS) * ROWS * hidden
    size = window_bytes(WindowSizes(ROWS * hidden, landing))
    whole = torch.zeros(size + 1024, dtype=torch.uint8)
    own = whole[-whole.data_ptr() % 1024 :][:size]
    peers = peer_windows(0, [own.data_ptr()] * RANKS, own, landing=landing)
    part, residual = peers.room(0).view(1, ROWS, hidden), torch.zeros(ROWS, hidden)
    weight, plain = (torch.zeros(*shape, hidden, dtype=torch.bfloat16) for shape in ((), (ROWS,)))
    out = empty_rows(ROWS, hidden, plain.device) if quantised else plain
    with listed() as found:
        peers.add_rms_norm(part, residual, weight, 1e-6, out_RH=out, way=way)
        if hidden == HIDDEN[0]:
            peers.gather(part, torch.zeros(RANKS, ROWS, hidden))
        add_rms_norm_into(out, torch.zeros(RANKS, ROWS, hidden), residual, weight, 1e-6)
    return [*found]


def sampling(vocabulary: int, ranks: int) -> list[Variant]:
    rows = RowTable.allocate(SAMPLES, 1, device="cpu")
    slots = BatchSlots.allocate(1, 8, hidden=1, device="cpu")
    row_S = torch.zeros(SAMPLES, dtype=torch.int32)
    with listed() as found:
        if ranks == 1:
            sample(torch.zeros(SAMPLES, vocabulary), row_S, rows, slots, filtered=False)
        else:
            own = blocks_of_rank(vocabulary, ranks)
            size = window_bytes(WindowSizes(block_words(SAMPLES, own)))
            whole = torch.zeros(size + 1024, dtype=torch.uint8)
            window = whole[-whole.data_ptr() % 1024 :][:size]
            peers = peer_windows(1, [window.data_ptr()] * ranks, window)
            logits = torch.zeros(SAMPLES, min(own * BLOCK, vocabulary - own * BLOCK))
            sample_shared(peers, logits, vocabulary, row_S, rows, slots)
    return [each for each in found if each.kernel != "gather"]


def rotation(ranks: int) -> list[Variant]:
    heads, kv_heads = HEADS // ranks, KV_HEADS // ranks
    qkv = torch.zeros(ROWS, (heads + 2 * kv_heads) * WIDTH, dtype=torch.bfloat16)
    at = torch.zeros(ROWS, dtype=torch.int32)
    cache = torch.zeros(ROWS, kv_heads, WIDTH, dtype=torch.bfloat16)
    angle, weight = torch.zeros(ROWS, WIDTH // 2), torch.zeros(WIDTH, dtype=torch.bfloat16)
    with listed() as found:
        rope_store(
            qkv, at, at, angle, angle, cache, cache, heads=heads, q_weight_D=weight,
            k_weight_D=weight, eps=1e-6,
        )  # fmt: skip
    return [*found]


def scaled_matmul(kind: Kind) -> Variant:
    gemm_stream.multiprocessors = lambda device: 132
    m, n, k = 128, 512, 512
    weight = Matrix(torch.zeros(n, k, dtype=E4M3), torch.zeros(n // LEAF_UNIT, k // LEAF_UNIT))
    is_gated = kind is Kind.GATED
    shape, dtype = ((1, m, n // 2), torch.bfloat16) if is_gated else ((2, m, n), torch.float32)
    tile = stream_tile(kind, m, n, 132, 4, 2, scaled=True)
    rows = Quantised(torch.zeros(m, k, dtype=E4M3), torch.zeros(k // LEAF_UNIT, m))
    with listed() as found:
        out = torch.zeros(shape, dtype=dtype)
        gemm_stream.multiply(
            tile, rows, weight, None, out, LEAF_UNIT, 1 if is_gated else 2, is_gated
        )
    [variant] = found
    return variant


if __name__ == "__main__":
    main()
