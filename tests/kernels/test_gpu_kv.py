"""KV in e4m3: what is stored, and the bits of attention over it, which are those over a cache that
holds the products of numbers and scales.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, gpu

# isort: split
import triton
import triton.language as tl

from tests.kernels.attention_steps import TILE, a_step, committed
from tests.kernels.test_gpu_attention import BIG, same_in_any_company
from tests.kernels.test_gpu_rope import noise
from tlt_kernels.gpu.attention_keys import load_heads, stored
from tlt_kernels.gpu.rope import rope_store
from tlt_kernels.reference import quantise_heads

E4M3 = torch.float8_e4m3fn
REQUESTS = [(70, 3), (1, 1), (300, 1), (129, 7), (280, -21), (126, 9, "chain")]


@triton.jit
def _load(cache, scale, out, S: tl.constexpr, D: tl.constexpr):
    s_S = tl.arange(0, S)
    inside_S = s_S < S - 1
    found_SD = load_heads(cache, scale, s_S, inside_S, 1, D, out.dtype.element_ty)
    tl.store(out + s_S[:, None] * D + tl.arange(0, D)[None, :], found_SD)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=gpu)])
def test_every_number_times_its_scale_is_exact(dtype: torch.dtype) -> None:
    number_SD = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 128).T.reshape(16, 16)
    number_SD = torch.where((number_SD & 0x7F) == 0x7F, 0, number_SD).view(E4M3)
    exponents = [-100, -60, -30, -21, -14, -9, -7, -5, -3, -2, -1, 0, 1, 3, 7, 0]
    scale_S = torch.tensor([2.0**x for x in exponents], device=DEVICE)
    out_SD = torch.empty(16, 16, dtype=dtype, device=DEVICE)
    _load[(1,)](stored(number_SD), scale_S, out_SD, S=16, D=16)
    expected_SD = number_SD.float() * scale_S[:, None]
    expected_SD[-1] = 0.0
    assert torch.equal(out_SD.float(), expected_SD)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=gpu)])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 1, 128), (6, 3, 32), (0, 2, 16)])
def test_what_is_stored_is_the_models_kv_quantised(dtype, heads, kv_heads, width):
    rows, kv_slots = 9, 20
    qkv_RX = noise(rows, (heads + 2 * kv_heads) * width) * torch.exp2(noise(rows, 1) * 9)
    qkv_RX[5] = 0.0
    position_R = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    kv_slot_R = torch.randperm(kv_slots)[:rows].to(DEVICE, torch.int32)
    angle = noise(rows, width // 2)
    table = (angle.cos(), angle.sin())
    plain = torch.zeros(2, kv_slots, kv_heads, width, dtype=dtype, device=DEVICE)
    kept = torch.zeros(2, kv_slots, kv_heads, width, dtype=E4M3, device=DEVICE)
    scale = torch.full((2, kv_heads, kv_slots), 7.0, device=DEVICE)
    given = (qkv_RX.to(dtype), position_R, kv_slot_R, *table)
    q_RND = rope_store(*given, *plain, heads=heads)
    assert_same_bits("q", rope_store(*given, *kept, heads=heads, scale_2KS=scale), q_RND)
    written = kv_slot_R.long()
    for i in range(2):
        number_RKD, scale_RK = quantise_heads(plain[i, written])
        expected = torch.zeros(kv_slots, kv_heads, width, dtype=torch.uint8, device=DEVICE)
        expected[written] = number_RKD.view(torch.uint8)
        assert torch.equal(kept[i].view(torch.uint8), expected)
        expected_KS = torch.full((kv_heads, kv_slots), 7.0, device=DEVICE)
        expected_KS[:, written] = scale_RK.T.float()
        assert torch.equal(scale[i], expected_KS)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_values_that_are_not_finite_show_in_the_scale(broken):
    """The last of the three heads is v."""
    qkv_RX, angle = noise(2, 3 * 32), noise(2, 16)
    qkv_RX[1, 70] = broken
    at_R = torch.arange(2, dtype=torch.int32, device=DEVICE)
    kept = torch.zeros(2, 2, 1, 32, dtype=E4M3, device=DEVICE)
    scale = torch.zeros(2, 1, 2, device=DEVICE)
    rope_store(qkv_RX, at_R, at_R, angle.cos(), angle.sin(), *kept, heads=1, scale_2KS=scale)
    assert scale.isnan().tolist() == [[[False, False]], [[False, True]]]


@pytest.mark.parametrize(("shape", "first"), [((7, 1, 32), 0), ((4, 2, 16), 1)])
def test_attention_over_e4m3_has_the_bits_of_the_products(shape, first):
    step = a_step(shape, REQUESTS, dead=2).in_e4m3()
    alive = (step.rows.position_R >= 0).nonzero()[:, 0]
    found = step.attend(first, tile=64)[alive]
    assert_same_bits("out_RND", found, step.of_products().attend(first, tile=64)[alive])
    assert_close("out_RND", found, step.expected(first)[alive], 1e-6)


def test_e4m3_row_has_its_bits_in_any_company_and_chunk():
    step = a_step((6, 2, 16), REQUESTS).in_e4m3()
    same_in_any_company(step, 0, [0, 2, 3, 4, 11, 20, 32, 36, 41], tile=TILE)


def test_e4m3_tree_row_has_the_bits_of_the_committed_row():
    step = a_step((7, 1, 32), [(126, 9), (128, 4), (252, 12, "chain")]).in_e4m3()
    together = step.attend(tile=TILE)
    for r in (1, 5, 8, 9, 14, 20, 24):
        assert_same_bits(f"row {r}", committed(step, r).attend()[0], together[r])


@gpu
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(28, 4, 128), (32, 8, 64)])
def test_e4m3_attention_on_the_gpu_has_the_bits_of_the_products(shape, tile):
    step = a_step(shape, BIG, dtype=torch.bfloat16).in_e4m3()
    found = step.attend(tile=tile)
    assert_same_bits("out_RND", found, step.of_products().attend(tile=tile))
    chosen = [0, 7, 31, 32, 33, 41, 300, 741, 742, 800, 871, 876, 884, 891]
    assert_close("out_RND", found[chosen], step.only(chosen).expected(), 5e-3)
    same_in_any_company(step, 0, chosen, tile=tile)
    for r in (5, 31, 36, 875, 883, 891):
        assert_same_bits(f"row {r} committed", committed(step, r).attend()[0], found[r])
