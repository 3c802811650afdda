"""The demo pair on a real GPU, bfloat16, captured: nothing that the engine may decide changes a
token or a bit of a log-prob.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable
from tests.engine.tiny import Shape, write_eagle1
from tests.unit.test_distribution import P_LOWEST, p_value
from tlt_server.bench.engines import adopt
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.gpu.steps.extend import Extend
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.gpu.matmuls import FEW_ROWS
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, Sampling, Strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GIB = 2**30
Bits = dict[str, tuple[list[int], bytes]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions of the pair that can be pushed, in the type they are served in."""
    root = tmp_path_factory.mktemp("pair")
    generator = torch.Generator().manual_seed(1)
    for name, scale in (("base", 0.0), ("new", 0.003)):
        shutil.copytree(TARGET, root / name)
        tensors = load_file(TARGET / "model.safetensors")
        moved = {
            k: (t.float() + scale * torch.randn(t.shape, generator=generator)).to(torch.bfloat16)
            for k, t in tensors.items()
        }
        save_file(moved, root / name / "model.safetensors")
    return root


@pytest.fixture(scope="module")
def settings(root: Path) -> EngineSettings:
    return EngineSettings(
        model=str(root / "base"),
        drafter=str(DRAFTER),
        policy="goodput",
        device="cuda",
        dtype="bfloat16",
        attention="triton",
        kv_memory_mb=2048,
        max_model_len=512,
        max_running=64,
        max_rows=512,
        weight_root=str(root),
    )


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Iterator[Pushable]:
    yield Pushable(settings)


def requests() -> list[GenerateRequest]:
    """64, of all kinds of device sampling, a few never speculated on."""
    kinds = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.9},
        {"temperature": 0.5, "min_p": 0.05},
        {"repetition_penalty": 1.05, "presence_penalty": 0.1},
        {"frequency_penalty": 0.3, "logit_bias": {5: 1.5}, "min_tokens": 12, "prompt_logprobs": 1},
    ]
    asked = problems_as_requests(TARGET, 64, group=4, seed=0, max_tokens=48)
    return [
        msgspec.structs.replace(
            r, sampling=msgspec.structs.replace(r.sampling, **kinds[i % 7]), sd=i % 16 != 7
        )
        for i, r in enumerate(asked)
    ]


def bits(
    engine: Pushable,
    asked: list[GenerateRequest],
    policy: str = "off",
    strategy: Strategy | None = None,
) -> Bits:
    adopt(engine.engine, SetPolicy(policy, strategy))
    said = engine.run(*asked)
    return {
        id: (tokens, np.array(logprobs, np.float32).tobytes())
        for id, (tokens, logprobs) in said.items()
    }


@pytest.fixture(scope="module")
def plain(engine: Pushable) -> Bits:
    return bits(engine, requests())


def assert_same(found: Bits, expected: Bits) -> None:
    tokens = sum(a != b for id in found for a, b in zip(found[id][0], expected[id][0], strict=True))
    assert tokens == 0, f"{tokens} tokens differ"
    logprobs = sum(
        int(
            (
                np.frombuffer(found[id][1], np.int32) != np.frombuffer(expected[id][1], np.int32)
            ).sum()
        )
        for id in found
    )
    assert logprobs == 0, f"{logprobs} log-probs differ in their bits"


def test_reachable_graphs_are_captured_within_their_memory(engine: Pushable, plain: Bits) -> None:
    """`plain` has run: keys of mixed steps are there already, and nothing of these was captured
    twice.
    """
    runner = engine.engine.runner
    graphs, keys = runner.graphs, runner.shapes.captured(engine.engine.choice.policy.strategies)
    assert all(key in graphs for key in keys)
    assert [key for key in graphs.bytes if key in set(keys)] == keys, (
        "from the largest to the smallest"
    )
    assert 0 < graphs.total_bytes < 2 * GIB


@pytest.mark.parametrize(
    "arm", ["eagle 7 4 32", "eagle 7 1 8", "eagle 7 4 16", "history 12 2 16", "beg", "goodput"]
)
@pytest.mark.parametrize("batch", [64, 7, 1])
def test_speculation_changes_no_bit(arm: str, batch: int, engine: Pushable, plain: Bits) -> None:
    drafter, *numbers = arm.split()
    policy, strategy = ("fixed", Strategy(drafter, *map(int, numbers))) if numbers else (arm, None)
    assert_same(
        bits(engine, requests()[:batch] if batch > 1 else requests()[5:6], policy, strategy), plain
    )
    if policy == "fixed":
        assert sum(o.accepted for outputs in engine.said.values() for o in outputs) > 0


