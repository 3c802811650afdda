"""The linear maps of a target that are in FP8, by `quantization_config` in config.json.

One form is served: e4m3 with a scale per block of 128 x 128 (`tlt_client.quantise`). Others are
refused by name. Embedding, head and norms are never quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tlt_client.quantise import BLOCK
from tlt_server.errors import ModelError

# The form in `quantization_config`.
FORM = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}
# Fused map of a layer -> its linear maps, side by side, by their modules.
MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_MAPS = frozenset(name.split(".")[-1] for parts in MODULES.values() for name in parts)


class LayerQuantization(NamedTuple):
    """Flags of the fused maps of a layer that are in FP8."""

    qkv: bool = False
    output: bool = False
    gate_up: bool = False
    down: bool = False


UNQUANTISED = LayerQuantization()


@dataclass(frozen=True)
class Quantization:
    """FP8 of a target's linear maps. `kept`: those that stay in bfloat16, such as
    `model.layers.0.mlp.down_proj`.
    """

    kept: tuple[str, ...] = ()  # sorted: digests of a config are the same in every process

    def covers(self, module: str) -> bool:
        """Return True if it is in FP8. `module`: a tensor's name without `.weight`."""
        return module.split(".")[-1] in _MAPS and module not in self.kept

    def layer(self, index: int) -> LayerQuantization:
        covered = (self.covers(f"model.layers.{index}.{parts[0]}") for parts in MODULES.values())
        return LayerQuantization(*covered)

    def described(self) -> dict[str, Any]:
        """Return the `quantization_config` of such a checkpoint."""
        return {**FORM, "modules_to_not_convert": sorted({"lm_head", *self.kept})}


def parse_quantization(raw: dict[str, Any], layers: int, source: str) -> Quantization | None:
    """Return the FP8 of a checkpoint; None if it is not quantised. `raw`: its config.json."""
    given = raw.get("quantization_config")
    if given is None:
        if raw.get("compression_config") is not None:
            raise _refused(source, "'compression_config' is there, as of compressed-tensors")
        return None
    if not isinstance(given, dict):
        raise _refused(source, f"'quantization_config' is {given!r}, expected an object")
    for name, wanted in FORM.items():
        found = given.get(name, "e4m3" if name == "fmt" else None)
        if found != wanted:
            what = "quant_method is " + repr(given.get("quant_method"))
            if name != "quant_method":
                what += f" with {name} {found!r}"
            raise _refused(source, f"{what}, expected {name} {wanted!r}")
    named = given.get("modules_to_not_convert") or given.get("ignored_layers") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise _refused(source, f"'modules_to_not_convert' is {named!r}, expected names of modules")
    kept = set[str]()
    for index in range(layers):
        for parts in MODULES.values():
            names = [f"model.layers.{index}.{part}" for part in parts]
            # A name stands for everything with it as a whole part: `mlp`, but not `mlp.gate`.
            own = [name for name in names if any(f".{each}." in f".{name}." for each in named)]
            if own and own != names:
                raise ModelError(
                    f"{source}: 'modules_to_not_convert' names {', '.join(own)}, but "
                    f"{', '.join(names)} are one matmul here: quantise all of them or none"
                )
            kept.update(own)
    return Quantization(tuple(sorted(kept)))


def _refused(source: str, found: str) -> ModelError:
    return ModelError(
        f"{source}: {found}; of quantised checkpoints, FP8 in blocks of {BLOCK} x {BLOCK} with "
        "dynamic activations is served: start the bfloat16 checkpoint with --quantization fp8, or "
        "write one with tlt quantise"
    )
