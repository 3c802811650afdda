"""Each family against the reference implementation: small random models, float32, the whole path
from directory to log-prob.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rows_of_one import Sequence
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
MODELS = {  # name: family, configuration
    "llama3-untied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "llama-tied-biases": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 24}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3-untied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
}
TOLERANCE = 1e-4  # float32 over four layers: differences of 1e-6 relative, logits of order 10


def model_of(name: str, seed: int) -> Any:
    """Make the reference with random weights."""
    import transformers  # takes two seconds

    family, config = MODELS[name]
    torch.manual_seed(seed)
    make = getattr(transformers, f"{family}ForCausalLM")
    return make(getattr(transformers, f"{family}Config")(**SMALL, **config))


@pytest.fixture(params=MODELS, scope="module")
def pair(request, tmp_path_factory):
    """(reference model, directory of its checkpoint in three shards)."""
    reference = model_of(request.param, seed=11).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # The initial zeros and ones would hide a missing term.
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    directory = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(directory, max_shard_size="80KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return reference, directory


@torch.no_grad()
def test_logprobs_and_features_match_transformers(pair):
    reference, directory = pair
    model = load_target(directory, numerics=Numerics("strict"), feature_layers=(1, 2, 3))
    tokens = torch.randint(0, model.vocab_size, (300,), generator=torch.Generator().manual_seed(3))
    expected = reference(tokens[None], output_hidden_states=True)
    sequence = Sequence(model, capacity=300)
    parts = [sequence.extend(part) for part in tokens.split(97)]
    logits_RV = torch.cat([model.logits(part.hidden_RH) for part in parts])
    error = (logits_RV.log_softmax(-1) - expected.logits[0].log_softmax(-1)).abs().max().item()
    assert error < TOLERANCE, f"log-probs differ by {error}"
    features_RF = torch.cat([part.features_RF for part in parts])
    expected_RF = torch.cat([expected.hidden_states[layer][0] for layer in (1, 2, 3)], dim=1)
    assert (features_RF - expected_RF).norm() / expected_RF.norm() < 1e-5, "features_RF"


@torch.no_grad()
def test_greedy_tokens_match_transformers(pair):
    reference, directory = pair
    model = load_target(directory, numerics=Numerics("strict"))
    assert model.eos_token_ids == (7,)
    prompt = torch.tensor([5, 17, 99, 3])
    sequence = Sequence(model, capacity=256)
    token, tokens = prompt, []
    for _ in range(200):
        token = model.logits(sequence.extend(token).hidden_RH[-1:]).argmax(-1)
        tokens.append(int(token))
    expected = (
        reference(torch.cat([prompt, torch.tensor(tokens)])[None])
        .logits[0, len(prompt) - 1 : -1]
        .argmax(-1)
    )
    assert tokens == expected.tolist()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_storage_is_read_exactly(tmp_path, dtype):
    reference = model_of("qwen3-untied", seed=5).to(dtype)
    reference.save_pretrained(tmp_path)
    model = load_target(tmp_path, numerics=Numerics("strict"))
    for name, parameter in reference.named_parameters():
        assert torch.equal(model.parameters()[name], parameter.float()), name
