"""Pushes into the GPU engine on the interpreter: weights are exchanged where they lie, whole, and
come back bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import LOGPROB_TOLERANCE, bits, checkpoints, drafting, on_cpu, request
from tests.engine.pushing import Pushable, push_until_first_weights_end
from tests.engine.tiny import SMALLEST, write_eagle
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import Sleep, WakeUp
from tlt_server.wire.events import ControlReport
from tlt_server.wire.records import GenerateRequest


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    root = tmp_path_factory.mktemp("smallest")
    with patched_once():
        settings = checkpoints(root)
        # Another vocabulary, too.
        write_eagle(root / "new-drafter", seed=5, shape=SMALLEST, draft_vocab=40)
        write_eagle(root / "embedding-drafter", shape=SMALLEST, draft_vocab=40, own_embedding=True)
        yield settings


@pytest.fixture(scope="module")
def root(settings: EngineSettings) -> Path:
    return Path(settings.weight_root)


def storage(engine: Pushable) -> dict[str, torch.Tensor]:
    """Return every tensor that a captured graph would read."""
    runner = engine.engine.runner
    tensors = {f"target {name}": tensor for name, tensor in runner.state.model.parameters().items()}
    network = runner.passes.drafters["eagle"].network
    return {
        **tensors,
        **{f"drafter {name}": tensor for name, tensor in network.parameters().items()},
        "drafter embedding": network.embedding_VH,
        "drafter vocabulary": network.target_ids_C,
        "drafter gap edges": runner.passes.drafters["eagle"].gap_edge_G,
    }


def addresses(engine: Pushable) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in storage(engine).items()}


def values(engine: Pushable) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in storage(engine).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def asked(max_tokens: int = 5) -> list[GenerateRequest]:
    return [request(i, 4 + i, max_tokens=max_tokens) for i in range(2)]


def said(engine: Pushable, *requests: GenerateRequest) -> dict[str, tuple[object, ...]]:
    for r in requests:
        engine.said.pop(r.id, None)
    engine.run(*requests)
    return bits(engine, [r.id for r in requests])


def test_target_swaps_in_place_and_rolls_back_bit_for_bit(
    settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(settings)
    where, old = addresses(engine), values(engine)
    before, sums = said(engine, *asked()), engine.checksums()
    report = engine.push(root / "new", "v1")
    assert report.result == "committed"
    assert addresses(engine) == where
    assert not same(values(engine), old)
    live = engine.checksums()
    assert (
        {name: live[name] for name in report.checksums}
        == report.checksums
        != {name: sums[name] for name in report.checksums}
    )
    fresh = Pushable(replace(settings, model=str(root / "new")))
    after = said(engine, *asked())
    assert after == said(fresh, *asked()) != before
    report = engine.roll_back("initial")
    assert (
        report.result == "rolled_back" and addresses(engine) == where and same(values(engine), old)
    )
    assert engine.checksums() == sums and said(engine, *asked()) == before


@pytest.mark.long
def test_in_flight_requests_continue_or_are_recomputed(
    settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(drafting(settings, "eagle", 2, 1, 3))
    cpu = Pushable(on_cpu(replace(settings, model=str(root / "new"))))
    for mode, id in (("continue", "r0"), ("recompute", "r1")):
        staged = engine.push(root / "new", f"v-{mode}", in_flight=mode, commit=False)
        assert staged.result == "staged"  # receiving takes any number of steps: before r begins
        r = asked(12)[int(id[1])]
        engine.submit(r)
        engine.step(3)
        if mode == "recompute":
            engine.roll_back("initial")
            engine.step(2)
        assert engine.engine.runner.in_flight
        assert engine.commit(f"v-{mode}").result == "committed"
        engine.finish()
        spans = engine.spans(id)
        assert spans[-1][0] == f"v-{mode}"
        assert spans[-1][2] == 12 == len(engine.tokens(id))
        assert len(spans) > 1
        if mode == "recompute":
            at = spans[-1][1]
            rest = msgspec.structs.replace(
                r,
                id="rest",
                token_ids=r.token_ids + engine.tokens(id)[:at],
                sampling=msgspec.structs.replace(r.sampling, max_tokens=12 - at),
            )
            tokens, logprobs = cpu.run(rest)["rest"]
            assert engine.tokens(id)[at:] == tokens
            assert engine.logprobs(id)[at:] == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE)


def test_outputs_in_flight_are_delivered_before_the_pause(
    settings: EngineSettings, root: Path
) -> None:
    """Otherwise the requests' longest wait would be a step more."""
    engine = Pushable(settings)
    assert engine.push(root / "new", "v1", commit=False).result == "staged"
    engine.submit(*asked(12))
    versions = ["initial"]
    for change in (engine.send_commit, engine.send_roll_back):
        engine.step(4)
        asked_for, told, flying = change(), dict[str, int](), 1
        while asked_for not in engine.reports:
            told = {id: len(engine.tokens(id)) for id in engine.said}
            flying = engine.engine.runner.in_flight
            engine.step()
        assert not flying and engine.engine.runner.in_flight, (
            "the call that changes weights waits for nothing, and launches the next step"
        )
        assert {id: len(engine.tokens(id)) for id in engine.said} == told, (
            "nor has it anything to tell"
        )
        assert {id: (engine.spans(id)[-1][0], engine.spans(id)[-1][2]) for id in told} == {
            id: (versions[-1], told[id]) for id in told
        }
        versions.append(engine.reports[asked_for].version)
    engine.finish()
    assert versions == ["initial", "v1", "initial"]
    assert {id: [span[0] for span in engine.spans(id)] for id in ("r0", "r1")} == {
        "r0": versions,
        "r1": versions,
    }


