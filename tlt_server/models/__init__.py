"""Model families: a function and a table line each, keyed by `architectures[0]` of an ordinary HF
config.

`loader.load_target(directory, ...)` builds a target with `config` (`ModelConfig`), `forward(rows,
cache) -> Forward` and `logits(hidden_RH) -> logits_RV` (fp32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tlt_server.registry import Registry

if TYPE_CHECKING:  # `environment` in this package must be importable before torch is
    from torch import Tensor

FAMILIES = Registry(
    "model family",
    {
        "LlamaForCausalLM": "tlt_server.models.config:llama",
        "Qwen2ForCausalLM": "tlt_server.models.config:qwen2",
        "Qwen3ForCausalLM": "tlt_server.models.config:qwen3",
    },
)


class Forward(NamedTuple):
    hidden_RH: Tensor  # after the final norm
    # The inputs of the layers a drafter reads, concatenated; F = 0 when none are asked for.
    features_RF: Tensor
