"""Checks of a push against its manifest and against the active model, each with its refusal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from torch import Tensor

from tlt_client.channels.source import json_object
from tlt_client.channels.tensors import dtype_named
from tlt_server.errors import WeightsRefused
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_layouts import layout_of
from tlt_server.models.loader import dtypes_for
from tlt_server.models.quantised import E4M3
from tlt_server.models.shards import Stored
from tlt_server.weights.checksums import checksum, kind_of
from tlt_server.wire.commands import TensorEntry


def check_config(config: ModelConfig, data: bytes | None, where: str) -> None:
    """Reject a directory whose config describes another model; a directory without a config
    passes. A server in FP8 quantises what comes in another form.
    """
    if data is None:
        return
    raw = json_object(data, where)
    pushed = ModelConfig.parse(layout_of(raw).flat(raw, where), where)
    if pushed.quantization is not None and config.quantization is None:
        raise WeightsRefused(
            f"{where}: these weights are in FP8, and the active ones are not; push the bfloat16 "
            "checkpoint, or serve with --quantization fp8"
        )
    pushed = replace(
        pushed,
        eos_token_ids=config.eos_token_ids,
        max_position=config.max_position,
        quantization=config.quantization,
    )
    for compared in fields(config):
        mine, theirs = getattr(config, compared.name), getattr(pushed, compared.name)
        if mine != theirs:
            raise WeightsRefused(
                f"{where}: {compared.name} is {theirs!r}, the active model has {mine!r}; a push "
                "changes only values: for another model restart the server with --model"
            )


def check_dtype(entry: TensorEntry, parameter: Stored | None) -> None:
    """Reject a declared dtype that cannot be converted to the parameter's."""
    if not entry.dtype:
        return
    dtype = dtype_named(entry.dtype, entry.name)
    taken = dtypes_for(parameter) if parameter is not None else ()
    if taken and dtype not in taken:
        if dtype == E4M3:
            raise not_in_fp8(entry.name, "the manifest")
        names = " or ".join(str(one).removeprefix("torch.") for one in taken)
        raise WeightsRefused(
            f"the manifest says that tensor {entry.name!r} has dtype {entry.dtype}, this server "
            f"takes it as {names}; convert it before it is pushed"
        )


def check_shape(
    name: str, shape: Sequence[int], parameters: Mapping[str, Stored], where: str
) -> None:
    """Reject a shape that differs from the parameter's or, for another name, that is larger than
    any parameter's. Called before memory is allocated for the tensor.
    """
    if name in parameters:
        if tuple(shape) != tuple(parameters[name].shape):
            raise WeightsRefused(
                f"{where}: tensor {name!r} has shape {list(shape)}, the active model has "
                f"{list(parameters[name].shape)}; push the same architecture"
            )
        return
    largest = max(view.numel() for view in parameters.values())
    if math.prod(shape) > largest:
        raise WeightsRefused(
            f"{where}: tensor {name!r} has shape {list(shape)}, more elements than any of the "
            f"model ({largest}); push the same architecture"
        )


def check_content(tensor: Tensor, entry: TensorEntry | None, where: str, mix64: str | None) -> None:
    """Compare a tensor with its entry in the manifest. `mix64`: the tensor's checksum, if known."""
    if entry is None:
        return
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if entry.dtype and entry.dtype.removeprefix("torch.") != dtype:
        raise WeightsRefused(
            f"{where}: tensor {entry.name!r} has dtype {dtype}, the manifest says {entry.dtype}; "
            "push tensors as described"
        )
    if entry.shape is not None and list(entry.shape) != shape:
        raise WeightsRefused(
            f"{where}: tensor {entry.name!r} has shape {shape}, the manifest says {entry.shape}; "
            "push tensors as described"
        )
    if entry.checksum:
        kind = kind_of(entry.checksum)
        found = mix64 if kind == "mix64" and mix64 else checksum(kind, tensor)
        if found != entry.checksum.lower():
            raise WeightsRefused(
                f"{where}: tensor {entry.name!r} has checksum {found}, the manifest says "
                f"{entry.checksum}; it is damaged or of another version: write and push it again"
            )


def not_in_fp8(name: str, where: str) -> WeightsRefused:
    return WeightsRefused(
        f"{where}: tensor {name!r} is in e4m3, and this server does not keep it in FP8; push its "
        "bfloat16 values, or serve a quantised target (--quantization fp8)"
    )
