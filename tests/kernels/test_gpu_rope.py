"""The rotary kernel against its slow twin, and row by row against itself in company.

Tolerances: float32 sums of at most 128 products err by about 1e-7; bfloat16 outputs are rounded
once, 2^-9 at most per element.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, gpu
from tlt_kernels import reference
from tlt_kernels.gpu.rope import rope_store


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(
        DEVICE
    )


def run(
    module, dtype, rows, heads, kv_heads, width, heads_norm, *, chosen=None, tables=torch.float32
):
    chosen = list(range(rows)) if chosen is None else chosen
    kv_slots, positions = 3 * rows + 1, 64
    qkv_RX = noise(rows, (heads + 2 * kv_heads) * width).to(dtype)
    angle = noise(positions, width // 2)
    generator = torch.Generator().manual_seed(3)
    position_R = torch.randint(0, positions, (rows,), generator=generator, dtype=torch.int32).to(
        DEVICE
    )
    kv_slot_R = torch.randperm(kv_slots, generator=generator)[:rows].to(DEVICE, torch.int32)
    weights = (
        {"q_weight_D": noise(width, seed=4).to(dtype), "k_weight_D": noise(width, seed=5).to(dtype)}
        if heads_norm
        else {}
    )
    k_SKD, v_SKD = torch.full(
        (2, kv_slots, kv_heads, width), float("nan"), dtype=dtype, device=DEVICE
    )
    q_RND = module(
        qkv_RX[chosen].contiguous(),
        position_R[chosen],
        kv_slot_R[chosen],
        angle.cos().to(tables),
        angle.sin().to(tables),
        k_SKD,
        v_SKD,
        heads=heads,
        eps=1e-6,
        **weights,
    )
    return q_RND, k_SKD, v_SKD, kv_slot_R[chosen]


@pytest.mark.parametrize("heads_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(2, 1, 128), (6, 3, 32), (0, 2, 16), (7, 1, 64)]
)
def test_rope_store_matches_its_twin(heads, kv_heads, width, heads_norm):
    found = run(rope_store, torch.float32, 9, heads, kv_heads, width, heads_norm)
    expected = run(
        reference.rope_store,
        torch.float64,
        9,
        heads,
        kv_heads,
        width,
        heads_norm,
        tables=torch.float64,
    )
    if heads:
        assert_close("q_RND", found[0], expected[0], 1e-6)
    for name, one, two in zip(("k_SKD", "v_SKD"), found[1:3], expected[1:3], strict=True):
        assert torch.equal(one.isnan(), two.isnan()), f"{name}: other slots were written"
        assert_close(name, one[found[3].long()], two[found[3].long()], 1e-6)


def test_dead_row_writes_only_its_own_kv_slot():
    qkv_RX, tables = noise(2, 3 * 32), noise(4, 16)
    k_SKD, v_SKD = torch.full((2, 5, 1, 32), float("nan"), device=DEVICE)
    position_R = torch.tensor([-1, 3], dtype=torch.int32, device=DEVICE)
    kv_slot_R = torch.tensor([4, 1], dtype=torch.int32, device=DEVICE)
    q_RND = rope_store(
        qkv_RX, position_R, kv_slot_R, tables.cos(), tables.sin(), k_SKD, v_SKD, heads=1
    )
    assert not q_RND.isnan().any()
    for name, cache in (("k_SKD", k_SKD), ("v_SKD", v_SKD)):
        assert cache.isnan().all(-1).all(-1).tolist() == [True, False, True, True, False], name


@gpu
@pytest.mark.parametrize("heads_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(28, 4, 128), (32, 8, 64), (0, 4, 128)])
def test_rope_row_has_the_same_bits_alone_and_batched(heads, kv_heads, width, heads_norm):
    company = run(rope_store, torch.bfloat16, 33, heads, kv_heads, width, heads_norm)
    truth = run(
        reference.rope_store,
        torch.float64,
        33,
        heads,
        kv_heads,
        width,
        heads_norm,
        tables=torch.float64,
    )
    if heads:
        assert company[0].dtype == torch.bfloat16
    assert_close("k_SKD", company[1][company[3].long()], truth[1][truth[3].long()], 1e-2)
    for r in (0, 7, 32):
        alone = run(rope_store, torch.bfloat16, 33, heads, kv_heads, width, heads_norm, chosen=[r])
        kv_slot = int(alone[3])
        assert_same_bits(f"q of row {r}", alone[0][0], company[0][r])
        assert_same_bits(f"k of row {r}", alone[1][kv_slot], company[1][kv_slot])
        assert_same_bits(f"v of row {r}", alone[2][kv_slot], company[2][kv_slot])
