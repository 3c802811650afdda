"""Layouts of draft networks: the fields of config.json, and the names of tensors in files.

A layout's config is read as if it were flat, and its tensors under the names of `models/names.py`,
so nothing else depends on a directory's layout. `tlt drafter export` writes the same layouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tlt_server.errors import ModelError
from tlt_server.models.config import read_json
from tlt_server.models.draft_networks import EAGLE1, EAGLE3

Raw = dict[str, Any]  # a config.json
NORMS = {
    "norm_before_fc": "the target's joined features are normed before 'fc'",
    "fc_norm": "each feature of the target is normed before 'fc'",
    "norm_output": "the drafted feature is normed before the next draft step",
}
SPECULATORS = "speculators_model_type"  # the key by which a layout of vLLM's speculators is known


class DraftLayout(NamedTuple):
    """A way to describe a network in a directory. `flat` converts its config.json into ours and
    raises `ModelError`; the second argument names the file.
    """

    flat: Callable[[Raw, str], Raw]
    prefixes: Mapping[str, str]  # the start of our tensor names -> of the file's

    def published(self, name: str) -> str:
        """Return the file's name of a tensor."""
        for ours, theirs in self.prefixes.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name


def _as_it_is(raw: Raw, source: str) -> Raw:
    """Return the config of SafeAILab and SGLang. vLLM puts its own prefix before the architecture;
    `qkv_bias` is SafeAILab's name for the biases of a Qwen2 layer.
    """
    named = raw.get("architectures")
    known = {"EagleLlamaForCausalLM": EAGLE1, "Eagle3LlamaForCausalLM": EAGLE3}
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        named = [known.get(named[0], named[0])]
    if named == [EAGLE3]:
        _check_norms(raw, source)
    bias = {"attention_bias": raw["qkv_bias"]} if "qkv_bias" in raw else {}
    return {**raw, "architectures": named, **bias}


def _check_norms(raw: Raw, source: str) -> None:
    """Refuse norms of some EAGLE-3 networks that this server does not compute."""
    nested = raw.get("eagle_config")
    for name, what in NORMS.items():
        if raw.get(name) or (isinstance(nested, dict) and nested.get(name)):
            raise ModelError(
                f"{source}: {name!r} is set: {what}, which this server does not compute; use a "
                "drafter without that norm"
            )


def _speculators(raw: Raw, source: str) -> Raw:
    """Return the config of vllm-project/speculators (`Eagle3SpeculatorConfig`), whose inner config
    describes the layer in the target's sizes.
    """
    kind, layer = raw[SPECULATORS], raw.get("transformer_layer_config")
    if kind != "eagle3":
        raise ModelError(
            f"{source}: {SPECULATORS!r} is {kind!r}; of this layout only 'eagle3' is served: "
            "choose another drafter"
        )
    if not isinstance(layer, dict):
        raise ModelError(
            f"{source}: 'transformer_layer_config' is {layer!r}; expected an object: download the "
            "file again"
        )
    _check_norms(raw, source)
    keys = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    return {**layer, "architectures": [EAGLE3], **{key: raw[key] for key in keys if key in raw}}


FLAT = DraftLayout(_as_it_is, {})
NESTED = DraftLayout(_speculators, {"midlayer.": "layers.0."})


def write_flat(drafter: Path, directory: Path) -> None:
    """Write a drafter's config.json for tensors under our names."""
    _, raw = read_layout(drafter)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def layout_of(raw: Raw) -> DraftLayout:
    return NESTED if SPECULATORS in raw else FLAT


def read_layout(directory: Path) -> tuple[DraftLayout, Raw]:
    """Return the layout of a directory and its flat config.json. Raises `ModelError`."""
    source = directory / "config.json"
    raw = read_json(source)
    layout = layout_of(raw)
    return layout, layout.flat(raw, str(source))
