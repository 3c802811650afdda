"""A padded pair says what the small one says, to our engine and to others, and is as large as it
claims.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.tiny import write_eagle, write_target
from tests.rows_of_one import Sequence, certain_rows
from tlt_client.channels.checkpoint import CALIBRATION
from tlt_kernels.reference import rms_norm
from tlt_server.__main__ import main
from tlt_server.bench.pad import write
from tlt_server.bench.padding.recipe import WHISPER, pad
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.draft_checkpoint import feature_layers
from tlt_server.models.eagle import Eagle3
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.wire.commands import Submit
from tlt_server.wire.records import Strategy

PAD = ("bench", "pad")
# Float32 over eight layers, logits of size 30; two implementations of the small model differ so.
TOLERANCE = 1e-4
# Problems whose greedy answers take over 200 tokens; after an answer's end the small model's own
# rounding grows to 1e-2.
LONG = (2, 3, 5)
MID = SHAPES["mid"]
REAL = {
    "qwen2.5-7b": transformers.Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
    "qwen2.5-32b": transformers.Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "llama-3.1-70b": transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "llama-3.1-8b": transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
}


class Loaded(NamedTuple):
    target: Decoder
    drafter: Eagle3


def load(target: Path, drafter: Path) -> Loaded:
    model = load_target(
        target,
        numerics=Numerics("strict"),
        feature_layers=feature_layers(drafter, ModelConfig.read(target)),
    )
    return Loaded(model, Eagle3.load(drafter, model))


@pytest.fixture(scope="module")
def small() -> Loaded:
    return load(TARGET, DRAFTER)


@pytest.fixture(scope="module", params=["qwen2", pytest.param("llama", marks=pytest.mark.soak)])
def directory(request, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    write(
        pad(TARGET, DRAFTER, replace(MID, family=request.param), torch.float32),
        out,
        shard_bytes=60_000_000,
    )
    return out


@pytest.fixture(scope="module")
def padded(directory) -> Loaded:
    return load(directory / "target", directory / "drafter")


@pytest.fixture(scope="module")
def texts(small) -> list[Tensor]:
    """Problems with the first 200 tokens that the small model says to them, greedy."""
    found = []
    for number in LONG:
        (request,) = problems_as_requests(TARGET, 1, group=1, seed=number)
        sequence, token = Sequence(small.target, capacity=400), torch.tensor(request.token_ids)
        tokens = [token]
        for _ in range(200):
            token = small.target.logits(sequence.extend(token).hidden_RH[-1:]).argmax(-1)
            tokens.append(token)
        found.append(torch.cat(tokens))
    return found


def outputs(pair: Loaded, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logits, its features, and the drafter's logits at every position."""
    said = Sequence(pair.target, capacity=len(tokens)).extend(tokens)
    table_P = torch.arange(len(tokens) // 16 + 1, dtype=torch.int32)
    cache = pair.drafter.make_cache(len(table_P), 16, 1)
    h_RH = pair.drafter.forward(
        certain_rows(tokens[1:], 1, table_P, 16), pair.drafter.fuse(said.features_RF[:-1]), cache
    )
    return pair.target.logits(said.hidden_RH), said.features_RF, pair.drafter.logits(h_RH)


@torch.no_grad()
def test_padded_pair_computes_the_small_pairs_outputs(small, padded, texts):
    width = small.target.hidden_size
    vocab = small.target.vocab_size
    drafts = small.drafter.draft_vocab_size
    for tokens in texts:
        logits_RV, features_RF, drafted_RC = outputs(small, tokens)
        large_RV, large_RF, large_RC = outputs(padded, tokens)
        assert (large_RV[:, :vocab] - logits_RV).abs().max() < TOLERANCE, "logits_RV"
        # A row's bits do not depend on the rows next to it, so 200 steps of greedy decoding give
        # the same.
        assert torch.equal(large_RV[-201:-1].argmax(-1), tokens[-200:])
        assert large_RV[:, vocab:].max() < -200, (
            "a token beyond the small vocabulary could be sampled"
        )
        live_RF = large_RF.view(len(tokens), 3, -1)[:, :, :width].flatten(1)
        assert (live_RF - features_RF).norm() / features_RF.norm() < 1e-5, "features_RF"
        assert (large_RC[:, :drafts] - drafted_RC).abs().max() < TOLERANCE, "drafted_RC"
        assert large_RC[:, drafts:].max() < -200, (
            "a draft beyond the small vocabulary could be drafted"
        )
        assert torch.equal(large_RC.topk(4).indices, drafted_RC.topk(4).indices)
    assert torch.equal(padded.drafter.target_ids[:drafts], small.drafter.target_ids)


@torch.no_grad()
def test_transformers_loads_the_padded_target(directory, small, texts):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "target", dtype=torch.float32
    )
    assert len(list((directory / "target").glob("*.safetensors"))) > 1, "should be sharded"
    for tokens in texts:
        logits_RV = outputs(small, tokens)[0]
        assert (
            model(tokens[None]).logits[0, :, : small.target.vocab_size] - logits_RV
        ).abs().max() < TOLERANCE
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "target")
    assert (
        tokenizer("1 + 1").input_ids
        == transformers.AutoTokenizer.from_pretrained(TARGET)("1 + 1").input_ids
    )


