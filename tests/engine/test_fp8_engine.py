"""An engine on the CPU whose target is in FP8: no strategy, company or width changes a bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.fp8 import effective_sums, save_in_fp8
from tests.engine.halting import EAGLE
from tests.engine.pushing import Pushable, cpu_settings, perturbed, why
from tests.engine.test_engine import bits, requests
from tests.engine.test_strict_numerics import CONFIG, TOKENS
from tests.engine.two_ranks import one, shared
from tests.rows_of_one import Sequence
from tlt_client.quantise import effective_checksum
from tlt_server.__main__ import main
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.adapted import AdaptedProjection, AdaptedRows, ProjectionSlots
from tlt_server.models.adapters import MatrixPair
from tlt_server.models.decoder import Decoder
from tlt_server.models.layers import Projection
from tlt_server.models.loader import draw, load_target, read_tensor
from tlt_server.models.numerics import Numerics
from tlt_server.models.quantization import Quantization
from tlt_server.models.split import Split
from tlt_server.weights.checksums import live_sums
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import Strategy

__all__ = ["one", "shared"]  # fixtures
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    root = tmp_path_factory.mktemp("fp8")
    return cpu_settings(
        TARGET, DRAFTER, quantization="fp8", reduction_leaves=2, weight_root=str(root)
    )


def responses(engine: Pushable, policy: SetPolicy, count: int = 6) -> dict[str, Any]:
    engine.said.clear()
    engine.engine.send(policy)
    engine.submit(*requests(count))
    engine.finish()
    return bits(engine.said)


def test_strategies_and_widths_change_no_bit(one: Pushable, shared: Pushable) -> None:
    assert one.info.fingerprint == shared.info.fingerprint
    assert one.info.fingerprint.quantization == "fp8"
    expected = responses(one, SetPolicy("off"))
    for policy in (EAGLE, SetPolicy("fixed", Strategy("history", 6, 2, 8)), SetPolicy("off")):
        for engine in (one, shared):
            assert responses(engine, policy) == expected
    single = replace(one.settings, max_running=1, quantization="none")
    assert responses(Pushable(single), SetPolicy("off")) != expected, "nothing is in FP8"


def test_ranks_share_what_is_pushed_in_any_form(one: Pushable, shared: Pushable) -> None:
    root = Path(one.settings.weight_root or "")
    new = perturbed(TARGET, root / "new", 1)
    wanted = effective_sums(load_file(new / "model.safetensors"))
    expected = responses(one, SetPolicy("off"))
    said = list[Any]()
    for source in (new, save_in_fp8(new, root / "in-fp8")):
        for engine in (one, shared):
            report = engine.push(source, source.name)
            assert report.result == "committed", why(report)
            sums = engine.checksums()
            assert {name: sums[name] for name in wanted} == wanted
            said.append(responses(engine, SetPolicy("off")))
            assert engine.roll_back().result == "rolled_back"
    assert expected != said[0] and all(each == said[0] for each in said)
    assert responses(one, SetPolicy("off")) == responses(shared, SetPolicy("off")) == expected


def test_live_checksums_are_those_that_a_trainer_computes(one: Pushable) -> None:
    live = one.engine.pushes.transaction.versions.live.target
    assert live_sums(live.network.parameters())[Q] == effective_checksum(read_tensor(TARGET, Q))


def test_written_checkpoint_equals_quantising_at_load(one: Pushable, tmp_path: Path) -> None:
    out = tmp_path / "fp8"
    assert main(["quantise", str(TARGET), str(out)]) == 0
    engine = Pushable(replace(one.settings, model=out, quantization=None))
    assert engine.info.fingerprint == one.info.fingerprint
    assert engine.checksums() == one.checksums()
    assert responses(engine, SetPolicy("off")) == responses(one, SetPolicy("off"))


def test_checkpoint_that_cannot_be_quantised_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "target", tmp_path / "out"
    shutil.copytree(TARGET, source)
    tensors = load_file(source / "model.safetensors")
    tensors[Q][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors")
    out.mkdir()
    (out / "mine").touch()
    for model, written, says in (
        (source, tmp_path / "new", f"tensor '{Q}' holds 1 NaN or infinite"),
        (TARGET, out, "is not an empty directory"),
        (DRAFTER, tmp_path / "new", "holds a drafter"),
        (tmp_path / "none", tmp_path / "new", "config.json: the file is missing"),
    ):
        assert main(["quantise", str(model), str(written)]) == 2
        assert says in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "target"]


def model_of(leaves: int = 1) -> Decoder:
    config = replace(CONFIG, quantization=Quantization())
    model = Decoder(config, numerics=Numerics("strict"), split=Split(leaves))
    draw(model.parameters())
    model.self_test()
    return model


def test_logits_stay_close_to_those_without_quantisation() -> None:
    """Errors of e4m3 are 3 % of a value, at random over 256 products and six maps."""
    exact, found = Decoder(CONFIG, numerics=Numerics("strict")), model_of()
    draw(exact.parameters())
    logits = [
        model.logits(Sequence(model, capacity=160).extend(TOKENS).hidden_RH)
        for model in (exact, found)
    ]
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0.001 < error < 0.1


def test_row_has_the_same_bits_in_any_company() -> None:
    for leaves in (1, 2):
        model = model_of(leaves)
        whole_RH = Sequence(model, capacity=160).extend(TOKENS).hidden_RH
        parts = Sequence(model, capacity=160)
        hidden = [parts.extend(part).hidden_RH for part in TOKENS.split([1, 2, 30, 64, 43])]
        assert torch.equal(torch.cat(hidden), whole_RH)


def test_adapters_read_inputs_that_are_not_quantised() -> None:
    numerics, parts = Numerics("strict"), {"q_proj": 128}
    projection = Projection(256, parts, bias=False, numerics=numerics, in_fp8=True)
    ((_, weight),) = projection.parameters()
    weight.copy_(torch.randn(128, 256))
    slots, rows = ProjectionSlots(256, parts, 1, 16, numerics), [AdaptedRows(0, None)]
    slots.fill(0, "q_proj", MatrixPair(torch.randn(16, 256), torch.randn(128, 16)), 2.0)
    x = torch.randn(5, 256)
    found, expected = projection(x, AdaptedProjection(slots, rows)), projection(x)
    slots.add(x, expected, rows)
    assert torch.equal(found, expected)


def test_random_weights_are_quantised_too() -> None:
    config = replace(CONFIG, quantization=Quantization())
    model = load_target(TARGET, numerics=Numerics("strict"), config=config, random=True)
    weight = model.parameters()[Q].whole()
    assert torch.equal(weight, weight.bfloat16().float()) and weight.std() > 0.05
