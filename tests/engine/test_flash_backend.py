"""The `flash_attn` backend against the slow twin, with a library of one function in its place, and
with the real one where there is one.

Caches are NaN wherever no row may look. Tolerance: queries, keys, weights and outputs are rounded
to 2^-11 (float16) or 2^-8 (bfloat16).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.tiny import write_target
from tests.kernels.test_gpu_attention import Step, a_step
from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, gpu

# isort: split
from tlt_kernels.gpu.tensors import RowTable
from tlt_server.attention import GPU_BACKENDS, flash
from tlt_server.attention.flash import LARGE, FlashPaged, Run, parts_of, runs_of
from tlt_server.attention.gpu import TritonPaged
from tlt_server.engine.gpu.device import Interpreted
from tlt_server.engine.gpu.steps.buckets import PROMPT_SIZES
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig

SHAPES = [(7, 1, 32), (4, 2, 16)]
DECODING = [(70, 3), (1, 1), (129, 5)]  # trees and plain decoding
PROMPTS = [
    (300, -220),
    (17, -17),
    (70, -1),
    (200, -90),
]  # chunks after cached prefixes, and whole prompts
PROMPT_ROWS_HERE = LARGE + 128  # a step with PROMPTS: the rest are dead
DEAD = PROMPT_ROWS_HERE - sum(-count for _, count in PROMPTS)


class Library:
    """The interface that the backend may rely on: packed sequences, grouped heads, a
    causal mask that ends at the bottom right.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # sequences, keys

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, None]:
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert q.dim() == 3
        assert k.shape == v.shape
        assert q.shape[2] == k.shape[2]
        assert q.shape[1] % k.shape[1] == 0
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1
        assert {t.device for t in (q, k, v, cu_seqlens_q, cu_seqlens_k)} == {q.device}
        for cu, tokens, most in ((cu_seqlens_q, q, max_seqlen_q), (cu_seqlens_k, k, max_seqlen_k)):
            assert cu.dtype == torch.int32 and cu.is_contiguous() and cu.shape == cu_seqlens_q.shape
            assert cu[0] == 0
            assert cu[-1] == len(tokens)
            assert type(most) is int
            assert most == cu.diff().max()
            assert cu.diff().min() >= 0
        assert causal and softmax_scale == q.shape[2] ** -0.5
        self.calls.append((len(cu_seqlens_q) - 1, len(k)))
        group, out = q.shape[1] // k.shape[1], torch.zeros_like(q)
        for (q0, q1), (k0, k1) in zip(
            pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True
        ):
            key, value = (t[k0:k1].float().repeat_interleave(group, dim=1) for t in (k, v))
            score = torch.einsum("qnd,knd->nqk", q[q0:q1].float(), key) * softmax_scale
            seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q.device).tril(
                k1 - k0 - (q1 - q0)
            )
            # A row without keys is 0.
            weight = torch.softmax(score.masked_fill(~seen, -torch.inf), dim=-1).nan_to_num(0.0)
            out[q0:q1] = torch.einsum("nqk,knd->qnd", weight, value).to(q.dtype)
        return out, None


@pytest.fixture
def library(monkeypatch) -> Library:
    library, module = Library(), ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = library.flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return library


def arguments(step: Step, **others: object) -> dict:
    _, heads, width = step.q_RND.shape
    return {
        "heads": heads,
        "kv_heads": step.k_SKD.shape[1],
        "head_dim": width,
        "context": step.context,
        "device": torch.device(DEVICE),
        "dtype": step.q_RND.dtype,
        "numerics": "fast",
        **others,
    }


def a_mixed_step(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    decoding=DECODING,
    prompts=PROMPTS,
    dead: int = DEAD,
) -> Step:
    """Decode and tree rows, the last of which is dead, then prompt rows, the last of which are
    dead.
    """
    step = a_step(shape, [*decoding, *prompts], dtype=dtype, dead=dead)
    last = sum(count for _, count in decoding) - 1
    if decoding:
        step.rows.position_R[last], step.rows.batch_slot_R[last], step.rows.base_R[last] = (
            -1,
            len(step.rows.page_table_QP) - 1,
            0,
        )
    return step


def attend(backend: object, step: Step, prompt_rows: int, first: int = 0) -> Tensor:
    paged, none_R = step.rows, torch.full_like(step.rows.position_R, -1)
    planned = backend.planned(len(none_R), prompt_rows=prompt_rows)
    planned.plan(
        RowTable(
            none_R,
            paged.position_R,
            none_R,
            paged.batch_slot_R,
            paged.base_R,
            paged.path_RD,
            none_R,
        ),
        paged.page_table_QP,
    )
    layers = []
    for _ in range(2):
        if DEVICE == "cuda":
            # Triton's rows read the plan before they wait; in a step, other kernels lie between.
            torch.cuda.synchronize()
        layers.append(planned(step.q_RND, step.k_SKD, step.v_SKD, first=first))
    assert_same_live_rows("a second layer", layers[1], layers[0], step)
    return layers[0]


def by_flash(step: Step, first: int = 0) -> Tensor:
    return attend(FlashPaged(**arguments(step)), step, PROMPT_ROWS_HERE, first)


