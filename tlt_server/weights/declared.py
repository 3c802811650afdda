"""Checks of tensors against what a manifest declares, and against the model in use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from tlt_client.channels.tensors import dtype_named
from tlt_server.errors import WeightsRefused
from tlt_server.models.loader import dtypes_for
from tlt_server.models.shards import Stored
from tlt_server.weights.checksums import checksum, kind_of
from tlt_server.wire.commands import TensorEntry


def check_dtype(entry: TensorEntry, parameter: Stored | None) -> None:
    """Refuse a declared dtype that cannot be taken for the parameter."""
    if not entry.dtype:
        return
    dtype = dtype_named(entry.dtype, entry.name)
    taken = dtypes_for(parameter) if parameter is not None else ()
    if taken and dtype not in taken:
        names = " or ".join(str(one).removeprefix("torch.") for one in taken)
        raise WeightsRefused(
            f"the manifest says that tensor {entry.name!r} has dtype {entry.dtype}, this server "
            f"takes it as {names}; convert it before it is pushed"
        )


def check_shape(
    name: str, shape: Sequence[int], parameters: Mapping[str, Stored], where: str
) -> None:
    """Refuse a shape that is not the parameter's or, for another name, that is larger than any
    parameter's. Called before memory is taken for the tensor.
    """
    if name in parameters:
        if tuple(shape) != tuple(parameters[name].shape):
            raise WeightsRefused(
                f"{where}: tensor {name!r} has shape {list(shape)}, the model in use has "
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
    """Compare a tensor with what the manifest declares. `mix64`: the tensor's, if it is known."""
    if entry is None:
        return
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if entry.dtype and entry.dtype.removeprefix("torch.") != dtype:
        raise WeightsRefused(
            f"{where}: tensor {entry.name!r} has dtype {dtype}, the manifest says {entry.dtype}; "
            "push what it describes"
        )
    if entry.shape is not None and list(entry.shape) != shape:
        raise WeightsRefused(
            f"{where}: tensor {entry.name!r} has shape {shape}, the manifest says {entry.shape}; "
            "push what it describes"
        )
    if entry.checksum:
        kind = kind_of(entry.checksum)
        found = mix64 if kind == "mix64" and mix64 else checksum(kind, tensor)
        if found != entry.checksum.lower():
            raise WeightsRefused(
                f"{where}: tensor {entry.name!r} has checksum {found}, the manifest says "
                f"{entry.checksum}; it is damaged or of another version: write and push it again"
            )
