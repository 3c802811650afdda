"""FP8 checkpoints: what is loaded, and every fault as an error with file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.unit.test_loader_errors import CONFIG
from tlt_client.quantise import effective, quantise
from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import check_files, fill, load_target, own_dtype
from tlt_server.models.numerics import Numerics
from tlt_server.models.quantization import Quantization
from tlt_server.models.split import Split
from tlt_server.weights.checksums import live_sums

RAW = CONFIG | {"hidden_size": 256, "intermediate_size": 300, "num_attention_heads": 4}
QUANTISED = RAW | {"quantization_config": Quantization().described()}
Q, SCALES = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.q_proj.weight_scale_inv",
)
Tensors = dict[str, Tensor]


def built(raw: dict[str, Any] = QUANTISED) -> Decoder:
    return Decoder(ModelConfig.parse(raw, "config.json"), numerics=Numerics("strict"))


@pytest.fixture(scope="module")
def plain() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    parameters = built(RAW).parameters().items()
    return {n: torch.randn(view.shape, generator=generator).bfloat16() for n, view in parameters}


@pytest.fixture
def tensors(plain: Tensors) -> Tensors:
    found = {}
    for name, tensor in plain.items():
        if "_proj" in name:
            found[name], found[f"{name}_scale_inv"] = quantise(tensor)
        else:
            found[name] = tensor
    return found


def write(directory: Path, tensors: Tensors, raw: dict[str, Any] = QUANTISED) -> Path:
    """Scales lie in a file of their own."""
    directory.mkdir(exist_ok=True)
    shards = {"a.safetensors": Tensors(), "b.safetensors": Tensors()}
    for name, tensor in tensors.items():
        shards["b.safetensors" if name.endswith("_inv") else "a.safetensors"][name] = tensor
    for name, members in shards.items():
        save_file(members, directory / name)
    weights = {name: shard for shard, members in shards.items() for name in members}
    index = json.dumps({"metadata": {}, "weight_map": weights})
    (directory / "model.safetensors.index.json").write_text(index)
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def sums(directory: Path, **changes: Any) -> dict[str, str]:
    config = replace(ModelConfig.read(directory), **changes)
    model = load_target(directory, numerics=Numerics("strict"), config=config)
    return live_sums(model.parameters())


def test_quantised_checkpoint_equals_quantising_at_load(
    plain: Tensors, tensors: Tensors, tmp_path: Path
) -> None:
    kept = write(tmp_path / "fp8", tensors)
    assert own_dtype(kept) == "bfloat16"
    check_files(built().parameters(), kept)
    found = sums(kept)
    assert found == sums(write(tmp_path / "bf16", plain, RAW), quantization=Quantization())
    whole = {n: effective(quantise(t)) if "_proj" in n else t for n, t in plain.items()}
    assert found == sums(write(tmp_path / "effective", whole, RAW))
    halved = tensors | {n: t.bfloat16() for n, t in tensors.items() if n.endswith("_inv")}
    assert found == sums(write(tmp_path / "halved", halved))


def test_modules_that_are_kept_stay_as_they_are(
    plain: Tensors, tensors: Tensors, tmp_path: Path
) -> None:
    names = ("gate_proj.weight", "up_proj.weight")
    mixed = {n: t for n, t in tensors.items() if not any(name in n for name in names)}
    mixed |= {n: t for n, t in plain.items() if n.endswith(names)}
    given = Quantization().described() | {"modules_to_not_convert": ["gate_proj", "up_proj"]}
    found = sums(write(tmp_path / "mixed", mixed, RAW | {"quantization_config": given}))
    exact = sums(write(tmp_path / "bf16", plain, RAW))
    assert {n for n in plain if n.endswith(names)} < {n for n in plain if found[n] == exact[n]}
    assert found[Q] != exact[Q]
    unnamed = write(tmp_path / "unnamed", tensors, RAW | {"quantization_config": given})
    for check in (check_files, fill):
        with pytest.raises(ModelError, match=r"gate_proj\.weight_scale_inv.*not in FP8"):
            check(load_empty(unnamed).parameters(), unnamed)


def load_empty(directory: Path) -> Decoder:
    return Decoder(ModelConfig.read(directory), numerics=Numerics("strict"))


def test_scales_of_any_size_are_kept(tensors: Tensors, tmp_path: Path) -> None:
    tensors[SCALES] = torch.full_like(tensors[SCALES], 0.0123456)
    directory = write(tmp_path / "fp8", tensors)
    model = load_empty(directory)
    fill(model.parameters(), directory)
    expected = (tensors[Q].float() * 0.0123456).bfloat16().float()
    assert torch.equal(model.parameters()[Q].whole(), expected)


def nan(tensors: Tensors) -> None:
    tensors[Q].view(torch.uint8)[7, 9] = 0xFF


def scale(value: float) -> Callable[[Tensors], None]:
    def put(tensors: Tensors) -> None:
        tensors[SCALES][1, 1] = value

    return put


def other_shape(tensors: Tensors) -> None:
    tensors[SCALES] = tensors[SCALES][:1].contiguous()


def other_dtype(tensors: Tensors) -> None:
    tensors[SCALES] = tensors[SCALES].half()


def alone(tensors: Tensors) -> None:
    del tensors[SCALES]


def no_values(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q].bfloat16()


def unnamed(tensors: Tensors) -> None:
    tensors[Q] = tensors[Q].bfloat16()
    del tensors[SCALES]


def no_weight(tensors: Tensors) -> None:
    del tensors[Q]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (nan, rf"a\.safetensors.*{Q}' holds 1 NaN values"),
        *((scale(value), rf"b\.safetensors.*{SCALES}' holds 1 scales") for value in (0.0, -1.0)),
        (scale(float("inf")), rf"{SCALES}' holds 1 scales such as inf"),
        (scale(float("nan")), rf"{SCALES}' holds 1 scales such as nan"),
        (scale(3e38), rf"a\.safetensors.*{Q}' holds values beyond the range of bfloat16"),
        (other_shape, rf"{SCALES}' has shape \[1, 2\].*expected \[2, 2\]"),
        (other_dtype, rf"{SCALES}' has .*dtype torch\.float16"),
        (alone, rf"a\.safetensors.*{Q}' has dtype torch\.float8_e4m3fn and no tensor '{SCALES}'"),
        (no_values, rf"a\.safetensors.*{Q}' has dtype torch\.bfloat16 and scales"),
        (unnamed, rf"{Q}' has dtype torch\.bfloat16 and no tensor.*'modules_to_not_convert'"),
        (no_weight, rf"{Q}' is missing"),
    ],
)
def test_fault_is_refused_with_file_and_tensor(
    damage: Callable[[Tensors], None], says: str, tensors: Tensors, tmp_path: Path
) -> None:
    damage(tensors)
    directory = write(tmp_path / "fp8", tensors)
    with pytest.raises(ModelError, match=says):
        load_target(directory, numerics=Numerics("strict"))
    if "holds" not in says:  # headers reveal it
        with pytest.raises(ModelError, match=says.partition(r"\.safetensors.*")[2] or says):
            check_files(load_empty(directory).parameters(), directory)


def test_scales_without_quantization_config_are_refused(tensors: Tensors, tmp_path: Path) -> None:
    directory = write(tmp_path / "fp8", tensors, RAW)
    with pytest.raises(ModelError, match="not in FP8 here; correct 'quantization_config'"):
        load_target(directory, numerics=Numerics("strict"))


def test_two_leaves_are_of_whole_blocks_and_shards_equal_the_whole() -> None:
    """A rank's slices, side by side, have the checksums of the whole tensor."""
    raw = QUANTISED | {"intermediate_size": 512, "num_attention_heads": 2}
    config = ModelConfig.parse(raw, "")
    shards = [
        Decoder(config, numerics=Numerics("strict"), split=Split(2, rank, 2)) for rank in (0, 1)
    ]
    shards[0].peers, shards[0].split = (shards[1],), Split(2, 0, 2)
    whole = Decoder(config, numerics=Numerics("strict"), split=Split(2))
    values = {n: torch.randn(p.shape).bfloat16() for n, p in whole.parameters().items()}
    for model in (whole, shards[0]):
        for name, stored in model.parameters().items():
            stored.copy_(values[name])
    assert live_sums(whole.parameters()) == live_sums(shards[0].parameters())