def test_drafter_and_vocabulary_swap_changes_no_token(settings: EngineSettings, root: Path) -> None:
    engine = Pushable(drafting(settings, "eagle", 2, 2, 4))
    where, old = addresses(engine), values(engine)
    before = said(engine, *asked())
    assert engine.push(root / "new-drafter", "d1", role="drafter").result == "committed"
    new = values(engine)
    assert addresses(engine) == where
    assert not torch.equal(new["drafter vocabulary"], old["drafter vocabulary"])
    fresh = Pushable(replace(settings, drafter=str(root / "new-drafter")))
    assert same(new, values(fresh)) and engine.checksums() == fresh.checksums()
    assert said(engine, *asked()) == before
    assert engine.roll_back().result == "rolled_back"
    assert addresses(engine) == where and same(values(engine), old)


def test_target_and_drafter_pushed_together_share_an_embedding(
    settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(settings)
    where, old = addresses(engine), values(engine)
    report = engine.push(root / "new", "both", role="all", drafter_path=str(root / "new-drafter"))
    assert report.result == "committed" and addresses(engine) == where
    fresh = Pushable(replace(settings, model=str(root / "new"), drafter=str(root / "new-drafter")))
    assert same(values(engine), values(fresh)) and engine.checksums() == fresh.checksums()
    assert engine.roll_back().result == "rolled_back" and same(values(engine), old)


@pytest.mark.long
def test_target_rolls_back_after_a_push_of_the_drafter(
    settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(drafting(settings, "eagle", 2, 2, 4))
    where = addresses(engine)
    for path, version, role in (
        ("new", "v1", "target"),
        ("base", "v2", "target"),
        ("new-drafter", "d1", "drafter"),
    ):
        assert engine.push(root / path, version, role=role).result == "committed"
    report = engine.roll_back("v1")
    assert (report.result, report.role) == ("rolled_back", "target") and addresses(engine) == where
    fresh = Pushable(
        replace(engine.settings, model=str(root / "new"), drafter=str(root / "new-drafter"))
    )
    assert same(values(engine), values(fresh)) and engine.checksums() == fresh.checksums()
    assert said(engine, *asked()) == said(fresh, *asked())


@pytest.mark.parametrize(
    ("resident", "pushed", "word"),
    [("drafter", "embedding-drafter", "brings"), ("embedding-drafter", "drafter", "lacks")],
)
def test_drafter_push_cannot_add_or_remove_an_embedding(
    resident: str, pushed: str, word: str, settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(replace(settings, drafter=str(root / resident)))
    old = values(engine)
    report = engine.push(root / pushed, "d1", role="drafter")
    assert report.result == "weights_refused" and report.error is not None
    assert f"{word} 'embed_tokens.weight'" in report.error[1] and "restart" in report.error[1]
    assert same(values(engine), old)
    assert engine.push(root / resident, "d2", role="drafter").result == "committed"


def test_features_repeat_a_layer_that_the_drafter_reads_twice(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features (1, 0, 1) of a target of two layers: the first and last third are one layer's."""
    engine = Pushable(settings)
    model, found = engine.engine.runner.state.model, []
    sound = model.forward
    monkeypatch.setattr(model, "forward", lambda *given: found.append(sound(*given)) or found[-1])
    engine.run(request(0, 4, max_tokens=1))
    features_RF = found[0].features_RF.nan_to_num()  # dead rows hold anything
    first, between, last = features_RF.split(SMALLEST.hidden, dim=1)
    assert torch.equal(first, last) and not torch.equal(first, between)


def test_sleep_releases_memory_and_waking_restores_the_bits(settings: EngineSettings) -> None:
    plain, slept = (Pushable(drafting(settings, "eagle", 2, 2, 4)) for _ in range(2))
    before = values(slept)
    for engine in (plain, slept):
        engine.submit(*asked())
        engine.step(3)
    slept.engine.send(Sleep("s", ["weights", "kv_cache"]))
    slept.step(2)
    assert slept.engine.idle and not same(values(slept), before)
    slept.engine.send(WakeUp("w", ["weights", "kv_cache"]))
    plain.finish()
    slept.finish()
    assert slept.engine.control_reports() == [ControlReport("s"), ControlReport("w")]
    assert same(values(slept), before)
    assert bits(slept, ["r0", "r1"]) == bits(plain, ["r0", "r1"])


def test_draining_sleep_also_waits_for_a_rollback(settings: EngineSettings, root: Path) -> None:
    engine = Pushable(settings)
    assert engine.push(root / "new", "v1").result == "committed"
    engine.submit(asked(2)[0])
    engine.step(2)
    assert engine.engine.runner.in_flight and not engine.engine.scheduler.idle, "the last step"
    engine.engine.send(Sleep("s", ["weights"], "drain"))
    assert engine.roll_back("initial").result == "rolled_back"
    engine.finish()
    assert engine.engine.control_reports() == [ControlReport("s")]


def test_pushed_values_beyond_engine_dtype_are_refused(
    settings: EngineSettings, root: Path
) -> None:
    engine = Pushable(replace(settings, dtype="bfloat16"))
    tensors = load_file(root / "new" / "model.safetensors")
    shutil.copytree(root / "new", root / "beyond")
    tensors["model.norm.weight"][3] = 3.4e38  # is float32; the nearest bfloat16 is infinite
    save_file(tensors, root / "beyond" / "model.safetensors")
    sums = engine.checksums()
    report = engine.push(root / "beyond", "beyond")
    assert (
        report.result == "weights_refused"
        and "beyond the range of torch.bfloat16" in report.error[1]
    )  # type: ignore[index]
    assert engine.checksums() == sums


def test_initial_weights_are_freed_like_pushed_ones(settings: EngineSettings, root: Path) -> None:
    push_until_first_weights_end(Pushable(settings), root)
