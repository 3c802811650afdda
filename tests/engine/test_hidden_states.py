"""States that the engine captures as sequences end: the bits that a prefill computes again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.capturing import Capturing
from tests.engine.gpu_engine import bits, drafting
from tests.engine.pushing import Pushable, perturbed
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.samples.hidden_states import Captured, decode_captured, key_of
from tlt_server.trainer.target.prefill import CpuPrefill
from tlt_server.trainer.target.recompute import Document, Recomputed
from tlt_server.wire.commands import Recompute
from tlt_server.wire.records import GenerateRequest, Sampling

PAGE = 16
SIBLINGS = 4
PROMPT = np.random.default_rng(5).integers(0, 200, 3 * PAGE + 5).tolist()


@pytest.fixture(scope="module")
def settings() -> EngineSettings:
    plain = EngineSettings(
        model=str(TARGET),
        drafter=str(DRAFTER),
        device="cpu",
        page_size=PAGE,
        pages=12,
        max_model_len=128,
        max_running=SIBLINGS,
        max_rows=48,
        threads=1,
    )
    return drafting(plain, "eagle", 4, 2, 7)


def asked(max_tokens: int = 40) -> list[GenerateRequest]:
    """Siblings that share a prompt of several pages; the last one is sent again later."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return [
        GenerateRequest(id=f"s{i}", token_ids=PROMPT, sampling=sampling, seed=70 + i, train=True)
        for i in range(SIBLINGS)
    ]


def test_captured_hidden_states_equal_those_of_a_prefill(
    settings: EngineSettings, tmp_path: Path
) -> None:
    plain, engine = Pushable(settings), Capturing(settings, tmp_path / "rings")
    work = asked()
    late = msgspec.structs.replace(work[-1], id="late", seed=99)
    for each in (plain, engine):
        each.run(*work)
        each.run(late)  # finds the prompt's pages
    ids = [r.id for r in (*work, late)]
    assert bits(engine, ids) == bits(plain, ids)
    gauges = engine.engine.gauges()
    assert gauges["preemptions"] > 0
    assert (engine.said["late"][0].cached_tokens or 0) >= 3 * PAGE
    assert any(output.drafted for id in ids for output in engine.said[id])

    engine.run(msgspec.structs.replace(work[0], id="rest", generated=engine.tokens("s0")[:9]))
    states = engine.taken()
    texts = [engine.text(r) for r in (*work, late)]
    assert states.keys() == {key_of(text) for text in texts}
    assert gauges["states_captured"] == len(texts) and gauges["states_s"] > 0
    layers = engine.engine.runner.model.feature_layers  # type: ignore[attr-defined]
    target = load_target(TARGET, numerics=Numerics("strict"), feature_layers=layers)
    tokens = [np.frombuffer(text, "<i4") for text in texts]
    documents = [Document(each, np.ones(len(each), np.bool_)) for each in tokens]
    again = Recomputed(CpuPrefill(target), documents)
    for number, text in enumerate(texts):
        captured, length = states[key_of(text)], len(tokens[number]) - 1
        part = again.read(number, 0, length)
        assert captured.length == length
        assert captured.features == part.features_TF.numpy().tobytes()
        assert captured.hidden == part.hidden_TH.numpy().tobytes()


def test_recorded_texts_are_recomputed_while_no_request_runs(
    settings: EngineSettings, tmp_path: Path
) -> None:
    engine, work = Capturing(settings, tmp_path / "rings"), asked()
    engine.run(*work)
    texts, before = [engine.text(r) for r in work], engine.taken()
    too_long = [1] * (12 * PAGE + 1)
    engine.engine.send(Recompute([*texts, np.array(too_long, "<i4").tobytes()]))
    engine.step()
    assert engine.engine.idle and engine.engine.use_idle_time()
    engine.step()
    assert not engine.engine.idle and engine.engine.last_cycle is not None
    late = msgspec.structs.replace(work[0], id="late")
    engine.run(late)  # ends it
    assert engine.said["late"][0].cached_tokens >= 3 * PAGE
    assert engine.tokens("late") == engine.tokens(work[0].id)
    assert engine.taken().keys() == {key_of(texts[0])}
    gauges = engine.engine.gauges()
    assert gauges["states_recomputed"] == 0 and gauges["preemptions"] > 0
    while engine.engine.use_idle_time():
        engine.finish()
    again = engine.taken()
    assert again == before and len(again) == len(texts)
    assert engine.engine.gauges()["states_recomputed"] == len(texts)
    assert engine.said.keys() == {*(r.id for r in work), "late"}


def test_states_without_memory_are_dropped_and_change_no_bit(
    settings: EngineSettings, tmp_path: Path
) -> None:
    engine = Capturing(settings, tmp_path / "rings", ring=2**18)
    work = asked(8)
    engine.run(*work)
    gauges = engine.engine.gauges()
    kept = len(engine.taken())
    assert 0 < gauges["states_captured"] == kept < SIBLINGS
    assert gauges["states_dropped"] == SIBLINGS - kept
    assert gauges["samples_offered"] == SIBLINGS and gauges["samples_dropped"] == 0


def test_states_of_two_weight_versions_are_not_captured(
    settings: EngineSettings, tmp_path: Path
) -> None:
    engine = Capturing(replace(settings, weight_root=tmp_path), tmp_path / "rings")
    other = perturbed(Path(settings.model), tmp_path / "other", seed=5)
    work = asked()[:1]
    engine.push(other, "second", commit=False)
    engine.submit(*work)
    engine.until(lambda: len(engine.said.get(work[0].id, [])) > 3, "tokens")
    engine.commit("second")
    engine.finish()
    assert not engine.taken() and engine.engine.gauges()["states_incomplete"] == 1
    again = msgspec.structs.replace(work[0], id="again")
    engine.run(again)
    assert [c.version for c in engine.taken().values()] == ["second"]


def test_an_engine_without_features_refuses_to_capture(
    settings: EngineSettings, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match="set it to 0"):
        without = replace(settings, drafter="history", policy="off", sd_strategy="")
        Capturing(without, tmp_path / "rings")


def test_captured_states_of_a_wrong_size_are_refused() -> None:
    widths = {"length": 2, "item": 4, "feature_width": 3, "hidden_width": 1}
    parts = {"features": bytes(24), "hidden": bytes(4)}
    captured = Captured(version="v", key=bytes(16), **widths, **parts)
    with pytest.raises(ValueError, match="hidden has 4 bytes, 2 tokens of width 1 8"):
        decode_captured(msgspec.msgpack.encode(captured))