def test_an_eagle1_drafter_changes_no_bit(
    settings: EngineSettings, plain: Bits, root: Path
) -> None:
    shape = Shape(vocab=512, hidden=256, layers=8, head_dim=128, mlp=512)
    drafter = write_eagle1(root / "eagle1", root / "base", shape=shape)
    engine = Pushable(replace(settings, drafter=str(drafter)))
    for strategy in (Strategy("eagle", 4, 2, 16), Strategy("eagle", 3, 1, 4)):
        assert_same(bits(engine, requests(), "fixed", strategy), plain)
        assert sum(o.accepted for outputs in engine.said.values() for o in outputs) > 0


@pytest.mark.parametrize("arm", ["off", "eagle 7 4 16", "history 12 2 16"])
def test_raw_logprobs_change_no_bit_and_steps_stay_captured(
    arm: str, engine: Pushable, plain: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, *numbers = arm.split()
    strategy = Strategy(drafter, *map(int, numbers)) if numbers else None
    asked = [
        msgspec.structs.replace(
            r,
            sampling=msgspec.structs.replace(
                r.sampling, logprobs=(0, 1, 20)[i % 3], raw_logprobs=i % 2 > 0
            ),
        )
        for i, r in enumerate(requests())
    ]
    launched: Counter[object] = Counter()
    sound = Extend.run
    monkeypatch.setattr(
        Extend, "run", lambda extend: launched.update([extend.key]) or sound(extend)
    )
    found = bits(engine, asked, "fixed" if strategy else "off", strategy)
    assert_same(found, plain)
    assert max(launched.values(), default=0) <= 2, (
        "once to run and once to record; then it is replayed"
    )
    assert (
        strategy is None
        or sum(o.accepted for r in asked if r.sampling.logprobs for o in engine.said[r.id]) > 0
    )
    for r in asked:
        tokens, logprobs = found[r.id][0], np.frombuffer(found[r.id][1], np.float32)
        raw = [x for output in engine.said[r.id] for x in output.raw_logprobs or []]
        top = [x for output in engine.said[r.id] for x in output.top_logprobs or []]
        assert len(raw) == len(tokens) * r.sampling.raw_logprobs
        assert len(top) == len(tokens) * (r.sampling.logprobs > 0)
        filtered = r.sampling.temperature != 0 and (
            r.sampling.top_k or r.sampling.top_p < 1 or r.sampling.min_p
        )
        edited = r.sampling.logit_bias or r.sampling.presence_penalty
        if raw and r.sampling.temperature in (0.0, 1.0) and not filtered and not edited:
            np.testing.assert_allclose(raw, logprobs, atol=1e-5, err_msg=r.id)
        for token, logprob, best in zip(tokens, logprobs, top, strict=False):
            among = dict(zip(best.token_ids, best.logprobs, strict=True))
            assert len(among) <= r.sampling.logprobs
            assert [*best.logprobs] == sorted(best.logprobs, reverse=True)
            assert filtered or len(among) == r.sampling.logprobs
            if token in among:
                assert abs(among[token] - logprob) < 1e-5
            else:
                assert len(among) == r.sampling.logprobs and logprob <= best.logprobs[-1] + 1e-5


def test_batch_and_chunks_change_no_bit(engine: Pushable, plain: Bits) -> None:
    scheduler = engine.engine.scheduler
    assert_same(bits(engine, requests()[:1]), plain)
    kept, scheduler.max_rows = scheduler.max_rows, 24
    try:
        assert_same(bits(engine, requests()[:12], "fixed", Strategy("eagle", 7, 4, 16)), plain)
    finally:
        scheduler.max_rows = kept


def test_bits_are_the_same_without_graphs_and_with_few_pages(
    settings: EngineSettings, plain: Bits
) -> None:
    scarce = Pushable(replace(settings, graphs=False, pages=32, max_running=12, max_rows=96))
    asked = requests()[:24]
    assert_same(bits(scarce, asked), plain)
    assert_same(bits(scarce, asked, "fixed", Strategy("eagle", 7, 4, 16)), plain)
    assert scarce.engine.gauges()["preemptions"] > 0 and not scarce.engine.runner.graphs.bytes


def test_graphs_follow_a_push_and_its_rollback(
    engine: Pushable, settings: EngineSettings, root: Path, plain: Bits
) -> None:
    model = engine.engine.runner.state.model
    where = {name: view.data_ptr() for name, view in model.parameters().items()}
    sums = engine.checksums()
    report = engine.push(root / "new", "v1")
    assert report.result == "committed"
    assert {
        name: view.data_ptr()
        for name, view in engine.engine.runner.state.model.parameters().items()
    } == where
    after = bits(engine, requests()[:16], "fixed", Strategy("eagle", 7, 1, 8))
    fresh = Pushable(replace(settings, model=str(root / "new"), graphs=False, max_running=16))
    assert_same(after, bits(fresh, requests()[:16]))
    assert after != {id: plain[id] for id in after}
    assert engine.roll_back("initial").result == "rolled_back" and engine.checksums() == sums
    assert_same(bits(engine, requests()[:16], "fixed", Strategy("eagle", 7, 1, 8)), plain)


def test_push_while_graphs_run_marks_the_token_of_the_change(
    engine: Pushable, root: Path, plain: Bits
) -> None:
    long = [
        msgspec.structs.replace(r, sampling=Sampling(max_tokens=200, ignore_eos=True))
        for r in requests()[:4]
    ]
    for r in long:
        engine.said.pop(r.id, None)
    adopt(engine.engine, SetPolicy("fixed", Strategy("eagle", 7, 1, 8)))
    # Staging takes longer than they run.
    assert engine.push(root / "new", "v2", in_flight="continue", commit=False).result == "staged"
    engine.submit(*long)
    engine.step(6)
    assert engine.engine.runner.in_flight and engine.commit("v2").result == "committed"
    engine.finish()
    for r in long:
        (_, _, first), (version, _, end) = engine.spans(r.id)
        assert version == "v2" and 0 < first < end == 200
    assert engine.roll_back("initial").result == "rolled_back"


def test_non_finite_weights_end_requests_with_one_typed_error(
    engine: Pushable, plain: Bits
) -> None:
    norm_H = engine.engine.runner.state.model.final_norm_H
    kept_H = norm_H.clone()
    norm_H.fill_(float("nan"))
    torch.cuda.synchronize()
    asked = requests()[:3]
    bits(engine, asked)
    norm_H.copy_(kept_H)
    torch.cuda.synchronize()
    for r in asked:
        last = engine.said[r.id][-1]
        assert last.finish_reason == "error"
        assert last.error is not None
        assert last.error[0] == "not_finite"
        assert "finite" in last.error[1]
    assert_same(bits(engine, asked), plain)


def test_too_many_kv_pages_are_refused_with_a_remedy(
    settings: EngineSettings, engine: Pushable
) -> None:
    with pytest.raises(StartupError, match=r"KV pages.*lower .*pages"):
        Pushable(replace(settings, pages=10**9, graphs=False))


def test_fast_numerics_sample_the_models_distribution(settings: EngineSettings) -> None:
    """Compare first tokens over seeds with the softmax in float64 of one row's fp32 logits. They
    are drawn in one batch, so by other matmuls.
    """
    many = 2 * FEW_ROWS  # the library computes what it may
    fast = Pushable(replace(settings, numerics="fast", graphs=False, max_running=many))
    assert "fast" in fast.info.numerics
    asked, draws, vocab = requests()[0], 3000, fast.info.vocab_size
    every = msgspec.structs.replace(
        asked, id="every", sampling=Sampling(max_tokens=1, logprobs=vocab, temperature=1.6)
    )
    fast.run(every)
    (top,) = [t for output in fast.said["every"] for t in output.top_logprobs or []]
    p = np.zeros(vocab)
    p[[*top.token_ids]] = np.exp(np.array(top.logprobs, np.float64))
    assert abs(p.sum() - 1) < 1e-4
    one = msgspec.structs.replace(asked, sampling=Sampling(max_tokens=1, temperature=1.6))
    said = fast.run(*[msgspec.structs.replace(one, id=f"d{i}", seed=i) for i in range(draws)])
    counts = np.bincount([tokens[0] for tokens, _ in said.values()], minlength=vocab)
    rare = p * draws < 5
    grouped_p = np.append(p[~rare], p[rare].sum())
    grouped = np.append(counts[~rare], counts[rare].sum())
    if grouped_p[-1] * draws < 5:  # too few to be told apart: into the last of the others
        grouped_p = np.append(grouped_p[:-2], grouped_p[-2:].sum())
        grouped = np.append(grouped[:-2], grouped[-2:].sum())
    assert len(grouped) > 2, "one token has it all; choose another prompt"
    assert p_value(grouped, grouped_p / grouped_p.sum()) > P_LOWEST
