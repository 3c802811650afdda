"""Weights in force written for the trainer: the drafter whole, of the target what its drafter's
training reads (the embedding, and the head's rows of the draft vocabulary).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_client.channels.checkpoint import SINGLE
from tlt_server.errors import Conflict
from tlt_server.models.draft_layouts import write_flat
from tlt_server.private import private_directory
from tlt_server.weights.parts import Live

TARGET, DRAFTER = "target.safetensors", "drafter"  # in the directory
EMBEDDING, HEAD = "embedding", "head"  # tensors of TARGET: [V, H], and [C, H] by draft id


class Saved(Protocol):
    """A calibration table."""

    def save(self, directory: Path) -> None: ...


def hand_over(live: Live, directory: Path, drafter: Path) -> None:
    """Write into a new directory. `drafter` has the live one's config.json. `Conflict` without a
    drafter.
    """
    if live.drafter is None:
        raise Conflict("this server drafts without a network, so there is nothing to train")
    network, target = live.drafter.network, live.target.network.parameters()
    embedding_VH = target["model.embed_tokens.weight"]
    head_VH = target.get("lm_head.weight", embedding_VH)
    head_CH = head_VH.index_select(0, network.target_ids.to(head_VH.device))
    private_directory(directory)
    save_file(_host({EMBEDDING: embedding_VH, HEAD: head_CH}), directory / TARGET)
    tensors = dict(network.parameters())
    if "d2t" in network.vocabulary_map:
        ids_C = network.target_ids.cpu()
        tensors["d2t"] = ids_C - torch.arange(network.draft_vocab_size)
        tensors["t2d"] = torch.isin(torch.arange(live.target.network.vocab_size), ids_C)
    own = private_directory(directory / DRAFTER)
    save_file(_host(tensors), own / SINGLE)
    write_flat(drafter, own)
    cast(Saved, live.drafter.calibration).save(own)


def _host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