@torch.no_grad()
def test_padded_pair_accepts_tokens_beyond_the_small_vocabulary(small, padded, texts):
    """A prompt of ids of the large vocabulary is the prompt of the small ids that they repeat."""
    vocab = small.target.vocab_size
    tokens = texts[0][:60]
    logits_RV = outputs(padded, tokens + vocab * (torch.arange(60) % 5))[0]
    assert (logits_RV[:, :vocab] - outputs(small, tokens)[0]).abs().max() < TOLERANCE


def accept_length(target: Path, drafter: Path) -> tuple[dict[str, list[int]], float]:
    engine, _ = assemble(
        EngineSettings(
            model=str(target),
            device="cpu",
            drafter=str(drafter),
            policy="fixed",
            sd_strategy=Strategy("eagle", 7, 8, 16).name,
            kv_memory_mb=512,
            max_model_len=512,
        )
    )
    requests = problems_as_requests(target, 4, group=2, seed=50, max_tokens=40)
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    engine.send(Submit(requests))
    emitted = rows = 0
    while not engine.idle:
        for output in engine.step():
            tokens[output.id] += output.token_ids
        if (cycle := engine.last_cycle) and cycle.drafted:
            emitted, rows = emitted + cycle.emitted, rows + cycle.context.decoding
    return tokens, emitted / rows


@pytest.mark.long
def test_padded_pair_keeps_the_accept_length_and_tokens(tmp_path):
    """Sampled at temperature 1, which a difference of 1e-4 in the logits can turn only where two
    tokens nearly tie: not here.
    """
    write(pad(TARGET, DRAFTER, MID, torch.float32), tmp_path)
    assert accept_length(tmp_path / "target", tmp_path / "drafter") == accept_length(
        TARGET, DRAFTER
    )


def tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    pair = pad(TARGET, DRAFTER, MID, dtype, seed=seed)
    return dict(
        itertools.chain(
            pair.target.tensors(),
            ((f"drafter.{name}", tensor) for name, tensor in pair.drafter.tensors()),
        )
    )


@pytest.mark.long
def test_seed_decides_the_padded_bits():
    first, again, other = tensors(), tensors(), tensors(seed=1)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert tensor.dtype in (torch.int64, torch.bool) or not torch.equal(tensor, other[name]), (
            name
        )
    large = [
        tensor.flatten()[-1000:]
        for tensor in first.values()
        if tensor.dtype == torch.bfloat16 and tensor.numel() > 10_000
    ]
    assert len({tuple(part.tolist()) for part in large}) == len(large), (
        "two tensors hold the same random numbers"
    )


def test_only_required_weights_of_a_padded_pair_are_zero():
    """No row or column of a matrix is zero, and the whispering weights' mantissas are as varied as
    any weight's.
    """
    zeros = total = 0
    for name, tensor in tensors().items():
        if tensor.dtype != torch.bfloat16:
            continue
        assert tensor.isfinite().all(), name
        zeros, total = zeros + int((tensor == 0).sum()), total + tensor.numel()
        if tensor.ndim == 2:
            assert tensor.ne(0).any(0).all() and tensor.ne(0).any(1).all(), name
            if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
                quiet = tensor[300:].float()
                assert quiet.abs().max() < 10 * WHISPER and 0.9 < quiet.std() / WHISPER < 1.1, name
                mantissas = (
                    (tensor[300:].view(torch.int16) & 127).flatten().int().bincount(minlength=128)
                )
                # The highest mantissas of normal numbers are half as frequent as the lowest.
                assert mantissas.min() > 0.4 * mantissas.max(), name
    assert zeros < 1e-3 * total


@pytest.mark.parametrize("name", REAL)
def test_padded_tensors_match_the_real_models(name):
    pair = pad(TARGET, DRAFTER, SHAPES[name], torch.bfloat16, device="meta")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(REAL[name], dtype=torch.bfloat16)
    real = {key: (tensor.shape, tensor.dtype) for key, tensor in model.state_dict().items()}
    ours = {key: (tensor.shape, tensor.dtype) for key, tensor in pair.target.tensors()}
    # For the small model's; see `shapes`
    biases = {key for key in ours if SHAPES[name].family == "llama" and key.endswith("bias")}
    assert {key: layout for key, layout in ours.items() if key not in biases} == real
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ):
        assert pair.target.config[key] == getattr(REAL[name], key)
    hidden, heads, kv_heads = SHAPES[name].hidden, SHAPES[name].heads, SHAPES[name].kv_heads
    drafter = {key: tuple(tensor.shape) for key, tensor in pair.drafter.tensors()}
    assert drafter["fc.weight"] == (hidden, 3 * hidden)
    assert drafter["lm_head.weight"] == (32_000, hidden)
    assert drafter["midlayer.self_attn.q_proj.weight"] == (heads * 128, 2 * hidden)
    assert drafter["midlayer.self_attn.k_proj.weight"] == (kv_heads * 128, 2 * hidden)
    assert drafter["t2d"] == (SHAPES[name].vocab,) and drafter["d2t"] == (32_000,)


