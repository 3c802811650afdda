"""Strict numerics over a whole forward: a row's bits do not depend on batch, chunking, threads or
draft against committed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from tests.rows_of_one import Sequence, batch, certain_rows
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig, Rope
from tlt_server.models.decoder import Decoder
from tlt_server.models.environment import strict_environment
from tlt_server.models.numerics import BLOCKS, METHODS, MatmulMethod, Numerics

QWEN2 = "Qwen2ForCausalLM"
CONFIG = ModelConfig(
    architecture=QWEN2,
    vocab_size=259,
    hidden_size=256,
    intermediate_size=512,
    layers=3,
    heads=2,
    kv_heads=1,
    head_dim=128,
    max_position=512,
    norm_eps=1e-6,
    rope=Rope(),
    tied_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(),
)
TOKENS = torch.randint(0, CONFIG.vocab_size, (140,), generator=torch.Generator().manual_seed(2))


def build(numerics: Numerics, family: str = QWEN2) -> Decoder:
    config = replace(CONFIG, architecture=family)
    model = Decoder(config, numerics=numerics, feature_layers=(0, 1, 2))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters().values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.06)
    model.self_test()
    return model


class Padded(Numerics):
    """Libraries whose matmuls all fail the self-test, other than in blocks."""

    def _row_invariant(self, weight_KN, bias_N):
        return self.method is BLOCKS and super()._row_invariant(weight_KN, bias_N)


@pytest.fixture(params=["chosen", "padded"])
def numerics(request):
    return Numerics("strict") if request.param == "chosen" else Padded("strict")


@pytest.fixture(params=[QWEN2, "Qwen3ForCausalLM"])
def model(request, numerics):
    return build(numerics, request.param)


def in_chunks(model, sizes: list[int]) -> torch.Tensor:
    """Logits and features of TOKENS, side by side, computed in chunks of these sizes (the last one
    repeats).
    """
    sequence, found, start = Sequence(model, capacity=len(TOKENS)), [], 0
    while start < len(TOKENS):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        forward = sequence.extend(TOKENS[start : start + size])
        found.append(torch.cat([model.logits(forward.hidden_RH), forward.features_RF], dim=1))
        start += size
    return torch.cat(found)


def test_chunking_does_not_change_a_bit(model):
    expected = in_chunks(model, [1])
    for sizes in ([2], [7], [16], [33], [140], [64, 1, 1, 50, 3]):
        assert torch.equal(in_chunks(model, list(sizes)), expected), f"chunks of {sizes}"


def test_other_rows_in_the_batch_do_not_change_a_bit(model):
    expected = in_chunks(model, [140])
    cache = model.make_cache(64, 16, 8)
    sequences = [
        Sequence(model, 140, cache=cache, table_P=torch.arange(9 * b, 9 * b + 9).to(torch.int32))
        for b in range(5)
    ]
    lengths = [100, 17, 64, 3, 139]
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.extend(TOKENS[:length])
    parts = [
        sequence.rows(TOKENS[length : length + 1 + b])
        for b, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
    ]
    forward = model.forward(batch(parts), cache)
    found = torch.cat([model.logits(forward.hidden_RH), forward.features_RF], dim=1)
    pairs = zip(lengths, parts, strict=True)
    wanted = [expected[length : length + len(part)] for length, part in pairs]
    assert torch.equal(found, torch.cat(wanted))


def test_number_of_threads_does_not_change_a_bit(model):
    expected = in_chunks(model, [33])
    torch.set_num_threads(1)
    try:
        assert torch.equal(in_chunks(model, [33]), expected)
    finally:
        torch.set_num_threads(2)


def test_drafted_rows_have_the_bits_of_committed_ones(model):
    expected = in_chunks(model, [140])
    sequence = Sequence(model, capacity=160)
    sequence.extend(TOKENS[:62])
    # One certain row, then a chain of six drafts across a chunk edge.
    rows = certain_rows(TOKENS[62:69], 62, sequence.table_P, 16)
    scratch = torch.arange(6) + sequence.cache.scratch_start
    path_RD = torch.full((7, 6), -1, dtype=torch.int32)
    for draft in range(6):
        path_RD[draft + 1, : draft + 1] = scratch[: draft + 1]
    rows = replace(
        rows,
        kv_slot_R=torch.cat([rows.kv_slot_R[:1], scratch]),
        base_B=torch.tensor([63], dtype=torch.int32),
        path_RD=path_RD,
    )
    forward = model.forward(rows, sequence.cache)
    found = torch.cat([model.logits(forward.hidden_RH), forward.features_RF], dim=1)
    assert torch.equal(found, expected[62:69])


def test_fast_numerics_report_a_skipped_self_test():
    numerics = Numerics("fast")
    build(numerics)
    assert numerics.tested == 0 and "in distribution" in numerics.describe()


def test_numerics_description_names_the_chosen_method(numerics):
    build(numerics)
    assert numerics.method is BLOCKS or not isinstance(numerics, Padded)
    assert numerics.describe().startswith(f"strict: {numerics.method.name} (MKL_CBWR=")


def test_the_self_test_takes_the_first_method_that_passes():
    class Second(Numerics):
        def _row_invariant(self, weight_KN, bias_N):
            return self.method in METHODS[1:]

    numerics = Second("strict")
    build(numerics)
    assert numerics.method is METHODS[1] and numerics.tested


@pytest.mark.parametrize("threads", [1, 2])
def test_every_row_count_gives_the_bits_of_all_rows_at_once(threads):
    """Every count from 1 to 512, of weights as wide and as tall as those of a small model."""
    generator = torch.Generator().manual_seed(3)
    numerics = Numerics("strict", threads=threads)
    weights = [
        (torch.randn(shape, generator=generator) / 16, None if bare else torch.ones(shape[1]))
        for shape, bare in (((256, 768), True), ((512, 256), False), ((33, 77), True))
    ]
    numerics.self_test(weights)
    for weight_KN, bias_N in weights:
        x_RK = torch.randn(520, len(weight_KN), generator=generator)
        all_RN = numerics.linear(x_RK, weight_KN, bias_N)
        for count in range(1, 513):
            start = count * 37 % (521 - count)
            found_RN = numerics.linear(x_RK[start : start + count], weight_KN, bias_N)
            assert torch.equal(found_RN, all_RN[start : start + count]), f"{count} rows"


def test_matmul_method_pads_rows_to_its_row_counts():
    calls = []

    def recorded(x_RK, weight_KN, bias_N):
        calls.append(len(x_RK))
        return x_RK @ weight_KN

    numerics, weight_KN = Numerics("strict"), torch.randn(4, 3)
    for method, expected in (
        (MatmulMethod("", recorded, min_rows=4), [4, 4, 5]),
        (MatmulMethod("", recorded, block=4), [4, 4, 4, 4]),
    ):
        calls.clear()
        numerics.method = method
        for rows in (1, 4, 5):
            x_RK = torch.randn(rows, 4)
            torch.testing.assert_close(numerics.linear(x_RK, weight_KN), x_RK @ weight_KN)
        assert calls == expected


def _split_among_threads(x_RK, weight_KN, bias_N):
    return x_RK @ weight_KN + (torch.get_num_threads() > 1)


def test_matmul_method_with_thread_dependent_bits_is_rejected(monkeypatch):
    """A rank has fewer threads than one alone. Of a large weight no row is computed by one thread,
    as it is in the test of rows.
    """
    weight_KN, module = torch.zeros(4096, 4096), "tlt_server.models.numerics"
    split = MatmulMethod("split", _split_among_threads)
    monkeypatch.setattr(f"{module}.METHODS", (split, METHODS[0]))
    numerics, before = Numerics("strict", threads=2), torch.get_num_threads()
    numerics.self_test([(weight_KN, None)])
    assert numerics.method is METHODS[0] and torch.get_num_threads() == before
    monkeypatch.setattr(f"{module}.METHODS", (split,))
    differ = "other bits with 2 threads than with 1.* lower --threads"
    with pytest.raises(StartupError, match=differ):
        numerics.self_test([(weight_KN, None)])


def test_library_without_a_strict_method_is_an_error_with_remedy():
    class Hopeless(Numerics):
        def _row_invariant(self, weight_KN, bias_N):
            return False

    with pytest.raises(StartupError, match="numerics: fast"):
        build(Hopeless("strict"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512bw avx512dq avx512vl", {"MKL_CBWR": "AVX512,STRICT"}),
        ("fpu avx2 avx512f", {"MKL_CBWR": "AVX2,STRICT"}),
        ("fpu sse2", {}),
    ],
)
def test_strict_environment_follows_the_processor(flags, expected):
    assert strict_environment(f"processor : 0\nflags\t\t: {flags}\n") == expected


def test_strict_environment_does_not_import_torch():
    code = "import sys; import tlt_server.models.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_slice_of_a_wide_weight_avoids_the_reference_kernel():
    """oneDNN has one for weights that are not dense; it took 800 times as long as a copy."""
    generator, numerics = torch.Generator().manual_seed(5), Numerics("strict")
    wide_KN, x_RK = torch.randn(256, 512, generator=generator), torch.randn(64, 256)
    weights = {"slice": wide_KN[:, 256:], "dense": wide_KN[:, 256:].contiguous()}
    seconds = {}
    for method in METHODS:
        numerics.method = method
        for name, weight_KN in weights.items():
            numerics.linear(x_RK, weight_KN)
            took = []
            for _ in range(20):
                started = time.perf_counter()
                numerics.linear(x_RK, weight_KN)
                took.append(time.perf_counter() - started)
            seconds[method.name, name] = min(took)  # the others may have waited for a core
    slow = [m.name for m in METHODS if seconds[m.name, "slice"] > 40 * seconds[m.name, "dense"]]
    assert not slow, seconds
