"""FP8 of a target: what config.json may say, what the setting decides, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.test_choice import CARD, NONE
from tests.unit.test_doctor import configured, fails
from tests.unit.test_doctor import found as finding
from tests.unit.test_gpu_memory import CONFIG
from tlt_server.doctor import model
from tlt_server.engine.devices.choice import DeviceChoice, Gpu, choose
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import ModelError, StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.limits import check_shape
from tlt_server.models.quantization import FORM, LayerQuantization, Quantization

FP8 = replace(CONFIG, quantization=Quantization())
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def parsed(**changes: Any) -> Quantization | None:
    given = {name: value for name, value in {**FORM, **changes}.items() if value is not None}
    return ModelConfig.parse({**RAW, "quantization_config": given}, "config.json").quantization


def test_standard_form_is_parsed() -> None:
    everything = Quantization()
    assert parsed() == parsed(fmt=None) == parsed(modules_to_not_convert=["lm_head"]) == everything
    assert ModelConfig.parse(RAW, "").quantization is None
    assert parsed(**everything.described()) == everything
    assert everything.covers("model.layers.1.self_attn.q_proj")
    others = ("lm_head", "model.embed_tokens", "model.layers.0.input_layernorm", "model.norm")
    assert not any(everything.covers(name) for name in (*others, "model.layers.0.mlp.gate"))


def test_names_of_modules_match_by_whole_parts() -> None:
    found = parsed(modules_to_not_convert=["model.layers.0.mlp", "o_proj", "mlp.gate", "self"])
    assert found is not None and not found.covers("model.layers.0.mlp.gate_proj")
    assert found.layer(0) == LayerQuantization(qkv=True)
    assert found.layer(1) == LayerQuantization(qkv=True, gate_up=True, down=True)
    assert parsed(**found.described()) == found
    assert parsed(ignored_layers=["mlp"]) == parsed(modules_to_not_convert=["mlp"])


def test_config_has_one_text_for_digests() -> None:
    """Sets have another order in each process, and the kernels' record is found by this text."""
    found = parsed(modules_to_not_convert=["mlp", "o_proj"])
    assert found is not None and list(found.kept) == sorted(found.kept) and len(found.kept) == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
        ({"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors'"),
        ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4'"),
        ({"weight_block_size": None}, "with weight_block_size None"),
        ({"weight_block_size": [1, 128]}, "with weight_block_size [1, 128]"),
        ({"activation_scheme": "static"}, "with activation_scheme 'static'"),
        ({"fmt": "e5m2"}, "with fmt 'e5m2'"),
        ({"modules_to_not_convert": "lm_head"}, "'modules_to_not_convert' is 'lm_head'"),
    ],
)
def test_other_forms_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        parsed(**changes)
    assert says in caught.value.message and "--quantization fp8" in caught.value.message


def test_part_of_a_fused_map_cannot_be_kept() -> None:
    with pytest.raises(ModelError, match=r"names model\.layers\.0\.mlp\.up_proj, but") as caught:
        parsed(modules_to_not_convert=["model.layers.0.mlp.up_proj"])
    assert "quantise all of them or none" in caught.value.message


def chosen(config: ModelConfig, gpu: Gpu = CARD, **settings: Any) -> DeviceChoice:
    files = SimpleNamespace(dtype=lambda: "bfloat16", config=lambda: config)
    return choose(EngineSettings(model="m", **settings), gpu, files)  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu", [CARD, NONE])
def test_quantization_follows_checkpoint_and_setting(gpu: Gpu) -> None:
    assert chosen(CONFIG, gpu).settings.quantization == "none"
    assert chosen(CONFIG, gpu, quantization="none").settings.quantization == "none"
    assert chosen(CONFIG, gpu, quantization="fp8").settings.quantization == "fp8"
    assert "FP8 weights" in chosen(FP8, gpu).describe()
    with pytest.raises(StartupError, match="are in FP8; leave the setting out"):
        chosen(FP8, gpu, quantization="none")


def test_other_types_than_bfloat16_are_refused_on_a_gpu() -> None:
    for dtype in ("float16", "float32"):
        with pytest.raises(StartupError, match="use dtype bfloat16"):
            chosen(CONFIG, quantization="fp8", dtype=dtype)


@pytest.mark.parametrize("config", [CONFIG, FP8])
def test_checkpoint_in_float16_is_served_in_bfloat16(config: ModelConfig) -> None:
    files = SimpleNamespace(dtype=lambda: "float16", config=lambda: config)
    found, reasons = choose(EngineSettings(model="m", quantization="fp8"), CARD, files)  # type: ignore[arg-type]
    assert found.dtype == "bfloat16"
    assert reasons["dtype"] == "bfloat16: FP8, and the checkpoint in float16"


def test_shapes_that_cut_blocks_are_refused() -> None:
    for change in ({"hidden_size": 3592}, {"intermediate_size": 18952}, {"head_dim": 16}):
        config = replace(FP8, **change)
        with pytest.raises(ModelError, match="FP8 on a GPU needs a multiple of 128"):
            check_shape(config, config.layer_shape, "m")
    check_shape(FP8, FP8.layer_shape, "m")
    narrow = replace(CONFIG, heads=56, head_dim=64)  # two ranks have 128 of keys, four have 64
    for settings in ({}, {"device": "cpu", "quantization": "fp8"}):
        with pytest.raises(StartupError, match="use 1 or 2$"):
            chosen(replace(narrow, quantization=Quantization()), tensor_parallel=4, **settings)
    uneven = replace(FP8, intermediate_size=128 * 141)
    assert chosen(uneven).settings.reduction_leaves == 2, "a GPU's leaves are of whole blocks"
    assert chosen(uneven, NONE).settings.reduction_leaves == 1
    with pytest.raises(StartupError, match="use 1$"):
        chosen(uneven, NONE, reduction_leaves=2)


def test_doctor_names_the_form_of_the_committed_target(tmp_path: Path) -> None:
    """A version that was quantised is lost to a server without FP8, and the reverse."""
    directory = tmp_path / "weights" / "push-1" / "target"
    directory.mkdir(parents=True)
    role = {"version": "v7", "digest": "", "directory": "push-1/target"}
    kept = {"model": str(configured().model.resolve()), "roles": {"target": role}}
    (tmp_path / "weights" / "current.json").write_text(json.dumps(kept))
    for name, wrong, right in (("w.weight", "fp8", "none"), ("w.weight_scale_inv", "none", "fp8")):
        save_file({name: torch.ones(1)}, directory / "model.safetensors")
        config = configured(state_dir=tmp_path, quantization=wrong)
        fails(model.committed_weights, config, "target v7 was kept", f"--quantization {right}")
        config = configured(state_dir=tmp_path, quantization=right)
        assert finding(model.committed_weights, config).status == "ok"
