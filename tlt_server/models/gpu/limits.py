"""The limits of the GPU's layers: models beyond them are refused by name before any allocation.
Imports no kernel.
"""

from __future__ import annotations

from tlt_client.quantise import BLOCK
from tlt_server.errors import ModelError
from tlt_server.models.config import LayerShape, ModelConfig
from tlt_server.models.draft_networks import ARCHITECTURES

HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_GROUP = 16  # query heads of one KV head
WIDTHS = 8  # elements that a row of a weight is a multiple of, for the copy engine


def check_shape(config: ModelConfig, shape: LayerShape, what: str) -> None:
    """Raise `ModelError` with the key of config.json. `what`: the model's name in errors."""
    remedy = "serve another model, or start with --device cpu"
    if shape.output_bias:
        raise ModelError(
            f"{what} has 'attention_bias' true, but output projections on a GPU have no biases; "
            f"{remedy}"
        )
    if shape.mlp_bias:
        raise ModelError(f"{what} has 'mlp_bias' true, but a GPU's MLP has no biases; {remedy}")
    if config.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ModelError(
            f"{what} has 'head_dim' {config.head_dim}, but GPU kernels support {known}; {remedy}"
        )
    if config.heads > MAX_GROUP * config.kv_heads:
        raise ModelError(
            f"{what} has {config.heads} query heads over {config.kv_heads} KV heads, but GPU "
            f"kernels support at most {MAX_GROUP} per KV head; {remedy}"
        )
    sizes = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size")}
    unit, need = WIDTHS, "GPU kernels need"
    if config.quantization is not None:
        flag = (
            "--drafter-quantization" if config.architecture in ARCHITECTURES else "--quantization"
        )
        unit, need, remedy = BLOCK, "FP8 on a GPU needs", f"use {flag} none, {remedy}"
        sizes["num_attention_heads x head_dim"] = config.heads * config.head_dim
        sizes["num_key_value_heads x head_dim"] = config.kv_heads * config.head_dim
    for name, size in sizes.items():
        if size % unit:
            raise ModelError(
                f"{what} has {name!r} {size}, but {need} a multiple of {unit}; {remedy}"
            )
