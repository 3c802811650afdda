"""LoRA adapters on a CPU: their results, the same bits in any batch and under speculation, and
changes of adapters while requests run.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.engine.adapters import merged, write_adapter
from tests.engine.pushing import Pushable, why
from tests.engine.tiny import SHALLOW
from tests.engine.weight_cases import checkpoints, request, serving
from tlt_server.engine.gate import Reason
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import UnloadAdapter
from tlt_server.wire.labels import label_of
from tlt_server.wire.records import GenerateRequest, Sampling

CONTENT = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = checkpoints(tmp_path_factory.mktemp("adapters"))
    write_adapter(root / "a", root / "base", 1)
    write_adapter(root / "a2", root / "base", 2)
    write_adapter(
        root / "b", root / "base", 3, rank=3, targets=("q_proj", "v_proj"), use_rslora=True
    )
    return root


@pytest.fixture(scope="module")
def settings(root: Path) -> EngineSettings:
    return replace(serving(root), max_loras=2, max_lora_rank=8)


class Adapting(Pushable):
    """An engine with adapters loaded by name."""

    def __init__(self, settings: EngineSettings, **adapters: Path) -> None:
        super().__init__(settings)
        for name, path in adapters.items():
            report = self.load(name, path)
            assert report.result == "committed", report.error

    def load(self, name: str, path: Path, version: str = "", **fields: object):
        return self.push(path, version, role="adapter", adapter=name, **fields)

    def send_unload(self, name: str, in_flight: str = "drain") -> str:
        id = next(self._ids)
        self.engine.send(UnloadAdapter(id, name, in_flight))
        return id


@pytest.fixture
def engine(settings: EngineSettings, root: Path) -> Adapting:
    return Adapting(settings, a=root / "a", b=root / "b")


def asked(name: str, i: int = 0, **fields: object) -> GenerateRequest:
    return request(i, id=f"{name or 'none'}-{i}", lora=name, **fields)


@pytest.mark.parametrize("name", ["a", "b"])
def test_adapter_matches_its_merged_weights(
    engine: Adapting, settings: EngineSettings, root: Path, tmp_path: Path, name: str
) -> None:
    one = asked(name, 1, sampling=Sampling(temperature=0, max_tokens=24, ignore_eos=True))
    tokens, logprobs = engine.run(one)[one.id]
    whole = merged(root / "base", root / name, tmp_path / "merged")
    plain = msgspec.structs.replace(one, lora="")
    expected = Pushable(replace(settings, model=whole, max_loras=0)).run(plain)[one.id]
    assert tokens == expected[0]
    # The sums of float32 are taken in another order.
    np.testing.assert_allclose(logprobs, expected[1], atol=2e-4)
    assert engine.run(plain)[one.id][0] != tokens


def test_adapter_bits_ignore_batch_company_and_speculation(
    settings: EngineSettings, root: Path
) -> None:
    adapters = {"a": root / "a", "b": root / "b"}
    mixed = [asked(name, i) for i in range(3) for name in ("a", "", "b")]
    mixed += [asked("a", 5, sampling=Sampling(temperature=0, max_tokens=40, ignore_eos=True))]
    alone: dict[str, object] = {}
    for one in mixed:
        alone |= Adapting(settings, **adapters).run(one)
    plain = [one for one in mixed if not one.lora]
    assert {one.id: alone[one.id] for one in plain} == Pushable(replace(settings, max_loras=0)).run(
        *plain
    ), "adapters in other slots change requests without one"
    assert Adapting(settings, **adapters).run(*mixed) == alone
    for strategy in ("eagle:3x2x6", "history:4x2x8"):
        speculating = replace(settings, policy="fixed", sd_strategy=strategy, max_rows=16)
        engine = Adapting(speculating, **adapters)
        assert engine.run(*mixed) == alone, strategy
        assert engine.engine.last_cycle is None or engine.engine.last_cycle.strategy.rows > 1


def test_prefix_computed_with_one_adapter_is_not_used_by_others(engine: Adapting) -> None:
    first = engine.run(asked("a"))
    for name in ("b", ""):
        engine.run(asked(name))
        assert engine.said[asked(name).id][0].cached_tokens == 0
    assert engine.run(asked("a")) == first
    assert engine.said["a-0"][0].cached_tokens == 16


def test_push_of_the_target_keeps_adapters(
    engine: Adapting, settings: EngineSettings, root: Path
) -> None:
    assert engine.push(root / "new", "v1").result == "committed"
    other = Adapting(replace(settings, model=root / "new"), a=root / "a")
    assert engine.run(asked("a")) == other.run(asked("a"))


def test_new_adapter_version_takes_over_between_two_steps(
    engine: Adapting, settings: EngineSettings, root: Path
) -> None:
    before = engine.run(asked("a"), asked("b"), asked(""))
    for id in before:
        del engine.said[id]
    assert engine.load("a", root / "a2", "two", commit=False).result == "staged"
    engine.submit(asked("a"), asked("b"), asked(""))
    engine.step(8)
    at = len(engine.tokens("a-0"))
    assert engine.commit("two").state.adapters["a"] == "two"
    engine.finish()
    (old, *_), (new, start, end) = engine.spans("a-0")
    assert old.startswith("initial+a@") and (new, start, end) == ("initial+a@two", at, 40)
    assert engine.tokens("a-0")[:at] == before["a-0"][0][:at]
    for id in ("b-0", "none-0"):
        assert (engine.tokens(id), engine.logprobs(id)) == before[id]
        assert len(engine.spans(id)) == 1
    fresh = Adapting(settings, a=root / "a2").run(asked("a", 1))
    assert engine.run(asked("a", 1)) == fresh


def test_recompute_rereads_tokens_with_the_new_adapter(
    engine: Adapting, settings: EngineSettings, root: Path
) -> None:
    engine.load("a", root / "a2", "two", in_flight="recompute", commit=False)
    engine.submit(asked("a"))
    engine.step(8)
    engine.commit("two")
    engine.finish()
    change = engine.spans("a-0")[1][1]
    left = Sampling(max_tokens=40 - change, ignore_eos=True)
    rest = asked("a", token_ids=asked("a").token_ids + engine.tokens("a-0")[:change], sampling=left)
    expected = Adapting(settings, a=root / "a2").run(rest)["a-0"]
    assert (engine.tokens("a-0")[change:], engine.logprobs("a-0")[change:]) == expected


@pytest.mark.parametrize("in_flight", ["abort", "drain"])
def test_adapter_change_ends_only_the_adapters_own_requests(
    engine: Adapting, root: Path, in_flight: str
) -> None:
    engine.submit(asked("a"), asked("", sampling=Sampling(max_tokens=90, ignore_eos=True)))
    engine.step(4)
    id = engine.send_push(root / "a2", "two", role="adapter", adapter="a", in_flight=in_flight)
    assert engine.report(id).result == "committed"
    assert engine.said["a-0"][-1].finish_reason == ("abort" if in_flight == "abort" else "length")
    assert len(engine.spans("a-0")) == 1
    assert engine.said["none-0"][-1].finish_reason is None
    engine.finish()


def test_adapter_drain_delays_only_that_adapters_new_requests(engine: Adapting, root: Path) -> None:
    engine.submit(asked("a"))
    engine.step(3)
    id = engine.send_push(root / "a2", "two", role="adapter", adapter="a", in_flight="drain")
    engine.until(lambda: engine.engine.gate.held_for(Reason.DRAINING), "hold")
    engine.submit(asked("a", 1), asked("b"), asked(""))
    engine.step(4)
    assert id not in engine.reports and {*engine.said} == {"a-0", "b-0", "none-0"}
    engine.finish()
    assert engine.report(id).result == "committed"
    assert [version for version, *_ in engine.spans("a-1")] == ["initial+a@two"]


def test_repeated_push_is_unchanged_and_new_content_is_refused(
    engine: Adapting, root: Path
) -> None:
    assert engine.load("a", root / "a", "one").result == "committed"
    assert engine.load("a", root / "a", "one").result == "unchanged"
    report = engine.load("a", root / "a2", "one")
    assert report.result == "conflict" and "other content" in why(report)


def test_adapter_version_names_one_content(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    kept = replace(settings, state_dir=tmp_path / "state")
    engine = Adapting(kept)
    for version, place in (("1", "a"), ("2", "a2"), ("1", "a"), ("2", "a2")):
        assert engine.load("m", root / place, version).result == "committed"
    report = engine.load("m", root / "a2", "1")
    assert report.result == "conflict" and "'1' of adapter 'm'" in why(report)
    assert report.state.adapters == {"m": "2"}
    assert engine.load("other", root / "a2", "1").result == "committed", "its own names"
    engine.report(engine.send_unload("m"))
    assert engine.load("m", root / "b", "2").result == "conflict"
    labelled = engine.load("m", root / "b", "2", labelled=True)
    assert labelled.result == "committed" and label_of(labelled.version) == "2"
    assert labelled.version != "2"
    again = Adapting(kept)
    assert again.info.adapters == {"other": "1", "m": labelled.version}
    assert again.load("other", root / "b", "2").result == "committed"
    assert again.load("other", root / "b", "1").result == "conflict"


def test_adapter_unload_drains_or_ends_the_adapters_requests(engine: Adapting, root: Path) -> None:
    engine.submit(asked("a"))
    engine.step(3)
    id = engine.send_unload("a")
    engine.submit(asked("a", 1))
    assert engine.load("a", root / "a2").result == "conflict"
    engine.step(2)
    assert id not in engine.reports
    assert engine.said["a-1"][0].error[0] == "not_found"
    report = engine.report(id)
    assert report.result == "unloaded" and [*report.state.adapters] == ["b"]
    assert engine.said["a-0"][-1].finish_reason == "length"
    engine.submit(asked("b"))
    engine.step(3)
    assert engine.report(engine.send_unload("b", "abort")).state.adapters == {}
    assert engine.said["b-0"][-1].finish_reason == "abort"
    assert engine.report(engine.send_unload("b")).result == "not_found"


def test_adapter_slots_are_limited_and_reusable(
    engine: Adapting, settings: EngineSettings, root: Path
) -> None:
    report = engine.load("c", root / "a2")
    assert report.result == "conflict" and "--max-loras" in why(report)
    engine.report(engine.send_unload("a"))
    assert engine.load("c", root / "a2").result == "committed"
    expected = Adapting(settings, c=root / "a2").run(asked("c"))
    assert engine.run(asked("c")) == expected
    closed = Pushable(replace(settings, max_loras=0))
    assert closed.push(root / "a", role="adapter", adapter="a").result == "forbidden"


def test_restarted_engine_keeps_loaded_adapters(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    kept = replace(settings, state_dir=tmp_path / "state")
    own = write_adapter(root / "own", root / "base", 2)
    engine = Adapting(kept, a=root / "a", b=root / "b")
    engine.load("a", own, "two")
    shutil.rmtree(own)
    assert engine.push(root / "new", "v1").result == "committed"
    expected = engine.run(asked("a"), asked("b"))
    again = Adapting(kept)
    assert [*again.info.adapters] == ["a", "b"] and again.info.adapters["a"] == "two"
    assert again.run(asked("a"), asked("b")) == expected
    assert again.spans("a-0")[0][0] == "v1+a@two"
    again.report(again.send_unload("b"))
    assert Adapting(kept).info.adapters == {"a": "two"}
    (folder,) = {path.parent for path in (tmp_path / "state").rglob("adapter_config.json")}
    (folder / "adapter_config.json").write_text("{}")
    assert Adapting(kept).info.adapters == {}
    assert Adapting(replace(kept, max_loras=0)).info.weight_version == "v1"


def test_restart_names_adapters_beyond_max_loras(
    settings: EngineSettings, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = replace(settings, state_dir=tmp_path / "state")
    Adapting(kept, a=root / "a", b=root / "b")
    for limit, (left, *named) in ((2, [{"a", "b"}]), (1, [{"a"}, "b"]), (0, [set(), "a", "b"])):
        capsys.readouterr()
        assert Adapting(replace(kept, max_loras=limit)).info.adapters.keys() == left
        said = [each for each in capsys.readouterr().err.splitlines() if "not loaded" in each]
        assert [each.split("'")[1] for each in said] == named, said
        assert all(f"--max-loras is {limit}" in each for each in said)


PATHS = [
    f"model.layers.{i}.self_attn.{name}"
    for i in range(SHALLOW.layers)
    for name in ("q_proj", "v_proj")
]
FORMS = {
    "paths": PATHS,
    "ends of paths": ["self_attn.q_proj", "self_attn.v_proj"],
    "a pattern": r".*\.layers\.\d+\.self_attn\.(q|v)_proj",
    "with others": ["q_proj", "v_proj", "query_key_value", "lm_head"],
    "none": None,
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_target_modules_loads_the_same_adapter(
    refusing: Adapting, root: Path, tmp_path: Path, form: str
) -> None:
    given = {"rank": 3, "targets": ("q_proj", "v_proj"), "use_rslora": True}
    plain = write_adapter(root / f"plain-{form}", root / "base", 3, **given)
    path = write_adapter(root / form, root / "base", 3, **given, target_modules=FORMS[form])
    assert refusing.load("forms", plain).result == "committed"
    report = refusing.load("forms", path)
    assert report.result == "unchanged", f"the same content: {report.error}"
    refusing.report(refusing.send_unload("forms"))


def test_layers_without_tensors_are_not_adapted(
    refusing: Adapting, root: Path, tmp_path: Path
) -> None:
    path = write_adapter(root / "some", root / "base", 5, layers_to_transform=[1])
    pairs = load_file(path / "adapter_model.safetensors")
    some = {name: tensor for name, tensor in pairs.items() if ".layers.1." in name}
    save_file(some, path / "adapter_model.safetensors")
    assert refusing.load("some", path).result == "committed"
    one = asked("some", 1, sampling=Sampling(temperature=0, max_tokens=24, ignore_eos=True))
    tokens, logprobs = refusing.run(one)[one.id]
    refusing.report(refusing.send_unload("some"))
    whole = merged(root / "base", path, tmp_path / "merged")
    plain = msgspec.structs.replace(one, lora="")
    expected = Pushable(replace(refusing.settings, model=whole, max_loras=0)).run(plain)[one.id]
    assert tokens == expected[0]
    np.testing.assert_allclose(logprobs, expected[1], atol=2e-4)


BAD = {
    "r": (0, "r is 0"),
    "lora_alpha": ("x", "lora_alpha is 'x'"),
    "use_dora": (True, "use_dora is True"),
    "bias": ("all", "bias is 'all'"),
    "modules_to_save": (["lm_head"], "modules_to_save"),
    "target_modules": ({"q_proj": 4}, "target_modules"),
    "rank_pattern": ({"q_proj": 2}, "rank_pattern"),
    "init_lora_weights": ("pissa", "init_lora_weights"),
    "peft_type": ("IA3", "peft_type"),
    "use_something_new": (True, "use_something_new"),
}


@pytest.fixture(scope="module")
def refusing(settings: EngineSettings) -> Adapting:
    return Adapting(settings)


@pytest.mark.parametrize("field", BAD)
def test_unsupported_adapter_field_is_refused_by_name(
    refusing: Adapting, root: Path, tmp_path: Path, field: str
) -> None:
    value, said = BAD[field]
    path = write_adapter(root / f"bad-{field}", root / "base", 1, **{field: value})
    report = refusing.load("a", path)
    assert report.result == "weights_refused" and said in why(report)
    assert "adapter_config.json" in why(report) and report.state.adapters == {}


def test_adapter_tensors_that_do_not_fit_are_refused(refusing: Adapting, root: Path) -> None:
    good = load_file(root / "a" / "adapter_model.safetensors")
    cases = {
        "shape": ({**good, CONTENT: good[CONTENT][:, 1:].contiguous()}, "has shape [4, 63]"),
        "nan": ({**good, CONTENT: good[CONTENT] / 0}, "NaN or infinite"),
        "missing": ({k: v for k, v in good.items() if k != CONTENT}, "is missing"),
        "more": (
            {**good, "base_model.model.lm_head.lora_A.weight": good[CONTENT].clone()},
            "'base_model.model.lm_head.lora_A.weight' is not a matrix of q_proj, ",
        ),
    }
    for name, (tensors, said) in cases.items():
        path = write_adapter(root / f"bad-{name}", root / "base", 1)
        save_file(tensors, path / "adapter_model.safetensors")
        report = refusing.load("a", path)
        assert report.result == "weights_refused" and said in why(report), name
    bare = write_adapter(root / "bare", root / "base", 1)
    (bare / "adapter_config.json").unlink()
    assert f"{bare} has no adapter_config.json" in refusing.load("a", bare).error[1]
    large = write_adapter(root / "large", root / "base", 1, rank=9)
    assert "--max-lora-rank" in refusing.load("a", large).error[1]
    assert refusing.load("a", Path("/etc")).result == "forbidden"