def test_padded_norm_has_the_effect_of_the_small_epsilon():
    """The epsilon holds where the residual is so small that it decides, and in the 7B's width."""
    pair = pad(TARGET, DRAFTER, SHAPES["qwen2.5-7b"], torch.float32, device="meta")
    shape, scale = SHAPES["qwen2.5-7b"], (256 / 3584) ** 0.5
    x_RH = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-4], [1e-3], [50.0]]
    )
    large_RH = torch.nn.functional.pad(x_RH, (0, shape.hidden - 256))
    large_RH[:, 256] = 2.0**-7
    found_RH = rms_norm(
        large_RH, torch.full((shape.hidden,), scale), pair.target.config["rms_norm_eps"]
    )[:, :256]
    torch.testing.assert_close(found_RH, rms_norm(x_RH, torch.ones(256), 1e-6), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 256}, ("hidden_size", "257", "256")),
        ({"layers": 7}, ("8 layers", "7", "raise --layers to 8")),
        ({"heads": 2}, ("query heads per KV head", "2", "1")),
        ({"head_dim": 64}, ("head_dim", "128", "64")),
        ({"draft_vocab": 6000}, ("further draft ids", "5744", "5000")),
    ],
)
def test_shapes_that_cannot_hold_the_pair_are_refused(changes, words):
    with pytest.raises(ModelError) as caught:
        pad(TARGET, DRAFTER, replace(MID, **changes), torch.float32)
    assert all(word in caught.value.message for word in words), caught.value.message


def test_half_precision_without_the_exponent_is_refused():
    with pytest.raises(ModelError, match="float16"):
        pad(TARGET, DRAFTER, MID, torch.float16)


def test_other_engines_read_every_padded_drafter_tensor(directory):
    """vLLM and SGLang read all safetensors files of the folder, and vLLM refuses unknown names."""
    names = {
        name
        for file in (directory / "drafter").glob("*.safetensors")
        for name in load_file(file, device="cpu")
    }
    layer = {
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
    }
    assert names == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} | {
        f"midlayer.{name}.weight" for name in layer
    }
    assert (directory / "drafter" / CALIBRATION).read_bytes() == (
        DRAFTER / CALIBRATION
    ).read_bytes()


def test_pair_of_other_shapes_can_be_padded(tmp_path):
    """Nothing depends on the shipped pair: random weights, six layers, heads of 32."""
    target, drafter = write_target(tmp_path / "small"), write_eagle(tmp_path / "head")
    shape = replace(
        MID,
        hidden=160,
        intermediate=200,
        layers=7,
        vocab=500,
        draft_vocab=100,
        head_dim=32,
        max_position=1024,
    )
    write(pad(target, drafter, shape, torch.float32), tmp_path / "out")
    tokens = torch.randint(0, 97, (120,), generator=torch.Generator().manual_seed(2))
    logits_RV, _, drafted_RC = outputs(load(target, drafter), tokens)
    large_RV, _, large_RC = outputs(
        load(tmp_path / "out" / "target", tmp_path / "out" / "drafter"), tokens
    )
    assert (large_RV[:, :97] - logits_RV).abs().max() < TOLERANCE
    assert (large_RC[:, :60] - drafted_RC).abs().max() < TOLERANCE


def test_pad_command_writes_a_pair_and_overwrites_none(tmp_path, capsys):
    arguments = [*PAD, "--shape", "mid", "--layers", "8", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert f"--model {tmp_path}/target" in capsys.readouterr().out
    config = ModelConfig.read(tmp_path / "target")
    assert (config.layers, config.hidden_size) == (8, MID.hidden)
    assert (tmp_path / "drafter" / CALIBRATION).exists()
    assert main(arguments) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "device", ["foo", "meta", *(() if torch.cuda.is_available() else ("cuda",))]
)
def test_missing_device_is_a_one_line_error(device, tmp_path, capsys):
    assert main([*PAD, "--shape", "mid", "--device", device, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tlt: --device {device} cannot be used: ")
    assert line.endswith("; use cpu, or cuda on a machine with a GPU")
    assert not (tmp_path / "out").exists()


def test_error_for_too_few_layers_names_the_flag(tmp_path, capsys):
    assert main([*PAD, "--shape", "mid", "--layers", "2", "--out", str(tmp_path / "out")]) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("has 8 layers, the large one 2; raise --layers to 8")
    )
