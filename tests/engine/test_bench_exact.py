"""The exactness benchmark itself: its array covers every pair, it is green on a sound engine and
red on one moved ulp.
"""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests import processes
from tests.engine.tiny import VOCAB, Shape, write_alphabet, write_eagle, write_target
from tlt_server.bench.exact import compare, factors_of, killed_run
from tlt_server.bench.exact_plan import (
    KINDS,
    PLANS,
    PUSHED,
    STARTED,
    VERSIONS,
    ExactSize,
    covering_array,
    pages_for,
    pairs,
    varied,
)
from tlt_server.bench.exact_runs import ExactEngines, digest_of, rollout
from tlt_server.engine.settings import EngineSettings
from tlt_server.settings.server import KvDtypeName
from tlt_server.wire.records import GenerateRequest, Sampling

SIZE = ExactSize(requests=11, max_tokens=24, long=1, long_tokens=90, alone=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    root = tmp_path_factory.mktemp("tiny")
    return EngineSettings(
        model=str(write_alphabet(write_target(root / "target"))),
        device="cpu",
        drafter=str(write_eagle(root / "drafter")),
        kv_memory_mb=64,
    )


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    lengths = [SIZE.long_tokens] * SIZE.long + [SIZE.max_tokens] * (SIZE.requests - SIZE.long)
    plain = [
        GenerateRequest(
            id=f"r{i}",
            token_ids=[(7 * i + p) % (VOCAB - 1) for p in range(20)],
            seed=i,
            sampling=Sampling(max_tokens=length),
        )
        for i, length in enumerate(lengths)
    ]
    return [varied(request, i) for i, request in enumerate(plain)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", range(5))
def test_array_holds_every_pair_of_factor_levels(seed: int, device: str) -> None:
    factors = PLANS[device].factors
    array = covering_array(factors, seed)
    met = set().union(*(pairs(configuration) for configuration in array))
    wanted = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2)
        for x, y in itertools.product(xs, ys)
    }
    assert met == wanted
    assert len(array) <= 24 and covering_array(factors, seed) == array


def test_engine_takes_one_push_and_every_arm_both_versions() -> None:
    asked = argparse.Namespace(tensor_parallel=2, batch=None)
    for plan in (PLANS["cpu"], PLANS["cuda"]):
        ordered = plan.in_order(covering_array(factors_of(asked, plan.factors), 0))
        assert {(c["arm"], c["version"]) for c in ordered} == {
            *itertools.product(plan.arms, VERSIONS)
        }
        for batch, several in itertools.groupby(ordered, key=lambda c: c["batch"]):
            taken = [version for version, _ in itertools.groupby(c["version"] for c in several)]
            first = batch == plan.reference["batch"]
            assert taken == ([STARTED, PUSHED] if first else [PUSHED, STARTED])
    asked = argparse.Namespace(tensor_parallel=1, batch=7)
    found = covering_array(factors_of(asked, PLANS["cuda"].factors), 0)
    assert {c["batch"] for c in found} == {7} and "version" not in found[0]


def test_bench_is_green_when_sound_and_red_on_one_moved_ulp(
    base: EngineSettings, requests: list[GenerateRequest]
) -> None:
    engines = ExactEngines(base)
    reference, _ = rollout(engines, PLANS["cpu"].reference, requests, SIZE)
    scored = [r for r in requests if r.sampling.prompt_logprobs is not None]
    assert len(requests) >= len(KINDS) and scored, "every kind of request is compared"
    for request in scored:
        bits = reference[request.id]
        assert len(bits.logprobs) == 4 * (len(request.token_ids) - 1 + len(bits.tokens))
    configuration = {"arm": "eagle medium", "batch": 7, "pages": "scarce", "chunk": 16}
    found, counts = rollout(engines, configuration, requests, SIZE)
    sound = compare(configuration, reference, found, counts, 0.0)
    assert (sound.differing_tokens, sound.differing_logprobs) == (0, 0) and sound.tokens > 100
    found, counts = rollout(engines, configuration, requests, SIZE, fault=True)
    faulty = compare(configuration, reference, found, counts, 0.0)
    assert faulty.differing_tokens + faulty.differing_logprobs > 0
    assert digest_of(found) != digest_of(reference) == digest_of(dict(reversed(reference.items())))


