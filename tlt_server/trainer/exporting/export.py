"""Exports a drafter in the layouts of other engines: written, read back and compared bit by bit.

`tlt drafter export` calls `export`. Weights keep their dtype. Of the target, only config, embedding
and head are read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_server.attention.rows import Rows
from tlt_server.errors import ModelError, StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.draft_checkpoint import describe, fill_drafter
from tlt_server.models.draft_layouts import DraftLayout, read_layout
from tlt_server.models.draft_networks import Layout
from tlt_server.models.eagle import EagleNetwork
from tlt_server.models.loader import read_tensor
from tlt_server.registry import load_object
from tlt_server.trainer.exporting.export_layouts import EXPORTS, Card, Origin, model_card
from tlt_server.trainer.replaying.handed import cpu_frame
from tlt_server.trainer.replaying.replay import PAGE_SIZE

CALIBRATION, ROWS = "calibration.json", 40


class Exported(NamedTuple):
    layout: Layout
    tensors: int
    bytes: int
    sha256: str  # the weights' file's
    compared: int  # hidden states and logits that are equal, bit for bit


def export(
    drafter: Path,
    target: Path,
    layout: Layout,
    directory: Path,
    *,
    base: str,
    card: Card,
    replay: Callable[[Path, Path], str] = lambda drafter, directory: "",
) -> Exported:
    """Write `drafter` into the empty `directory` in a layout of `EXPORTS`. `StartupError` if it
    does not fit the target or the layout, or reads back differently: the written files are then
    unusable. `base`: the target's name for other engines. `replay`: also compares the two drafters
    on recorded responses, and returns the model card's text on accept lengths.
    """
    frame = _frame(target, drafter)
    origin = _origin(drafter, target, frame, base)
    _refuse_misfits(origin, layout)
    network, chosen = _loaded(drafter, frame), EXPORTS[layout]
    tensors = _tensors(origin, chosen.layout, network)
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(chosen.config(origin), indent=2) + "\n")
    if (drafter / CALIBRATION).is_file():
        shutil.copyfile(drafter / CALIBRATION, directory / CALIBRATION)
    compared = _compare(network, _loaded(directory, frame), frame)
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    card = card._replace(accept_lengths=replay(drafter, directory))
    (directory / "README.md").write_text(model_card(origin, layout, digest, card))
    return Exported(layout, len(tensors), weights.stat().st_size, digest, compared)


# -- the drafter, and a target without its layers ------------------------------------------------


def _frame(target: Path, drafter: Path) -> Decoder:
    """Return the target without storage, except for the embedding and head that drafters share."""
    tied = ModelConfig.read(target).tied_embeddings
    embedding_VH = read_tensor(target, "model.embed_tokens.weight")
    head_VH = embedding_VH if tied else read_tensor(target, "lm_head.weight")
    return cpu_frame(target, drafter, embedding_VH, head_VH, leaves=1)


def _loaded(directory: Path, frame: Decoder) -> EagleNetwork:
    described = describe(directory, frame)
    network: EagleNetwork = load_object(described.architecture.cpu)(described, frame)
    fill_drafter(network, directory)
    return network


def _origin(drafter: Path, target: Path, frame: Decoder, base: str) -> Origin:
    _, raw = read_layout(drafter)
    described = describe(drafter, frame)
    return Origin(drafter, raw, described, frame.feature_layers, target, frame.config, base)


def _refuse_misfits(origin: Origin, layout: Layout) -> None:
    """Refuse a drafter that other engines would run at other positions than in training, or that
    the layout cannot describe. The error names every field with both values.
    """
    network = origin.described.config.architecture
    if network != EXPORTS[layout].network:
        fitting = [name for name, row in EXPORTS.items() if row.network == network]
        raise StartupError(
            f"--layout {layout} holds a {EXPORTS[layout].network}, and {origin.directory} is a "
            f"{network}; use --layout {' or '.join(fitting)}"
        )
    mine = ModelConfig.parse(origin.raw, str(origin.directory / "config.json"))
    fields = {
        **{f"rope {name}": value for name, value in vars(mine.rope).items()},
        "max_position_embeddings": mine.max_position,
    }
    theirs = {
        **{f"rope {name}": value for name, value in vars(origin.target.rope).items()},
        "max_position_embeddings": origin.target.max_position,
    }
    wrong = [
        f"{name} is {value!r}, the target's is {theirs[name]!r}"
        for name, value in fields.items()
        if value != theirs[name]
    ]
    if wrong:
        raise StartupError(
            f"{origin.directory / 'config.json'}: {'; '.join(wrong)}: other engines would place "
            "tokens differently; correct config.json if the drafter was trained like its target, "
            "else train it again"
        )
    lacking = [*EXPORTS[layout].lacks(origin)]
    if lacking:
        raise StartupError(
            f"{origin.directory} does not fit --layout {layout}: {'; '.join(lacking)}; use "
            "another layout"
        )


def _tensors(origin: Origin, layout: DraftLayout, network: EagleNetwork) -> dict[str, Tensor]:
    """Return the tensors of the new file, in their present dtypes."""
    before, _ = read_layout(origin.directory)
    tensors = {
        layout.published(name): read_tensor(origin.directory, before.published(name))
        for name in network.parameters()
    }
    if origin.described.architecture.own_head:
        ids_C = network.target_ids
        tensors["d2t"] = ids_C - torch.arange(len(ids_C))
        tensors["t2d"] = torch.isin(torch.arange(network.vocab_size), ids_C)
    else:  # SafeAILab's loader takes no file without an embedding, SGLang's none without a bias
        tensors["embed_tokens.weight"] = read_tensor(
            origin.target_directory, "model.embed_tokens.weight"
        )
        fc_HX = tensors["fc.weight"]
        tensors.setdefault("fc.bias", torch.zeros(len(fc_HX), dtype=fc_HX.dtype))
    return tensors


# -- reading back ----------------------------------------------------------------------------------


def _compare(written: EagleNetwork, read: EagleNetwork, frame: Decoder) -> int:
    """Return the number of compared values. `ModelError` unless all have the same bits."""
    if not torch.equal(written.target_ids, read.target_ids):
        raise ModelError(
            "the draft vocabulary reads back differently; nothing was exported: report this as a "
            "fault of the export"
        )
    values = 0
    for (what, mine), (_, theirs) in zip(
        _probed(written, frame), _probed(read, frame), strict=True
    ):
        differing = int((mine.view(torch.int32) != theirs.view(torch.int32)).sum())
        if differing:
            raise ModelError(
                f"{what} read back differently in {differing} of {mine.numel()} values; nothing "
                "was exported: report this as a fault of the export"
            )
        values += mine.numel()
    return values


@torch.inference_mode()
def _probed(network: EagleNetwork, frame: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Draft after random text and features: first with the target's features, then with its own."""
    random = torch.Generator().manual_seed(0)
    token_R = torch.randint(0, frame.vocab_size, (2 * ROWS,), generator=random)
    features_RF = torch.randn(ROWS, frame.feature_width, generator=random)
    cache = network.make_cache(-(-2 * ROWS // PAGE_SIZE) + 1, PAGE_SIZE, 0)
    g_RH = network.fuse(features_RF)
    half = ROWS // 2
    network.store_only(_rows(token_R[:half], 1), g_RH[:half], cache)
    h_RH = network.forward(_rows(token_R[half:ROWS], 1 + half), g_RH[half:], cache)
    again_RH = network.forward(_rows(token_R[ROWS : ROWS + half], 1 + ROWS), h_RH, cache)
    for what, hidden_RH in (("first", h_RH), ("second", again_RH)):
        yield f"hidden states of the {what} drafts", hidden_RH
        yield f"logits of the {what} drafts", network.logits(hidden_RH)


def _rows(token_R: Tensor, start: int) -> Rows:
    """Return the rows of one request on consecutive pages."""
    count = len(token_R)
    position_R = torch.arange(start, start + count)
    return Rows(
        token_R,
        position_R,
        position_R,
        torch.zeros(count, dtype=torch.int32),
        torch.tensor([start + count], dtype=torch.int32),
        torch.arange(-(-2 * ROWS // PAGE_SIZE) + 1, dtype=torch.int32)[None],
        torch.full((count, 0), -1, dtype=torch.int32),
    )
