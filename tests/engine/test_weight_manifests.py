"""Manifests, configs and drafters that do not fit, and threads and pushes that end midway."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
import torch

from tests.engine.faulty_pushes import NORM, QUERY, Bench, edit
from tests.engine.tiny import HIDDEN, VOCAB
from tlt_client.channels.checkpoint import CALIBRATION


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


MANIFESTS: dict[str, list[dict[str, object]]] = {
    "another dtype": [{"name": QUERY, "dtype": "bfloat16"}],
    "another shape": [{"name": QUERY, "shape": [HIDDEN, HIDDEN + 1]}],
    "a checksum of other bytes": [{"name": QUERY, "checksum": "sha256:" + "0" * 64}],
    "an xxh3 of other bytes": [{"name": QUERY, "checksum": "xxh3:" + "0" * 16}],
    "an unknown kind of checksum": [{"name": QUERY, "checksum": "crc32:00000000"}],
    "a checksum without a kind": [{"name": QUERY, "checksum": "0" * 64}],
    "a tensor that is not there": [{"name": "model.stranger"}],
    "a tensor twice": [{"name": QUERY}, {"name": QUERY}],
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_says_otherwise(name: str, bench: Bench) -> None:
    changed = {str(entry["name"]) for entry in MANIFESTS[name]}
    tensors = [
        *MANIFESTS[name],
        *({"name": other} for other in bench.new_sums if other not in changed),
    ]
    report = bench.engine.push(bench.copy("good"), "v", tensors=tensors)
    assert report.result == "weights_refused"
    bench.check(report)


@pytest.mark.parametrize(
    "dtype, said",
    [
        ("float99", "float64, float32, float16, bfloat16"),
        ("Tensor", "use one of"),
        ("quint4x2", "use one of"),
        ("complex128", "use one of"),
        ("float64", "takes it as bfloat16 or float16 or float32"),
        ("torch.int64", "takes it as bfloat16 or float16 or float32"),
    ],
)
def test_a_declared_dtype_that_is_not_taken_is_refused_before_anything_is_read(
    dtype: str, said: str, bench: Bench
) -> None:
    tensors = [
        {"name": name, "dtype": dtype if name == QUERY else "float32"} for name in bench.new_sums
    ]
    report = bench.engine.push(bench.copy("good"), "v", tensors=tensors)
    assert report.result == "weights_refused" and "read" not in report.phases
    assert all(word in report.error[1] for word in (repr(QUERY), dtype, said))  # type: ignore[index]
    bench.check(report)


def test_a_manifest_that_leaves_one_out(bench: Bench) -> None:
    report = bench.engine.push(
        bench.copy("good"), "v", tensors=[{"name": name} for name in bench.new_sums if name != NORM]
    )
    assert report.result == "weights_refused" and NORM in report.error[1]  # type: ignore[index]
    bench.check(report)


@pytest.mark.parametrize(
    "field, value",
    [
        ("hidden_size", 2 * HIDDEN),
        ("num_hidden_layers", 5),
        ("rms_norm_eps", 1e-3),
        ("tie_word_embeddings", False),
        ("architectures", ["LlamaForCausalLM"]),
        ("hidden_act", "gelu"),
    ],
)
def test_a_config_of_another_model(field: str, value: object, bench: Bench) -> None:
    directory = bench.copy("good")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, field: value}))
    report = bench.engine.push(directory, "v")
    assert report.result == "weights_refused" and "config.json" in report.error[1]  # type: ignore[index]
    bench.check(report)


DRAFTERS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "not finite": lambda t: t["midlayer.mlp.down_proj.weight"].fill_(float("nan")),
    "a map out of the vocabulary": lambda t: t["d2t"].fill_(VOCAB),
    "a map that contradicts itself": lambda t: t["t2d"].logical_not_(),
    "half a map": lambda t: t.pop("t2d"),
    "another draft vocabulary": lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}),
    "no fusion": lambda t: t.pop("fc.weight"),
    "the target's tensors": lambda t: t.update({NORM: torch.ones(HIDDEN)}),
}


@pytest.mark.parametrize("role", ["drafter", "all"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_does_not_fit(name: str, role: str, bench: Bench) -> None:
    """A good target in the same transaction must not become live either."""
    drafter = bench.copy("good-drafter")
    edit(drafter, DRAFTERS[name])
    places = (
        {"path": drafter}
        if role == "drafter"
        else {"path": bench.copy("good"), "drafter_path": str(drafter)}
    )
    report = bench.engine.push(places.pop("path"), "v", role=role, **places)
    assert report.result == "weights_refused"
    bench.check(report)


def test_a_calibration_that_is_none(bench: Bench) -> None:
    drafter = bench.copy("good-drafter")
    (drafter / CALIBRATION).write_bytes(b"none")
    report = bench.engine.push(drafter, "v", role="drafter")
    assert report.result == "weights_refused" and "calibration" in report.error[1]  # type: ignore[index]
    bench.check(report)


@pytest.mark.parametrize("error", [MemoryError, SystemExit, KeyboardInterrupt, RecursionError])
@pytest.mark.parametrize("phase", ["open", "read", "check", "fill", "spool", "done"])
def test_a_staging_thread_that_dies(
    phase: str, error: type[BaseException], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(entered: str) -> None:
        if entered == phase:
            raise error("killed by the test")

    monkeypatch.setattr(bench.transaction, "on_phase", die)
    report = bench.engine.push(bench.copy("good"), f"dies-{phase}")
    assert report.result == "push_failed" and error.__name__ in report.error[1]  # type: ignore[index]
    bench.check(report)


@pytest.mark.parametrize("phase", ["open", "read", "check", "fill", "spool", "done"])
def test_a_push_during_a_push_and_an_abort_in_each_phase(
    phase: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = bench.engine, []

    def interfere(entered: str) -> None:
        if entered == phase and not seen:
            seen.append(entered)
            before = len(engine.reports)
            while len(engine.reports) < before + 3:
                time.sleep(0.001)  # the loop steps on; it answers what is sent below

    monkeypatch.setattr(bench.transaction, "on_phase", interfere)
    first = engine.send_push(bench.copy("good"), f"first-{phase}")
    engine.until(lambda: bool(seen), phase)
    other = engine.push(bench.copy("good"), "other")
    assert other.result == "conflict" and f"'first-{phase}' is being pushed" in other.error[1]  # type: ignore[index]
    assert [engine.abort(version).result for version in ("other", f"first-{phase}")] == [
        "not_found",
        "aborted",
    ]
    report = engine.report(first)
    assert report.result == "conflict" and "aborted" in report.error[1]  # type: ignore[index]
    bench.check(report)