def assert_same_live_rows(name: str, found: Tensor, expected: Tensor, step: Step) -> None:
    alive_R = step.rows.position_R >= 0
    assert_same_bits(name, found[alive_R].float(), expected[alive_R].float())


def assert_like_the_twin(found: Tensor, step: Step, first: int, tolerance: float) -> None:
    alive_R = (step.rows.position_R >= 0).cpu()
    assert_close("out_RND", found.cpu()[alive_R], step.expected(first).cpu()[alive_R], tolerance)
    unseeing_R = alive_R & (step.rows.position_R.cpu() < first)
    assert not found.cpu()[unseeing_R].any(), "rows without keys are not 0"


@pytest.mark.parametrize("first", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 180))])
@pytest.mark.parametrize("shape", [SHAPES[0], pytest.param(SHAPES[1], marks=pytest.mark.long)])
def test_large_step_matches_the_twin_and_reads_visible_kv_only(library, shape, first):
    step = a_mixed_step(shape, torch.float16)
    assert_like_the_twin(by_flash(step, first), step, first, 1e-3)
    assert library.calls == [(len(PROMPTS), sum(max(known - first, 0) for known, _ in PROMPTS))] * 2


def test_step_with_only_prompt_rows_matches_the_twin(library):
    step = a_mixed_step(SHAPES[1], torch.bfloat16, decoding=[])
    assert_like_the_twin(by_flash(step), step, 0, 6e-3)


def test_flash_gathers_keys_for_a_bounded_group_of_requests(library, monkeypatch):
    step = a_mixed_step(SHAPES[1], torch.float16, decoding=[])
    together = by_flash(step)
    # 280 keys and values of 2 heads of 16 in two bytes.
    monkeypatch.setattr(flash, "GATHERED", 280 * 2 * 2 * 16 * 2)
    library.calls.clear()
    assert_same_live_rows("out_RND", by_flash(step), together, step)
    assert library.calls == [(1, 300), (2, 87), (1, 200)] * 2


def test_step_without_prompt_rows_matches_twin_without_flash(library):
    step = a_mixed_step(SHAPES[1], torch.float16, prompts=[], dead=PROMPT_ROWS_HERE)
    assert_like_the_twin(by_flash(step), step, 0, 1e-3)
    assert not library.calls


@pytest.mark.long
def test_captured_step_sizes_use_triton_attention_bit_for_bit(library):
    assert LARGE >= PROMPT_SIZES[-1]  # a captured plan could not wait for the device
    step = a_mixed_step(SHAPES[1], torch.float16, prompts=[(40, -20)], dead=0)
    expected = attend(TritonPaged(**arguments(step)), step, 20)
    found = attend(FlashPaged(**arguments(step)), step, 20)
    assert_same_live_rows("out_RND", found, expected, step)
    assert not library.calls


def test_prompt_runs_end_at_the_next_request_or_a_dead_row():
    position_P = np.array([5, 6, 7, 0, 8, 9, -1], np.int32)
    batch_slot_P = np.array([2, 2, 2, 0, 1, 1, 3], np.int32)
    runs = runs_of(position_P, batch_slot_P)
    assert runs == [Run(0, 3, 2, 8), Run(3, 1, 0, 1), Run(4, 2, 1, 10)]
    assert [len(part) for part in parts_of(runs, 9)] == [2, 1]
    assert runs_of(position_P[-1:], batch_slot_P[-1:]) == []


def refused(step: Step, **others: object) -> str:
    with pytest.raises(StartupError) as caught:
        GPU_BACKENDS.resolve("flash_attn")(**arguments(step, **others))
    return str(caught.value)


def test_flash_refuses_unsupported_settings_with_a_remedy(library, monkeypatch):
    step = a_step(SHAPES[1], [(3, 1)], dtype=torch.float16)
    assert "use attention triton, or numerics fast" in refused(step, numerics="strict")
    assert "dtype is float32" in refused(step, dtype=torch.float32)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)  # importing it fails
    message = refused(step)
    assert "use attention triton" in message and "pip install 'tlt-server[flash-attn]'" in message


def test_unsupported_flash_engine_fails_before_reading_weights(tmp_path):
    config = ModelConfig.read(write_target(tmp_path / "target"))
    settings = EngineSettings(
        model="/nowhere",
        device="interpreter",
        dtype="bfloat16",
        attention="flash_attn",
        numerics="strict",
        reduction_leaves=2,
    )
    with pytest.raises(StartupError, match="numerics is strict"):
        Interpreted(settings).load(config)


@gpu
@pytest.mark.skipif(
    find_spec("flash_attn") is None or DEVICE == "cpu",
    reason="the package flash-attn-4 and a GPU are needed",
)
@pytest.mark.parametrize("shape", [(28, 4, 128), (32, 8, 64)])
def test_real_flash_library_on_a_gpu_matches_the_twin(shape):
    step = a_mixed_step(shape, torch.bfloat16)
    for first in (0, 180):
        assert_like_the_twin(by_flash(step, first), step, first, 5e-3)
