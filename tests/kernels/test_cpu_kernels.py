"""Every CPU kernel against its slow twin, and bit for bit against itself in other company.

Tolerances are relative RMS errors against the twin in float64: sums of a few hundred float32
products err by about 1e-7, so 1e-6 leaves room for the order of summation and catches any missing
or misplaced term.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tlt_kernels import reference
from tlt_kernels.cpu import elementwise
from tlt_kernels.cpu.attention import CHUNK
from tlt_kernels.cpu.exponential import exp
from tlt_server.attention import BACKENDS
from tlt_server.attention.cpu import CpuPaged
from tlt_server.attention.rows import Rows

TOLERANCE = 1e-6
PAGE = 16


def assert_close(name: str, found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    difference, norm = (found.double() - expected.double()).norm(), expected.double().norm()
    error = (difference / norm.clamp_min(1e-30)).item()
    assert error <= tolerance, f"{name}: relative RMS error {error:.2e} over {tolerance:.0e}"


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 48), (17, 131), (33, 256)])
def test_norms_match_their_twins(rows, width):
    x_RH, weight_H = noise(rows, width) * 3, noise(width, seed=1)
    twin = reference.rms_norm(x_RH.double(), weight_H.double(), 1e-6)
    assert_close("rms_norm", elementwise.rms_norm(x_RH, weight_H, 1e-6), twin)
    residual_RH = noise(rows, width, seed=2)
    expected_residual_RH = residual_RH + x_RH
    out_RH = elementwise.add_rms_norm(x_RH, residual_RH, weight_H, 1e-6)
    assert torch.equal(residual_RH, expected_residual_RH)
    assert torch.equal(out_RH, elementwise.rms_norm(residual_RH, weight_H, 1e-6))


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 513), (33, 64)])
def test_gated_activation_matches_its_twin(rows, width):
    gate_up_RX = noise(rows, 2 * width) * 10
    gate_up_RX[0, :4] = torch.tensor([-200.0, 200.0, -0.0, 88.5])
    twin = reference.silu_mul(gate_up_RX.double())
    assert_close("silu_mul", elementwise.silu_mul(gate_up_RX), twin)


def test_exponential_is_within_two_ulp_and_keeps_nan():
    points = torch.linspace(-86.9, 87.9, 4001)
    found = torch.tensor([exp(x) for x in points.numpy()], dtype=torch.float64)
    assert ((found - points.double().exp()).abs() / points.double().exp()).max() < 2.5e-7
    assert exp(float("nan")) != exp(float("nan"))
    assert 0 <= exp(torch.tensor(float("-inf")).numpy()[()]) < 1e-37


@pytest.mark.parametrize("heads_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 1, 128), (6, 3, 10), (0, 2, 16)])
def test_rope_store_matches_its_twin(heads, kv_heads, width, heads_norm):
    rows, kv_slots = 9, 40
    qkv_RX = noise(rows, (heads + 2 * kv_heads) * width)
    angle = noise(64, width // 2)
    position_R, kv_slot_R = torch.randint(0, 64, (rows,)), torch.randperm(kv_slots)[:rows]
    names = ("q_weight_D", "k_weight_D") if heads_norm else ()
    weights = {name: noise(width, seed=seed) for seed, name in enumerate(names, 4)}

    def run(module, dtype):
        k_SKD, v_SKD = torch.full((2, kv_slots, kv_heads, width), float("nan"), dtype=dtype)
        rows, table = (position_R, kv_slot_R), (angle.cos().to(dtype), angle.sin().to(dtype))
        norms = {name: weight.to(dtype) for name, weight in weights.items()}
        given = (qkv_RX.to(dtype), *rows, *table, k_SKD, v_SKD)
        q_RND = module.rope_store(*given, heads=heads, eps=1e-6, **norms)
        return q_RND, k_SKD, v_SKD

    found, expected = run(elementwise, torch.float32), run(reference, torch.float64)
    assert_close("q_RND", found[0], expected[0])
    for name, one, two in zip(("k_SKD", "v_SKD"), found[1:], expected[1:], strict=True):
        assert torch.equal(one.isnan(), two.isnan()), f"{name}: other slots were written"
        assert_close(name, one[kv_slot_R], two[kv_slot_R])


@pytest.mark.parametrize("shape", [(20, 7), (3, 20, 2, 5), (20, 0)])
def test_copy_slots_matches_its_twin(shape):
    found = noise(*shape)
    source_C = torch.tensor([3, 4, 9, 3])
    target_C = torch.tensor([10, 11, 10, 0])
    expected = found.clone()
    elementwise.copy_kv_slots(found, source_C, target_C)
    reference.copy_kv_slots(expected, source_C, target_C)
    assert torch.equal(found, expected)


@dataclass
class Step:
    """Rows over a cache in which every KV slot that no row may see is NaN."""

    q_RND: Tensor
    k_SKD: Tensor
    v_SKD: Tensor
    rows: Rows

    def attend(self, first: int = 0, threads: int = 1) -> Tensor:
        heads, head_dim = self.q_RND.shape[1:]
        shape = {"heads": heads, "kv_heads": self.k_SKD.shape[1], "head_dim": head_dim}
        backend = CpuPaged(page_size=PAGE, threads=threads, **shape)
        return backend.attend(self.q_RND, self.k_SKD, self.v_SKD, self.rows, first)

    def only(self, chosen: list[int]) -> Step:
        names = ("token_R", "position_R", "kv_slot_R", "request_R", "path_RD")
        fields = {name: getattr(self.rows, name)[chosen].contiguous() for name in names}
        q_RND = self.q_RND[chosen].contiguous()
        return replace(self, q_RND=q_RND, rows=replace(self.rows, **fields))


def a_step(
    heads: int,
    kv_heads: int,
    width: int,
    lengths: tuple[int, ...] = (1, 64, 65, 130, 200),
    *,
    drafts: int = 5,
    certain: int = 3,
) -> Step:
    """Return a step. Each request has its last `certain` rows, then a chain of `drafts` rows in
    scratch, as on a path of a tree.
    """
    pages = sum(-(-length // PAGE) for length in lengths)
    scratch = pages * PAGE
    slots = scratch + len(lengths) * drafts + 3
    k_SKD, v_SKD = torch.full((2, slots, kv_heads, width), float("nan"))
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    table_BP = torch.full((len(lengths), -(-max(lengths) // PAGE)), -1, dtype=torch.int32)
    position, kv_slot, request, path, taken = [], [], [], [], 0
    for b, length in enumerate(lengths):
        count = -(-length // PAGE)
        table_BP[b, :count], taken = order[taken : taken + count], taken + count
        held = table_BP[b, torch.arange(length) // PAGE].long() * PAGE + torch.arange(length) % PAGE
        own = torch.arange(scratch + b * drafts, scratch + (b + 1) * drafts)
        for used in (held, own):
            k_SKD[used] = noise(len(used), kv_heads, width, seed=b)
            v_SKD[used] = noise(len(used), kv_heads, width, seed=50 + b)
        for p in range(max(0, length - certain), length + drafts):
            seen = own[: max(0, p - length + 1)].tolist()
            position.append(p)
            kv_slot.append(seen[-1] if seen else int(held[p]))
            request.append(b)
            path.append(seen + [-1] * (drafts - len(seen)))
    rows = Rows(
        torch.zeros(len(position), dtype=torch.int64),
        torch.tensor(position),
        torch.tensor(kv_slot),
        torch.tensor(request, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        table_BP,
        torch.tensor(path, dtype=torch.int32).view(len(position), drafts),
    )
    return Step(noise(len(position), heads, width) * 2, k_SKD, v_SKD, rows)


def keys_of(rows: Rows) -> reference.VisibleKeys:
    return reference.VisibleKeys(
        rows.position_R, rows.request_R, rows.base_B, rows.page_table_BP, rows.path_RD, PAGE
    )


SHAPES = [(2, 1, 128), (4, 4, 16), (6, 2, 10), (7, 1, 64)]


@pytest.mark.parametrize("first", [0, 1, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_matches_its_twin_and_reads_only_visible_kv(shape, first):
    step = a_step(*shape)
    expected_RND = reference.attend_rows(
        step.q_RND, step.k_SKD, step.v_SKD, keys_of(step.rows), first, shape[2] ** -0.5, double=True
    )
    found_RND = step.attend(first)
    assert found_RND.isfinite().all(), "an invisible NaN leaked"
    assert_close("out_RND", found_RND, expected_RND)


def test_torch_backend_agrees_with_the_cpu_backend():
    step = a_step(4, 2, 32)
    twin = BACKENDS.resolve("torch")(page_size=PAGE, heads=4, kv_heads=2, head_dim=32)
    expected_RND = twin.attend(step.q_RND, step.k_SKD, step.v_SKD, step.rows)
    assert_close("out_RND", step.attend(), expected_RND)


@pytest.mark.parametrize(("width", "group"), [(10, 1), (37, 3), (64, 2), (128, 7)])
def test_query_bits_do_not_depend_on_the_other_query_of_a_tile(width, group):
    step = a_step(group, 1, width, lengths=(500,), certain=40)
    together_RND = step.attend()
    for chosen in ([0, 1], [7, 20, 44], [44, 3], list(range(44, -1, -3))):
        assert torch.equal(step.only(chosen).attend(), together_RND[chosen])


@pytest.mark.parametrize("shape", SHAPES)
def test_row_has_the_same_bits_alone_batched_and_permuted(shape):
    step = a_step(*shape)
    together_RND = step.attend()
    for r in range(len(step.rows)):
        assert torch.equal(step.only([r]).attend()[0], together_RND[r]), f"row {r} alone"
    order = torch.randperm(len(step.rows)).tolist()
    assert torch.equal(step.only(order).attend(), together_RND[order])


def test_two_threads_give_the_bits_of_one_thread():
    step = a_step(8, 2, 64, lengths=(3000, 100, 2500), drafts=8, certain=40)
    backend = CpuPaged(page_size=PAGE, heads=8, kv_heads=2, head_dim=64, threads=2)
    found_RND = backend.attend(step.q_RND, step.k_SKD, step.v_SKD, step.rows)
    assert len(backend._pieces) == 2, "the step is too small to be cut"
    assert torch.equal(found_RND, step.attend(threads=1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, CHUNK - 3, CHUNK, 3 * CHUNK - 1])
def test_draft_path_rows_have_the_bits_of_committed_rows(shape, length):
    drafts = 5
    draft = a_step(*shape, lengths=(length,), drafts=drafts)
    heads, kv_heads, width = shape
    committed = a_step(*shape, lengths=(length + drafts,), drafts=0, certain=len(draft.rows))
    keys = [keys_of(rows).kv_slots(len(rows) - 1, 0) for rows in (draft.rows, committed.rows)]
    committed.k_SKD[keys[1]], committed.v_SKD[keys[1]] = draft.k_SKD[keys[0]], draft.v_SKD[keys[0]]
    committed.q_RND = draft.q_RND
    assert committed.rows.position_R.tolist() == draft.rows.position_R.tolist()
    assert torch.equal(committed.attend(), draft.attend())


@pytest.mark.parametrize("width", [64, 131])
def test_row_kernels_have_the_same_bits_in_any_batch(width):
    x_RH, weight_H = noise(33, width), noise(width, seed=1)
    gate_up_RX = noise(33, 2 * width)
    normed_RH = elementwise.rms_norm(x_RH, weight_H, 1e-6)
    gated_RI = elementwise.silu_mul(gate_up_RX)
    for r in (0, 5, 32):
        assert torch.equal(elementwise.rms_norm(x_RH[r : r + 1], weight_H, 1e-6)[0], normed_RH[r])
        assert torch.equal(elementwise.silu_mul(gate_up_RX[r : r + 1])[0], gated_RI[r])
