"""Random weights in place of a checkpoint's, for benches of a model's shapes: no file is read or
written, so a model may be larger than the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from tlt_server.models.shards import Stored


def draw(parameters: Mapping[str, Stored]) -> None:
    """Fill every tensor with normal values of size 1 / sqrt(inputs), so that activations have the
    size of a trained model's. Values depend on the tensor's name, shape and kind of device, not on
    the ranks that hold it. The largest tensor is in memory twice meanwhile.
    """
    for name, stored in parameters.items():
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        generator = torch.Generator(stored.device).manual_seed(int.from_bytes(digest, "big"))
        values = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
        inputs = stored.shape[-1] if stored.dim() > 1 else 1
        stored.copy_(values.normal_(0.0, inputs**-0.5, generator=generator))