@pytest.mark.parametrize("kv_cache_dtype", [None, "fp8_e4m3"])
def test_bench_is_green_in_fp8(
    kv_cache_dtype: KvDtypeName | None, requests: list[GenerateRequest], tmp_path: Path
) -> None:
    shape = Shape(hidden=128, layers=2, head_dim=64, mlp=128, features=(1, 0, 1))
    engines = ExactEngines(
        EngineSettings(
            model=str(write_alphabet(write_target(tmp_path / "target", shape=shape))),
            device="cpu",
            drafter=str(write_eagle(tmp_path / "drafter", shape=shape)),
            kv_memory_mb=64,
            quantization="fp8",
            kv_cache_dtype=kv_cache_dtype,
        )
    )
    reference, _ = rollout(engines, PLANS["cpu"].reference, requests, SIZE)
    configuration = {"arm": "eagle medium", "batch": 7, "pages": "scarce", "chunk": 16}
    found, counts = rollout(engines, configuration, requests, SIZE)
    seen = compare(configuration, reference, found, counts, 0.0)
    assert (seen.differing_tokens, seen.differing_logprobs) == (0, 0) and seen.tokens > 100
    assert engines.fingerprint is not None and engines.fingerprint.quantization == "fp8"


def test_pushed_version_on_two_ranks_is_exact_with_one_killed(
    base: EngineSettings, requests: list[GenerateRequest]
) -> None:
    engines = ExactEngines(replace(base, tensor_parallel=2, reduction_leaves=2))
    plain = [msgspec.structs.replace(request, lora="") for request in requests]
    expected = {PUSHED: rollout(engines, PLANS["cpu"].reference, plain, SIZE, version=PUSHED)[0]}
    configuration = {"arm": "eagle medium", "batch": 7, "chunk": 16, "version": PUSHED}
    killed = killed_run(engines, configuration, plain, SIZE, expected)
    assert killed.killed and killed.configuration["version"] == "pushed, killed"
    assert (killed.differing_tokens, killed.differing_logprobs) == (0, 0) and killed.tokens > 100
    engines.end()
    assert processes.ranks(os.getpid()) == []


@pytest.mark.long
def test_exact_bench_is_green_on_two_ranks_with_either_version(
    base: EngineSettings, requests: list[GenerateRequest]
) -> None:
    engines = ExactEngines(replace(base, tensor_parallel=2, reduction_leaves=2))
    plain = [msgspec.structs.replace(request, lora="") for request in requests]
    reference = PLANS["cpu"].reference
    configuration = {"arm": "eagle medium", "batch": 7, "pages": "scarce", "chunk": 16}
    expected = {
        version: rollout(engines, reference, plain, SIZE, version=version)[0]
        for version in engines.versions
    }
    assert len(expected) == 2 and expected[STARTED] != expected[PUSHED]
    for version, bits in expected.items():
        found, counts = rollout(engines, configuration, plain, SIZE, version=version)
        seen = compare(configuration, bits, found, counts, 0.0)
        assert (seen.differing_tokens, seen.differing_logprobs) == (0, 0) and seen.tokens > 100
    rollout(engines, reference, plain[:1], SIZE)
    assert processes.ranks(os.getpid()) == [], "those of the engine before have ended"


def test_scarce_pages_hold_the_longest_request_and_preempt(
    base: EngineSettings, requests: list[GenerateRequest]
) -> None:
    configuration = {"arm": "off", "batch": 7, "pages": "scarce", "chunk": 512}
    pages = pages_for(configuration, requests, SIZE, base.page_size)
    assert pages * base.page_size >= max(len(r.token_ids) + r.sampling.max_tokens for r in requests)
    _, counts = rollout(ExactEngines(replace(base, drafter="none")), configuration, requests, SIZE)
    assert counts["preemptions"] > 0
