"""Every way a model directory can be wrong is a `ModelError` that names file, tensor, expected,
found and a remedy.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tlt_server.errors import ModelError, StartupError
from tlt_server.models.config import LayerShape, ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [1, 2],
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def directory(tmp_path):
    """A sound checkpoint in two shards."""
    model = Decoder(ModelConfig.parse(CONFIG, "config.json"), numerics=Numerics("strict"))
    tensors = {name: torch.randn(view.shape) for name, view in model.parameters().items()}
    names = sorted(tensors)
    shards = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    assert weight_map[Q_PROJ] == SECOND
    write_json(tmp_path, {"metadata": {}, "weight_map": weight_map})
    write_json(tmp_path, CONFIG, "config.json")
    return tmp_path


def load(directory):
    return load_target(directory, numerics=Numerics("strict"))


def fails(directory, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(directory)
    for word in words:
        assert word in caught.value.message, f"{word!r} is not in {caught.value.message!r}"


def rewrite(path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def write_json(directory, content, name="model.safetensors.index.json") -> None:
    (directory / name).write_text(json.dumps(content))


def index(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())


def test_a_sound_directory_loads(directory):
    model = load(directory)
    assert model.eos_token_ids == (1, 2)
    write_json(directory, {"eos_token_id": 3}, "generation_config.json")
    assert load(directory).eos_token_ids == (3,)


def test_missing_shard_is_named(directory):
    (directory / SECOND).unlink()
    fails(directory, SECOND, "missing", "download")


def test_tensor_missing_from_its_shard_is_named(directory):
    rewrite(directory / SECOND, **{Q_PROJ: None})
    fails(directory, SECOND, Q_PROJ, "missing", "download the shard again")


def test_tensor_missing_from_the_index_is_named(directory):
    raw = index(directory)
    del raw["weight_map"][Q_PROJ]
    write_json(directory, raw)
    fails(directory, Q_PROJ, "missing", "[16, 16]", "download")


def one_value(value):
    found = torch.zeros(16, 16)
    found[3, 4] = value
    return found


NOT_FINITE = ("1 NaN or infinite values of 256", "earlier checkpoint")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(8, 16), ("[8, 16]", "[16, 16]", "config.json")),
        (torch.zeros(16, 16, dtype=torch.int8), ("torch.int8", "bfloat16", "convert")),
        (one_value(float("nan")), NOT_FINITE),
        (one_value(float("inf")), NOT_FINITE),
    ],
)
def test_tensor_of_a_wrong_shape_or_dtype_is_refused(directory, tensor, words):
    rewrite(directory / SECOND, **{Q_PROJ: tensor})
    fails(directory, SECOND, Q_PROJ, *words)


def test_tensor_of_a_different_architecture_is_refused(directory):
    rewrite(directory / SECOND, **{"model.layers.1.self_attn.q_norm.weight": torch.ones(8)})
    raw = index(directory)
    raw["weight_map"]["model.layers.1.self_attn.q_norm.weight"] = SECOND
    write_json(directory, raw)
    fails(directory, SECOND, "q_norm", "architectures")


@pytest.mark.parametrize("kept", [0, 4, 200, -40])
def test_truncated_file_is_refused(directory, kept):
    path = directory / SECOND
    path.write_bytes(path.read_bytes()[:kept])
    fails(directory, SECOND, "truncated or damaged", "download")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_invalid_json_is_refused(directory, name):
    (directory / name).write_text('{"a": ')
    fails(directory, name, "JSON", "download")


def test_index_cannot_name_files_outside_the_directory(directory):
    write_json(directory, {"weight_map": {Q_PROJ: "../elsewhere.safetensors"}})
    fails(directory, "weight_map", "file name in this directory")


def test_directory_without_weights_is_refused(directory):
    for path in directory.glob("model*"):
        path.unlink()
    fails(directory, "model.safetensors", "missing")
    (directory / "pytorch_model.bin").write_bytes(b"")
    fails(directory, "convert pytorch_model.bin")


def test_missing_model_directory_is_refused(tmp_path):
    fails(tmp_path / "nowhere", "config.json", "missing", "Hugging Face")


PARTLY_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": ...}, ("hidden_size", "None", "whole number")),
        ({"num_hidden_layers": "2"}, ("num_hidden_layers", "'2'")),
        ({"rms_norm_eps": -1}, ("rms_norm_eps", "-1", "positive")),
        ({"num_key_value_heads": 3}, ("num_attention_heads", "2", "3", "multiple")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "yes", "true or false")),
        ({"eos_token_id": "</s>"}, ("eos_token_id", "</s>")),
        ({"sliding_window": 4096}, ("sliding_window", "4096", "full attention")),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32},
            ("sliding_window", "32"),
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ("sliding_attention", "full attention"),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("dynamic", "yarn")),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            ("original_max_position_embeddings", "None"),
        ),
        ({"rope_parameters": PARTLY_ROTATED}, ("partial_rotary_factor", "0.5")),
        ({"architectures": []}, ("architectures", "[]")),
        ({"vocab_size": 1}, ("vocab_size", "at least 2")),
    ],
)
def test_invalid_config_fields_are_refused(directory, changes, words):
    raw = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    write_json(directory, raw, "config.json")
    fails(directory, "config.json", *words)


def test_unknown_architecture_names_the_nearest(directory):
    write_json(directory, CONFIG | {"architectures": ["LlamaForCausualLM"]}, "config.json")
    with pytest.raises(StartupError, match=re.escape("did you mean 'LlamaForCausalLM'?")):
        load(directory)


def test_feature_layer_outside_the_target_is_refused(directory):
    with pytest.raises(ModelError, match=r"\[3\].*0 to 2"):
        load_target(directory, numerics=Numerics("strict"), feature_layers=(0, 1, 3))


def test_disabled_qwen_window_is_accepted():
    raw = {**CONFIG, "model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}
    assert ModelConfig.parse(raw, "config.json").head_dim == 8


def test_old_and_new_rope_fields_mean_the_same():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    before = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}}
    old = ModelConfig.parse({**CONFIG, **before}, "")
    new = ModelConfig.parse({**CONFIG, "rope_parameters": {"rope_theta": 5e5, **scaling}}, "")
    assert old.rope == new.rope and old.rope.theta == 5e5 and old.rope.factor == 4.0


def test_parameters_are_views_of_the_live_weights():
    model = Decoder(ModelConfig.parse(CONFIG, ""), numerics=Numerics("strict"))
    assert model.config.layer_shape == LayerShape()
    model.parameters()[Q_PROJ].fill_(3.0)
    assert (model.layers[1].self_attention.qkv.weight_KX[:, :16] == 3.0).all()
