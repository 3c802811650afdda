"""Active weights, written for the trainer: the whole drafter, the parts of the target that the
drafter's training reads (the embedding, and the head's rows of the draft vocabulary), and step
times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_client.channels.checkpoint import SINGLE
from tlt_server.errors import Conflict
from tlt_server.models.draft_layouts import write_flat
from tlt_server.models.shards import whole
from tlt_server.process.private import private_directory
from tlt_server.weights.parts import Live

TARGET, DRAFTER = "target.safetensors", "drafter"  # in the directory
COSTS = "costs.json"  # the engine's time of steps, where it is known
EMBEDDING, HEAD = "embedding", "head"  # tensors of TARGET: [V, H], and [C, H] by draft id


class Saved(Protocol):
    """A calibration table."""

    def save(self, directory: Path) -> None: ...


def hand_over(live: Live, drafter: Path, costs: bytes = b"") -> Callable[[Path], None]:
    """Copy the live weights into host memory. Return a function that writes the copy into a new
    directory without reading the live weights again. `drafter`: directory with the live drafter's
    config.json. `costs`: content of COSTS. `Conflict` without a drafter.
    """
    if live.drafter is None:
        raise Conflict("this server drafts without a network, so there is nothing to train")
    network, target = live.drafter.network, live.target.network.parameters()
    embedding_VH = whole(target["model.embed_tokens.weight"])
    head_VH = whole(target["lm_head.weight"]) if "lm_head.weight" in target else embedding_VH
    head_CH = head_VH.index_select(0, network.target_ids.to(head_VH.device))
    own = {name: whole(stored) for name, stored in network.parameters().items()}
    if "d2t" in network.vocabulary_map:
        ids_C = network.target_ids.cpu()
        own["d2t"] = ids_C - torch.arange(network.draft_vocab_size)
        own["t2d"] = torch.isin(torch.arange(live.target.network.vocab_size), ids_C)
    return partial(
        _write,
        _host({EMBEDDING: embedding_VH, HEAD: head_CH}),
        _host(own),
        cast(Saved, live.drafter.calibration),
        drafter,
        costs,
    )


def _write(
    target: dict[str, Tensor],
    own: dict[str, Tensor],
    calibration: Saved,
    drafter: Path,
    costs: bytes,
    directory: Path,
) -> None:
    private_directory(directory)
    if costs:
        (directory / COSTS).write_bytes(costs)
    save_file(target, directory / TARGET)
    place = private_directory(directory / DRAFTER)
    save_file(own, place / SINGLE)
    write_flat(drafter, place)
    calibration.save(place)


def _host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
