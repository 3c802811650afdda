"""Receives one role's weights into a network. Each tensor is checked on the bytes that are kept,
then copied to its place and, with a spool, written to the spool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from tlt_client.channels import Receiver, TensorBatch
from tlt_client.channels.checkpoint import CALIBRATION, INDEX
from tlt_client.channels.tensors import dtype_named, written
from tlt_client.quantise import SCALE_SUFFIX, QuantisedBlocks, effective, quantise
from tlt_server.errors import WeightsRefused
from tlt_server.models.draft_checkpoint import map_tensor
from tlt_server.models.draft_networks import VOCABULARY_MAP
from tlt_server.models.loader import check_finite, check_layout, check_names
from tlt_server.models.quantised import E4M3
from tlt_server.models.shards import Stored, in_fp8
from tlt_server.weights.checks import check_content, check_shape, not_in_fp8
from tlt_server.weights.checksums import Content, contents, plain
from tlt_server.weights.halves import Halves, half_missing
from tlt_server.weights.parts import Adapter, Drafter, Network, Target
from tlt_server.weights.storage import Options
from tlt_server.wire.commands import TensorEntry

TOGETHER = 2**29  # bytes that are checked at a time, unless one tensor has more
QUANTISED_TOGETHER = 2**27  # the same of a network in FP8: values, scales and products are made
TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Enter = Callable[[str], None]  # enters a phase; raises to cancel


def _first(tensors: Mapping[str, Tensor], limit: int) -> dict[str, Tensor]:
    """Return the first tensors, up to `limit` bytes; their checksums share one wait for the GPU.
    The limit bounds memory, since tensors of another dtype are copied.
    """
    first: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if first and size > limit:
            break
        first[name] = tensor
    return first


@dataclass
class Arriving:
    role: str
    network: Network
    parameters: Mapping[str, Stored]
    others: Set[str]  # names that may come and are no parameters
    options: Options
    place: str = "the weights in use"  # where the newest tensors come from, for messages
    sums: dict[str, str] = field(default_factory=dict)  # tensor that has come -> its checksum
    found: dict[str, Tensor] = field(default_factory=dict)  # the tensors among `others`
    overwritten: bool = False  # in place: a live value has changed
    halves: Halves = field(init=False)
    _links: bool = True  # files that came may be kept as they are
    _kept: dict[str, str] = field(default_factory=dict)  # tensor -> the file it is kept in
    _whole: dict[Path, str] = field(default_factory=dict)  # file that came -> file it is kept as

    def __post_init__(self) -> None:
        # Drafters are published in bfloat16 and quantised where they are kept.
        self.halves = Halves(self.parameters if self.role == "target" else {})

    @classmethod
    def into(
        cls,
        role: str,
        network: Network,
        options: Options,
        arrived: Mapping[str, str] = MappingProxyType({}),
    ) -> Arriving:
        """`network`: the one to fill. `arrived`: checksums of the tensors that it already has."""
        tied = {TIED_HEAD} if network.config.tied_embeddings else set()
        others = tied if role == "target" else network.vocabulary_map  # type: ignore[union-attr]
        return cls(role, network, network.parameters(), others, options, sums=dict(arrived))

    @property
    def in_place(self) -> bool:
        """Return True if the push writes directly into the live network."""
        return self.options.storage.in_place and self.role != "adapter"

    @property
    def missing(self) -> list[str]:
        """Return the tensors that a role pushed in parts still needs. The vocabulary map counts, as
        it may still arrive. A tied head does not: it may arrive last or never.
        """
        names = (self.parameters.keys() | self.others) - {TIED_HEAD} - self.sums.keys()
        return sorted(map(self.halves.lacking, names))

    def has(self, name: str) -> bool:
        return name in self.sums or name in self.halves.came

    # -- before the first tensor -------------------------------------------------------------------

    def open(
        self, receiver: Receiver, declared: Mapping[str, TensorEntry], *, partial: bool
    ) -> None:
        """Check that the manifest lists the right tensors; `partial`: a subset is enough."""
        coming, self.place = receiver.names[self.role], receiver.places[self.role]
        expected = (
            {name: view for name, view in self.parameters.items() if name in coming}
            if partial
            else self.parameters
        )
        dtypes = {
            name: dtype_named(entry.dtype, name) for name, entry in declared.items() if entry.dtype
        }
        for layout in receiver.layouts:
            if layout.role == self.role:
                dtypes[layout.spec.name] = layout.spec.dtype
        self.halves.check_names(coming, {} if partial else dtypes, self.place)
        check_names(expected, coming, {*self.others, *self.halves.scales}, self.place)
        for name, entry in declared.items():
            if entry.shape is not None and name in self.halves.scales:
                dtype = dtypes.get(name, torch.float32)
                self.halves.check_layout(name, entry.shape, dtype, "the manifest")
            elif entry.shape is not None:
                check_shape(name, entry.shape, self.parameters, "the manifest")
        for layout in receiver.layouts:
            if layout.role == self.role:
                self._check_layout(
                    layout.spec.name, layout.spec.shape, layout.spec.dtype, layout.where
                )
        # What is quantised here is kept in FP8, which takes half the room.
        self._links = not any(
            name in self.halves.matrices and dtype != E4M3 for name, dtype in dtypes.items()
        )
        for name in sorted(declared.keys() ^ coming.keys() if declared else ()):
            where = (
                "the manifest, but not in the files"
                if name in declared
                else "the files, but not in the manifest"
            )
            raise WeightsRefused(
                f"tensor {name!r} is in {where}; name exactly the tensors pushed, or none"
            )

    def _check_layout(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, where: str
    ) -> None:
        """Check the shape and type of a tensor before it is allocated or read."""
        if name in self.halves.scales:
            self.halves.check_layout(name, shape, dtype, where)
        elif name in self.parameters:
            if dtype == E4M3 and name not in self.halves.matrices:
                raise not_in_fp8(name, where)
            check_layout(name, shape, dtype, self.parameters[name], where)
        else:
            check_shape(name, shape, self.parameters, where)

    # -- tensors -----------------------------------------------------------------------------------

    def take(self, batch: TensorBatch, declared: Mapping[str, TensorEntry], enter: Enter) -> None:
        """Check every tensor, copy it to its place and keep it."""
        coming, kept = self._announced(batch), dict(batch.tensors)
        limit = QUANTISED_TOGETHER if self.halves.matrices else TOGETHER
        while coming:
            first = _first(coming, limit)
            enter("check")
            checked = self._checked(first, declared, batch.where)
            enter("fill")
            for name in first:
                del coming[name]
            for name, stored in checked.items():
                if name in self.parameters:
                    self._write()
                    self.parameters[name].copy_(stored)  # type: ignore[arg-type]
                    if name in self.halves.matrices - self.halves.came and self.options.spool:
                        kept |= _in_halves(name, stored)  # type: ignore[arg-type]
                else:
                    # The channel may use its buffers again.
                    self.found[name] = stored.to("cpu", copy=True)  # type: ignore[union-attr]
        enter("spool")
        self._keep(batch, kept)

    def _announced(self, batch: TensorBatch) -> dict[str, Tensor]:
        """Return the manifest's entries for a batch. `WeightsRefused` for an unlisted or repeated
        tensor.
        """
        coming, scales = {}, self.halves.scales
        for name, tensor in batch.tensors.items():
            if not any(name in known for known in (self.parameters, self.others, scales)):
                if name.endswith("rotary_emb.inv_freq"):
                    continue
                raise WeightsRefused(
                    f"{batch.where}: tensor {name!r} is not in the manifest; push only what the "
                    "manifest names"
                )
            if self.has(name):
                raise WeightsRefused(
                    f"{batch.where}: tensor {name!r} was already received; push each tensor once"
                )
            coming[name] = tensor
        return coming

    def _checked(
        self, tensors: Mapping[str, Tensor], declared: Mapping[str, TensorEntry], where: str
    ) -> dict[str, Tensor | QuantisedBlocks]:
        """Return the tensors in their stored form, and record their checksums. Tensors in host
        memory move to the device first: a GPU reads, quantises and slices them many times faster.
        """
        came, made = dict[str, Tensor](), dict[str, QuantisedBlocks]()
        for name, tensor in tensors.items():
            if name in VOCABULARY_MAP and name in self.others:
                came[name] = map_tensor(name, tensor, where)
                continue
            self._check_layout(name, tensor.shape, tensor.dtype, where)
            expected: Stored = self.parameters.get(name, tensor)
            device = expected.device if tensor.device.type == "cpu" else tensor.device
            if in_fp8(expected):
                came[name] = tensor.to(device)
                if tensor.dtype != E4M3:
                    made[name] = quantise(came[name])
            else:
                came[name] = tensor.to(device, expected.dtype)
        found = contents([*came.values(), *map(effective, made.values())])
        stored: dict[str, Tensor | QuantisedBlocks] = {**made}
        for name, content in zip(came, found, strict=False):
            self._check(name, tensors[name], came[name], content, declared.get(name), where)
            matrix = name.removesuffix(SCALE_SUFFIX)
            if name in made:
                continue
            if matrix not in self.halves.matrices:
                stored[name], self.sums[name] = came[name], content.sum
            elif blocks := self._joined(name, came[name], where):
                stored[matrix] = blocks
        for name, content in zip(made, found[len(came) :], strict=True):
            if name + SCALE_SUFFIX in self.halves.came:
                raise half_missing(name, tensors[name].dtype, where)
            self._record(name, content, where)
        return stored

    def _joined(self, name: str, half: Tensor, where: str) -> QuantisedBlocks | None:
        """Return the matrix that a half completes; None if it waits for the other one."""
        matrix = name.removesuffix(SCALE_SUFFIX)
        if matrix in self.sums:
            raise half_missing(matrix, None, where)
        blocks = self.halves.join(name, half, self.parameters[matrix].device, where)
        if blocks is not None:
            self._record(matrix, contents([effective(blocks)])[0], where)
        return blocks

    def _record(self, name: str, content: Content, where: str) -> None:
        """Record the checksum of a matrix's effective weights."""
        if not content.finite:
            raise WeightsRefused(
                f"{where}: tensor {name!r} holds values beyond the range of bfloat16, in which "
                "values times scales must lie; push smaller values"
            )
        self.sums[name] = content.sum

    def _check(
        self,
        name: str,
        tensor: Tensor,
        stored: Tensor,
        found: Content,
        entry: TensorEntry | None,
        where: str,
    ) -> None:
        if not found.finite:
            check_finite(name, plain(tensor), where)
            raise WeightsRefused(
                f"{where}: tensor {name!r} holds values beyond the range of {stored.dtype}, in "
                "which this server keeps it; push values that fit, or serve with another --dtype"
            )
        check_content(tensor, entry, where, found.sum if stored.dtype == tensor.dtype else None)

    def _write(self) -> None:
        """Record that the network is about to change."""
        self.overwritten = self.in_place

    def _keep(self, batch: TensorBatch, kept: Mapping[str, Tensor]) -> None:
        """Keep a batch's tensors; `kept` has FP8 in place of what was quantised."""
        if self.options.spool is None:
            return
        file = f"{len(set(self._kept.values())):05}.safetensors"
        if batch.file is not None and self._links:
            file = self._whole.setdefault(batch.file, file)
        else:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in kept.items()}
            self.options.spool.keep(self.role, file, written(tensors))
        self._kept |= dict.fromkeys(kept, file)

    # -- after the last tensor ---------------------------------------------------------------------

    def check_complete(self) -> None:
        missing = sorted(map(self.halves.lacking, self.parameters.keys() - self.sums.keys()))
        if missing:
            raise WeightsRefused(
                f"{self.place}: tensor {missing[0]!r} is missing, and {len(missing) - 1} "
                "more; push every tensor that the manifest names"
            )

    def target(self) -> Target:
        """Return the target. If it has a tied head and the push contains one, that head must equal
        the embedding; it is not part of the version.
        """
        sums = dict(self.sums)
        if TIED_HEAD in self.others and sums.pop(TIED_HEAD, sums[EMBEDDING]) != sums[EMBEDDING]:
            raise WeightsRefused(
                f"{self.place}: {TIED_HEAD!r} differs from {EMBEDDING!r}, but this model ties "
                "them; leave it out, or serve a model whose config.json says tie_word_embeddings: "
                "false"
            )
        return Target("", self.network, sums)  # type: ignore[arg-type]

    def drafter(self, live: Drafter, receiver: Receiver) -> Drafter:
        """Return the drafter. A missing vocabulary map or calibration is taken from the live
        drafter.
        """
        sums = dict(self.sums)
        if len(self.found) == 1:
            raise WeightsRefused(
                f"{self.place}: of the vocabulary map only {next(iter(self.found))!r} was pushed; "
                "push both 'd2t' and 't2d', or neither to keep the active map"
            )
        if self.in_place and self.others and not self.found:
            raise WeightsRefused(
                f"{self.place}: the vocabulary map is missing; with weight_staging none a failed "
                "push may have left another one active: push 'd2t' and 't2d', too"
            )
        if self.found:
            self._write()
            self.network.set_vocabulary(  # type: ignore[union-attr]
                self.found["d2t"], self.found["t2d"], Path(self.place)
            )
        sums.pop("t2d", None)  # says nothing that d2t does not
        sums.setdefault("d2t", live.sums["d2t"])
        calibration, data = live.calibration, receiver.file(self.role, CALIBRATION)
        if data is not None:
            calibration = self.options.parse_calibration(data, f"{self.place}/{CALIBRATION}")
            if self.options.spool is not None:
                self.options.spool.keep(self.role, CALIBRATION, [data])
        return Drafter("", self.network, sums, calibration=calibration)  # type: ignore[arg-type]

    def adapter(self, name: str) -> Adapter:
        """Return the adapter under this name."""
        return Adapter(name, "", self.network, dict(self.sums))  # type: ignore[arg-type]

    def keep_whole(self) -> None:
        """Keep the files that arrive whole, and an index, so that a restart can read the folder as
        a model directory. Called again after each further part.
        """
        if self.options.spool is None:
            return
        while self._whole:
            path, file = self._whole.popitem()
            self.options.spool.keep(self.role, file, path)
        index = json.dumps({"weight_map": self._kept}).encode()
        self.options.spool.keep(self.role, INDEX, [index])


def _in_halves(name: str, blocks: QuantisedBlocks) -> dict[str, Tensor]:
    """Return a quantised matrix as the two tensors of a checkpoint, in host memory."""
    return {name: blocks.values_NK.cpu(), name + SCALE_SUFFIX: blocks.scales_BC.cpu()}
