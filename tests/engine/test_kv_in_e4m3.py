"""Engines with KV in e4m3, on the interpreter and on a CPU: neither speculation nor preemption nor
chunks nor company changes a bit, and both devices round alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import (
    PAGE,
    assert_agree,
    bits,
    checkpoints,
    choose,
    drafting,
    on_cpu,
    request,
)
from tests.engine.halting import done
from tests.engine.pushing import Pushable, cpu_settings
from tests.engine.tiny import write_target
from tests.engine.two_ranks import two_ranks
from tlt_kernels.reference import quantise_heads
from tlt_server.attention.rows import KVCache
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.layers import rounded_heads
from tlt_server.wire.commands import Sleep, WakeUp
from tlt_server.wire.records import Strategy

TREE, CHAIN = Strategy("eagle", 3, 2, 6), Strategy("eagle", 3, 1, 4)
REQUESTS = [request(0, 30, 8), request(1, 9, 8, temperature=0.0), request(2, 5, 8), request(3, 18)]
IDS = [each.id for each in REQUESTS]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        yield replace(checkpoints(tmp_path_factory.mktemp("kv")), kv_cache_dtype="fp8_e4m3")


def ran(settings: EngineSettings, *strategies: Strategy | None) -> Pushable:
    """Return an engine that has run the requests with each strategy, to the same bits."""
    engine, found = Pushable(settings), []
    for strategy in strategies or (None,):
        choose(engine, strategy)
        engine.said.clear()
        engine.run(*REQUESTS)
        found.append(bits(engine, IDS))
    assert all(each == found[0] for each in found)
    return engine


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Pushable:
    return ran(drafting(settings, "eagle", 3, 2, 6), None, TREE, CHAIN)


def test_cpu_rounds_as_a_gpu_does(settings: EngineSettings, engine: Pushable) -> None:
    cpu = ran(replace(on_cpu(settings), policy="fixed", sd_strategy=TREE.name), None, TREE, CHAIN)
    assert_agree(engine, cpu, IDS)
    for each in (engine, cpu):
        assert each.info.fingerprint.dtype == "float32, KV fp8_e4m3"
        plain = ran(replace(each.settings, kv_cache_dtype=None, policy="off", sd_strategy=""))
        assert bits(plain, IDS) != bits(each, IDS)


@pytest.mark.parametrize("changes", [{"max_rows": 5}, {"max_running": 1}, {"pages": 4}])
def test_chunks_company_and_preemption_change_no_bit_of_e4m3(
    changes: dict[str, int], settings: EngineSettings, engine: Pushable
) -> None:
    other = ran(replace(drafting(settings, "eagle", 3, 1, 4), **changes), CHAIN)
    assert bits(other, IDS) == bits(engine, IDS)
    assert (other.engine.gauges()["preemptions"] > 0) == ("pages" in changes)


def test_e4m3_of_mixed_versions_comes_back_after_a_sleep(settings: EngineSettings) -> None:
    """No single version could compute it again, so it is copied out and back."""
    found = []
    for sleeps in (False, True):
        engine = Pushable(settings)
        assert (
            engine.push(Path(str(settings.weight_root)) / "new", "v1", commit=False).result
            == "staged"
        )
        engine.submit(*REQUESTS)
        engine.step(4)
        assert engine.commit("v1").result == "committed"
        if sleeps:
            done(engine, Sleep("s", ("kv_cache",)))
            done(engine, WakeUp("w", ("kv_cache",)))
        engine.finish()
        assert [version for version, *_ in engine.spans("r1")] == ["initial", "v1"]
        found.append(bits(engine, IDS))
    assert found[0] == found[1]


def test_two_ranks_round_to_the_bits_of_one(tmp_path: Path) -> None:
    write_target(tmp_path / "base")
    settings = cpu_settings(tmp_path / "base", reduction_leaves=2, kv_cache_dtype="fp8_e4m3")
    with two_ranks(settings) as both:
        both.run(*REQUESTS)
        assert bits(both, IDS) == bits(ran(settings), IDS)


def test_heads_are_rounded_as_the_twin_quantises_them() -> None:
    x_RKD = torch.randn(40, 3, 16) * torch.exp2(8 * torch.randn(40, 3, 1))
    number_RKD, scale_RK = quantise_heads(x_RKD)
    assert torch.equal(rounded_heads(x_RKD), number_RKD.float() * scale_RK[:, :, None].float())


def test_saved_pages_hold_numbers_and_scales() -> None:
    cache = KVCache(
        layers=2, pages=4, page_size=PAGE, scratch=3, kv_heads=2, head_dim=8, quantised=True
    )
    assert cache.scale is not None and cache.k.dtype == E4M3
    assert cache.bytes_per_kv_slot == 2 * 2 * 2 * (8 + 4)
    for array in (cache.k, cache.v):
        array.copy_(torch.randn(array.shape))
    cache.scale.copy_(torch.randn(cache.scale.shape))
    kept = [each.clone() for each in (cache.k.float(), cache.v.float(), cache.scale)]
    saved = cache.save([2, 0])
    cache.free()
    cache.reclaim()
    cache.restore(saved, [1, 3])
    for mine, before in zip((cache.k.float(), cache.v.float()), kept, strict=False):
        for page, source in ((1, 2), (3, 0)):
            slots, of = (slice(each * PAGE, (each + 1) * PAGE) for each in (page, source))
            assert torch.equal(mine[:, slots], before[:, of])
            assert torch.equal(cache.scale[..., slots], kept[2][..., of])


def test_saved_pages_of_other_types_are_no_bytes() -> None:
    """Index operations take each element in turn, so as bytes they would take up to four times as
    long.
    """
    cache = KVCache(layers=2, pages=4, page_size=PAGE, scratch=3, kv_heads=2, head_dim=8)
    cache.k.copy_(torch.randn(cache.k.shape))
    before, saved = cache.k.clone(), cache.save([2])
    assert (saved.k.dtype, saved.scale) == (torch.float32, None)
    cache.restore(saved, [1])
    assert torch.equal(cache.k[:, PAGE : 2 * PAGE], before[:, 2 * PAGE : 3 * PAGE])
