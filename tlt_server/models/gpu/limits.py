"""The limits of the GPU's layers: models beyond them are refused by name before any allocation.
Imports no kernel.
"""

from __future__ import annotations

from tlt_server.errors import ModelError
from tlt_server.models.config import LayerShape, ModelConfig

HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_GROUP = 16  # query heads of one KV head
WIDTHS = 8  # elements that a row of a weight is a multiple of, for the copy engine


def check_shape(config: ModelConfig, shape: LayerShape, what: str) -> None:
    """Raise `ModelError` with the key of config.json. `what`: the model's name in errors."""
    remedy = "serve another model, or start with --device cpu"
    if shape.output_bias:
        raise ModelError(
            f"{what} has 'attention_bias' true, which gives its output projections biases, and a "
            f"GPU's have none; {remedy}"
        )
    if shape.mlp_bias:
        raise ModelError(f"{what} has 'mlp_bias' true, but a GPU's MLP has no biases; {remedy}")
    if config.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ModelError(
            f"{what} has 'head_dim' {config.head_dim}, and the kernels of a GPU have {known}; "
            f"{remedy}"
        )
    if config.heads > MAX_GROUP * config.kv_heads:
        raise ModelError(
            f"{what} has {config.heads} query heads over {config.kv_heads} KV heads, and the "
            "kernels of a GPU have at most "
            f"{MAX_GROUP} for one; {remedy}"
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % WIDTHS:
            raise ModelError(
                f"{what} has {name!r} {getattr(config, name)}, and the kernels of a GPU need a "
                f"multiple of {WIDTHS}; {remedy}"
            )
