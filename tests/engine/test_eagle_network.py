"""The EAGLE-3 network against its equations in plain PyTorch, and its checkpoint's errors."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rows_of_one import Sequence, certain_rows
from tlt_kernels import reference
from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig, Rope
from tlt_server.models.decoder import Decoder
from tlt_server.models.draft_checkpoint import feature_layers
from tlt_server.models.eagle import Eagle3
from tlt_server.models.numerics import Numerics
from tlt_server.models.rope import rotary_table

H, V, C, HEADS, KV, D = 32, 40, 12, 4, 2, 8
TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=V,
    hidden_size=H,
    intermediate_size=48,
    layers=6,
    heads=HEADS,
    kv_heads=KV,
    head_dim=D,
    max_position=256,
    norm_eps=1e-6,
    rope=Rope(),
    tied_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(),
)
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": V,
    "draft_vocab_size": C,
    "hidden_size": H,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16,
}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


@pytest.fixture
def target():
    model = Decoder(TARGET, numerics=Numerics("strict"), feature_layers=(2, 3, 3))
    for seed, view in enumerate(model.parameters().values()):
        view.add_(noise(*view.shape, seed=seed))
    return model


@pytest.fixture
def directory(tmp_path):
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(9))[:C].sort().values
    shapes = {
        "fc": (H, 3 * H),
        "midlayer.input_layernorm": (H,),
        "midlayer.hidden_norm": (H,),
        "midlayer.self_attn.q_proj": (HEADS * D, 2 * H),
        "midlayer.self_attn.k_proj": (KV * D, 2 * H),
        "midlayer.self_attn.v_proj": (KV * D, 2 * H),
        "midlayer.self_attn.o_proj": (H, HEADS * D),
        "midlayer.post_attention_layernorm": (H,),
        "midlayer.mlp.gate_proj": (56, H),
        "midlayer.mlp.up_proj": (56, H),
        "midlayer.mlp.down_proj": (H, 56),
        "norm": (H,),
        "lm_head": (C, H),
    }
    tensors = {
        f"{name}.weight": noise(*shape, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    tensors |= {"d2t": ids - torch.arange(C), "t2d": torch.isin(torch.arange(V), ids)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def equations(
    w: dict[str, torch.Tensor], token_R, g_RH, target, norm_first: bool = False
) -> torch.Tensor:
    """h_RH of rows at positions 1, 2, ... in one pass; w holds the checkpoint. `norm_first`: the
    residual stream begins with the feature's norm.
    """
    n = torch.cat(
        [
            reference.rms_norm(
                target.embedding_VH[token_R], w["midlayer.input_layernorm.weight"], 1e-6
            ),
            reference.rms_norm(g_RH, w["midlayer.hidden_norm.weight"], 1e-6),
        ],
        dim=1,
    )
    rows = len(token_R)
    table = rotary_table(Rope(), D, 256)
    cos, sin = table.cos_PD2[1 : rows + 1], table.sin_PD2[1 : rows + 1]
    q, k, v = (
        torch.nn.functional.linear(n, w[f"midlayer.self_attn.{part}_proj.weight"]).view(rows, -1, D)
        for part in "qkv"
    )
    q, k = reference.rotate(q, cos, sin), reference.rotate(k, cos, sin)
    k, v = k.repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1)
    score = torch.einsum("rnd,tnd->nrt", q, k) * D**-0.5
    weight = score.masked_fill(
        torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf")
    ).softmax(-1)
    h = (n[:, H:] if norm_first else g_RH) + torch.einsum("nrt,tnd->rnd", weight, v).reshape(
        rows, -1
    ) @ w["midlayer.self_attn.o_proj.weight"].t()
    x = reference.rms_norm(h, w["midlayer.post_attention_layernorm.weight"], 1e-6)
    gate_up = torch.cat(
        [x @ w["midlayer.mlp.gate_proj.weight"].t(), x @ w["midlayer.mlp.up_proj.weight"].t()],
        dim=1,
    )
    return h + reference.silu_mul(gate_up) @ w["midlayer.mlp.down_proj.weight"].t()


@pytest.mark.parametrize("norm_first", [False, True])
def test_forward_matches_the_equations_after_catch_up_too(target, directory, norm_first):
    config = json.dumps({**CONFIG, "norm_before_residual": norm_first})
    (directory / "config.json").write_text(config)
    weights = load_file(directory / "model.safetensors")
    drafter = Eagle3.load(directory, target)
    tokens = torch.randint(0, V, (80,), generator=torch.Generator().manual_seed(4))
    features_RF = Sequence(target, capacity=80).extend(tokens).features_RF
    g_RH = drafter.fuse(features_RF[:-1])
    expected_RH = equations(
        weights, tokens[1:], features_RF[:-1] @ weights["fc.weight"].t(), target, norm_first
    )
    table_P = torch.randperm(6).to(torch.int32)
    cache = drafter.make_cache(6, 16, 4)
    cache.k.fill_(float("nan")), cache.v.fill_(float("nan"))  # slot 0 stays so
    drafter.store_only(certain_rows(tokens[1:70], 1, table_P, 16), g_RH[:69], cache)
    h_RH = drafter.forward(certain_rows(tokens[70:], 70, table_P, 16), g_RH[69:], cache)
    assert (h_RH - expected_RH[69:]).norm() / expected_RH[69:].norm() < 1e-5, "h_RH"
    logits_RC = (
        reference.rms_norm(expected_RH[69:], weights["norm.weight"], 1e-6)
        @ weights["lm_head.weight"].t()
    )
    assert (drafter.logits(h_RH) - logits_RC).norm() / logits_RC.norm() < 1e-5, "logits_RC"


def test_checkpoint_may_have_vocabulary_map_and_optional_parts(target, directory):
    drafter = Eagle3.load(directory, target)
    tensors = load_file(directory / "model.safetensors")
    assert torch.equal(drafter.target_ids, tensors["t2d"].nonzero()[:, 0])
    assert drafter.embedding_VH is target.embedding_VH
    own = noise(V, H)
    save_file({**tensors, "embed_tokens.weight": own}, directory / "model.safetensors")
    assert torch.equal(Eagle3.load(directory, target).embedding_VH, own)


@pytest.mark.parametrize("kinds", [(torch.int32, torch.uint8), (torch.int16, torch.int64)])
def test_vocabulary_map_may_have_any_integer_dtype(target, directory, kinds):
    plain = Eagle3.load(directory, target)
    tensors = load_file(directory / "model.safetensors")
    for name, kind in zip(("d2t", "t2d"), kinds, strict=True):
        tensors[name] = tensors[name].to(kind)
    save_file(tensors, directory / "model.safetensors")
    assert torch.equal(Eagle3.load(directory, target).target_ids, plain.target_ids)


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm", "norm_output"])
@pytest.mark.parametrize("nested", [False, True])
def test_unsupported_norms_are_refused_by_name(target, directory, name, nested):
    changes = {"eagle_config": {name: True}} if nested else {name: True}
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(ModelError, match=f"'{name}' is set: .* normed before .*without that"):
        Eagle3.load(directory, target)
    (directory / "config.json").write_text(json.dumps({**CONFIG, name: False}))
    Eagle3.load(directory, target)


def test_feature_layers_are_read_in_both_conventions(directory):
    def given(**changes):
        (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        return feature_layers(directory, TARGET)

    assert given() == (2, 3, 3)
    assert given(eagle_aux_hidden_state_layer_ids=[1, 2, 5]) == (1, 2, 5)
    assert given(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}) == (1, 3, 5)
    with pytest.raises(ModelError, match=r"\[1, 2, 6\].*6 layers"):
        given(eagle_aux_hidden_state_layer_ids=[1, 2, 6])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d2t": None}, ("d2t", "missing")),
        ({"d2t": torch.full((C,), 39)}, ("d2t", "contradict")),
        ({"t2d": torch.zeros(V, dtype=torch.bool)}, ("t2d", "contradict")),
        ({"t2d": torch.zeros(V)}, ("t2d", "float32", "torch.bool")),
        ({"t2d": torch.full((V,), 2, dtype=torch.uint8)}, ("t2d", "uint8", "other than 0 and 1")),
        ({"fc.weight": torch.zeros(H, H)}, ("fc.weight", "[32, 32]", "[32, 96]")),
        ({"lm_head.weight": None}, ("lm_head.weight", "missing")),
    ],
)
def test_faulty_drafter_checkpoints_are_refused_by_fault(target, directory, changes, words):
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        directory / "model.safetensors",
    )
    with pytest.raises(ModelError) as caught:
        Eagle3.load(directory, target)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ("LlamaForCausalLM", "LlamaForCausalLMEagle3")),
        ({"hidden_size": 64}, ("hidden_size", "64", "32")),
        ({"draft_vocab_size": 41}, ("draft_vocab_size", "41", "40")),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, ("(0, 1, 2)", "(2, 3, 3)")),
    ],
)
def test_drafter_of_a_different_target_is_refused(target, directory, changes, words):
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(ModelError) as caught:
        Eagle3.load(directory, target)
    assert all(word in caught.value.message for word in words), caught.value.message
