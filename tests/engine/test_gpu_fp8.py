"""A target in FP8 on the interpreter's GPU engine: the demo pair's tokens and log-probs do not
depend on drafts, company or ranks, and checksums are those of effective weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.adapters import write_adapter
from tests.engine.fast_interpreter import patched_once
from tests.engine.fp8 import effective_sums, save_in_fp8
from tests.engine.gpu_engine import bits, choose
from tests.engine.pushing import Pushable, perturbed, why
from tests.engine.ranks_of_tests import run_rank_of_tests
from tests.engine.two_ranks import two_ranks
from tlt_client.channels.checkpoint import SINGLE
from tlt_client.quantise import effective_checksum
from tlt_kernels.gpu import gemm
from tlt_kernels.gpu.quantise import Quantised, quantise_rows
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.loader import read_tensor
from tlt_server.models.quantised import QuantisedTensor
from tlt_server.models.quantization import Quantization
from tlt_server.models.shards import check_ranks, stored_bytes, widths
from tlt_server.wire.records import Strategy

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
CHAIN = Strategy("eagle", 3, 1, 4)
REQUESTS = [
    msgspec.structs.replace(each, token_ids=each.token_ids[-6 - i :])
    for i, each in enumerate(problems_as_requests(TARGET, 2, group=1, seed=0, max_tokens=4))
]
IDS = [each.id for each in REQUESTS]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once(), pytest.MonkeyPatch.context() as patch:
        run_rank_of_tests(patch, "interpreted_rank")
        yield EngineSettings(
            model=TARGET,
            drafter=str(DRAFTER),
            quantization="fp8",
            policy="off",
            device="interpreter",  # type: ignore[arg-type]
            attention="triton",
            pages=24,
            max_model_len=64,
            max_running=2,
            max_rows=16,
            weight_root=tmp_path_factory.mktemp("fp8"),
        )


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Pushable:
    return Pushable(settings)


@pytest.fixture(scope="module")
def plain(engine: Pushable) -> dict[str, tuple[object, ...]]:
    engine.run(*REQUESTS)
    return bits(engine, IDS)


def test_company_and_drafts_change_no_bit(
    engine: Pushable, plain: dict[str, tuple[object, ...]]
) -> None:
    engine.run(REQUESTS[1])
    assert bits(engine, IDS[1:]) == {IDS[1]: plain[IDS[1]]}
    choose(engine, CHAIN)
    engine.said.clear()
    engine.submit(*REQUESTS)
    accepted = 0
    while not engine.engine.idle:
        engine.step()
        accepted += sum(cycle.accepted) if (cycle := engine.engine.last_cycle) else 0
    assert bits(engine, IDS) == plain
    assert accepted


def test_tokens_are_those_of_a_quantised_target(
    settings: EngineSettings, plain: dict[str, tuple[object, ...]]
) -> None:
    """Another target, whose log-probs differ."""
    other = Pushable(replace(settings, quantization="none"))
    other.run(*REQUESTS)
    assert bits(other, IDS) != plain


def test_two_ranks_have_the_bits_of_one(
    settings: EngineSettings, plain: dict[str, tuple[object, ...]]
) -> None:
    with two_ranks(settings) as shared:
        choose(shared, CHAIN)
        shared.run(REQUESTS[1])
        assert bits(shared, IDS[1:]) == {IDS[1]: plain[IDS[1]]}


def test_adapters_change_no_bit_of_other_rows(
    settings: EngineSettings, plain: dict[str, tuple[object, ...]]
) -> None:
    """Rows of a step with adapters are quantised by kernels of their own."""
    engine = Pushable(replace(settings, max_loras=1, max_lora_rank=8))
    path = write_adapter(Path(str(settings.weight_root)) / "adapter", TARGET, 1)
    assert engine.push(path, role="adapter", adapter="a").result == "committed"
    adapted = msgspec.structs.replace(REQUESTS[0], id="adapted", lora="a")
    engine.run(adapted, REQUESTS[1])
    assert bits(engine, IDS[1:]) == {IDS[1]: plain[IDS[1]]}
    assert engine.said["adapted"]


def test_pushed_versions_are_swapped_and_come_back(
    engine: Pushable, plain: dict[str, tuple[object, ...]]
) -> None:
    new = perturbed(TARGET, Path(str(engine.settings.weight_root)) / "new", 1, scale=0.05)
    name = "model.layers.3.mlp.up_proj.weight"
    choose(engine, None)
    for push, directory in ((lambda: engine.push(new), new), (engine.roll_back, TARGET)):
        assert push().error is None
        live = engine.engine.pushes.transaction.versions.live.target
        assert live.live_sums()[name] == effective_checksum(read_tensor(directory, name))
        engine.run(*REQUESTS)
        assert (bits(engine, IDS) == plain) == (directory == TARGET)


def test_values_with_scales_give_the_version_of_bfloat16(
    engine: Pushable, settings: EngineSettings, tmp_path: Path
) -> None:
    """Both one rank and two find the same checksums."""
    new = perturbed(TARGET, tmp_path / "new", 5)
    quantised = save_in_fp8(new, Path(str(settings.weight_root)) / "in-fp8")
    wanted = effective_sums(load_file(new / SINGLE))
    with two_ranks(settings) as shared:
        for each in (engine, shared):
            before = each.checksums()
            report = each.push(quantised, "fp8")
            assert report.result == "committed", why(report)
            sums = each.checksums()
            assert {name: sums[name] for name in wanted} == wanted
            assert each.roll_back().result == "rolled_back" and each.checksums() == before


def test_a_layer_quantises_one_input_by_a_kernel_of_its_own(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = list[torch.Size]()

    def counted(x_MK: torch.Tensor) -> Quantised:
        launches.append(x_MK.shape)
        return quantise_rows(x_MK)

    monkeypatch.setattr(gemm, "quantise_rows", counted)
    choose(engine, None)
    engine.submit(REQUESTS[1])
    engine.step()
    layers, inner = 8, 512
    assert len(launches) == layers and {shape[1] for shape in launches} == {inner}
    engine.finish()


def test_live_checksums_are_of_effective_weights(engine: Pushable) -> None:
    live = engine.engine.pushes.transaction.versions.live.target
    name = "model.layers.3.mlp.up_proj.weight"
    assert live.live_sums()[name] == effective_checksum(read_tensor(TARGET, name))


def test_storage_of_a_target_is_values_and_scales(engine: Pushable) -> None:
    network = engine.engine.pushes.transaction.versions.live.target.network
    kinds = {tensor.dtype for tensor in network.storage()}
    assert kinds == {torch.float32, torch.float8_e4m3fn}
    parameters = network.parameters()
    quantised = {name for name, each in parameters.items() if isinstance(each, QuantisedTensor)}
    assert len(quantised) == 7 * network.config.layers
    assert stored_bytes(parameters) == sum(each.nbytes for each in network.storage())
    other = network.blank()
    assert [each.shape for each in other.storage()] == [each.shape for each in network.storage()]


def test_widths_that_cut_blocks_are_refused() -> None:
    config = ModelConfig.read(TARGET)
    assert widths(config, 128) == [1, 2]
    narrow = replace(config, head_dim=64, heads=4, kv_heads=2, quantization=Quantization())
    assert widths(narrow, 128) == [1]
    with pytest.raises(StartupError, match="; use 1"):
        check_ranks(narrow, 2, 128, "it")
