"""States that a GPU's engine captures, on the interpreter: the bits that it computes again, and
about those of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.capturing import Capturing
from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import PAGE, bits, checkpoints, drafting, prompt, request
from tests.engine.pushing import Pushable
from tlt_server.engine.gpu.memory.hidden_states import StateCapture
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.samples.hidden_states import Captured, key_of
from tlt_server.trainer.target.prefill import CpuPrefill
from tlt_server.trainer.target.recompute import Document, Recomputed
from tlt_server.wire.commands import Recompute, Sleep, WakeUp
from tlt_server.wire.records import GenerateRequest


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        settings = checkpoints(tmp_path_factory.mktemp("smallest"))
        yield drafting(replace(settings, pages=3, max_model_len=48, max_rows=12), "eagle", 3, 2, 5)


def recorded(i: int, length: int, max_tokens: int) -> GenerateRequest:
    return msgspec.structs.replace(request(i, length, max_tokens), train=True)


@pytest.mark.long
def test_captured_hidden_states_equal_recomputed_ones(
    settings: EngineSettings, tmp_path: Path
) -> None:
    """Over trees, chunks, preemptions, siblings that share a prompt, and sequences between them
    that are not recorded.
    """
    plain, engine = Pushable(settings), Capturing(settings, tmp_path / "rings")
    other, last = request(3, 17, 3), recorded(0, 20, 3)
    work = [recorded(1, 14, 12), recorded(2, 13, 12), other, last]
    late = msgspec.structs.replace(last, id="late", seed=7)
    for each in (plain, engine):
        each.run(*work)
        each.run(late)
    ids = [r.id for r in (*work, late)]
    assert bits(engine, ids) == bits(plain, ids)
    gauges = engine.engine.gauges()
    assert gauges["preemptions"] > 0
    assert any(output.drafted and output.accepted for id in ids for output in engine.said[id])
    texts = [engine.text(r) for r in (*work, late) if r.train]
    captured = engine.taken()
    assert captured.keys() == {key_of(text) for text in texts}
    assert engine.said["late"][0].cached_tokens == PAGE
    again = engine.recomputed(texts)
    assert again == captured
    assert_about_the_cpus(engine, Path(settings.model), texts, again)


def assert_about_the_cpus(
    engine: Capturing, model: Path, texts: list[bytes], found: dict[bytes, Captured]
) -> None:
    layers = engine.engine.runner.state.model.feature_layers
    target = load_target(model, numerics=Numerics("strict"), feature_layers=layers)
    documents = [
        Document(np.frombuffer(text, np.int32), np.ones(len(text) // 4, np.bool_)) for text in texts
    ]
    twin = Recomputed(CpuPrefill(target), documents)
    for n, text in enumerate(texts):
        states, part = found[key_of(text)], twin.read(n, 0, len(text) // 4 - 1)
        for found_X, of_X in ((states.features, part.features_TF), (states.hidden, part.hidden_TH)):
            np.testing.assert_allclose(np.frombuffer(found_X, "<f4"), of_X.flatten(), atol=1e-4)


@pytest.mark.long
def test_new_request_interrupts_recomputation(settings: EngineSettings, tmp_path: Path) -> None:
    engine = Capturing(replace(settings, max_rows=8), tmp_path / "rings")
    text = np.array(prompt(5, 40), "<i4").tobytes()
    engine.engine.send(Recompute([text]))
    engine.step()
    assert engine.engine.use_idle_time()
    engine.step(3)
    work = recorded(6, 4, 5)
    engine.run(work)
    assert engine.taken().keys() == {key_of(engine.text(work))}
    assert engine.recomputed([text]).keys() == {key_of(text)}


def test_continued_sequence_has_states_of_all_its_tokens(
    settings: EngineSettings, tmp_path: Path
) -> None:
    engine, whole = Capturing(settings, tmp_path / "rings"), recorded(1, 6, 5)
    engine.run(whole)
    (states,) = engine.taken().values()
    rest = msgspec.structs.replace(whole, id="rest", salt="s", generated=engine.tokens("r1")[:2])
    engine.run(rest)
    assert [*engine.taken().values()] == [states]
    assert engine.engine.gauges()["samples_offered"] == 2


def test_captured_states_have_one_version_and_end_at_a_sleep(
    settings: EngineSettings, tmp_path: Path
) -> None:
    engine = Capturing(settings, tmp_path / "rings")
    work, new = recorded(7, 17, 5), Path(settings.model).parent / "new"
    engine.push(new, "second", commit=False)
    engine.submit(work)
    engine.until(lambda: bool(engine.said.get(work.id)), "tokens")
    engine.commit("second")
    engine.finish()
    assert engine.taken() == {} and engine.engine.gauges()["states_incomplete"] == 1
    for turn in range(2):
        again = msgspec.structs.replace(work, id=f"again {turn}")
        engine.run(again)
        text = engine.text(again)
        captured = engine.taken()
        assert captured == engine.recomputed([text])
        assert_about_the_cpus(engine, new, [text], captured)
        assert [states.version for states in captured.values()] == ["second"]
        for command in (Sleep("down", ["kv_cache"]), WakeUp("up", ["kv_cache"])):
            engine.engine.send(command)
            engine.step()
        assert [report.error for report in engine.engine.control_reports()] == [None, None]


@pytest.mark.long
def test_dropped_state_pages_are_counted_and_change_no_bit(
    settings: EngineSettings, tmp_path: Path
) -> None:
    plain = Pushable(settings)
    engine = Capturing(settings, tmp_path / "rings", feature_bytes=1)
    work = [recorded(0, 18, 3), recorded(1, 17, 3)]
    for each in (plain, engine):
        each.run(*work)
    assert bits(engine, ["r0", "r1"]) == bits(plain, ["r0", "r1"])
    assert engine.taken() == {} and engine.engine.gauges()["states_incomplete"] == 2


def test_states_are_captured_only_for_a_trainer_using_features(
    settings: EngineSettings, tmp_path: Path
) -> None:
    for engine, captures in (
        (Pushable(settings), False),
        (Capturing(settings, tmp_path / "rings"), True),
    ):
        engine.run(request(0, 4, 2))
        for extend in engine.engine.runner.passes.extends.values():
            assert any(isinstance(f, StateCapture) for f in extend._readers) == captures
