"""Receives one role's weights into a network. Each tensor is checked on the bytes that are kept,
then copied to its place and, with a spool, written to the spool.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from tlt_client.channels import Receiver, TensorBatch
from tlt_client.channels.checkpoint import CALIBRATION, INDEX
from tlt_client.channels.source import json_object
from tlt_client.channels.tensors import dtype_named, written
from tlt_server.errors import WeightsRefused
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_checkpoint import map_tensor
from tlt_server.models.draft_layouts import layout_of
from tlt_server.models.draft_networks import VOCABULARY_MAP
from tlt_server.models.loader import check_finite, check_layout, check_names, dtypes_for
from tlt_server.models.shards import Stored
from tlt_server.weights.checksums import Content, checksum, contents, kind_of
from tlt_server.weights.parts import Adapter, Drafter, Network, Target
from tlt_server.weights.storage import Options
from tlt_server.wire.commands import TensorEntry

TOGETHER = 2**29  # bytes that are checked at a time, unless one tensor has more
TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Enter = Callable[[str], None]  # enters a phase; raises to cancel


def _first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first tensors, up to `TOGETHER` bytes; their checksums share one wait for the GPU.
    The limit bounds memory, since tensors of another dtype are copied.
    """
    first: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if first and size > TOGETHER:
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
    _kept: dict[str, str] = field(default_factory=dict)  # tensor -> the file it is kept in
    _whole: dict[Path, str] = field(default_factory=dict)  # file that came -> file it is kept as

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
        return sorted((self.parameters.keys() | self.others) - {TIED_HEAD} - self.sums.keys())

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
        check_names(expected, coming, self.others, self.place)
        for name, entry in declared.items():
            if entry.shape is not None:
                check_shape(name, entry.shape, self.parameters, "the manifest")
        for layout in receiver.layouts:
            spec = layout.spec
            if layout.role == self.role and spec.name in self.parameters:
                parameter = self.parameters[spec.name]
                check_layout(spec.name, spec.shape, spec.dtype, parameter, layout.where)
            elif layout.role == self.role:
                check_shape(spec.name, spec.shape, self.parameters, layout.where)
        for name in sorted(declared.keys() ^ coming.keys() if declared else ()):
            where = (
                "the manifest, but not in the files"
                if name in declared
                else "the files, but not in the manifest"
            )
            raise WeightsRefused(
                f"tensor {name!r} is in {where}; name exactly the tensors pushed, or none"
            )

    # -- tensors -----------------------------------------------------------------------------------

    def take(self, batch: TensorBatch, declared: Mapping[str, TensorEntry], enter: Enter) -> None:
        """Check every tensor, copy it to its place and keep it."""
        coming = self._announced(batch)
        while coming:
            enter("check")
            checked = self._checked(_first(coming), declared, batch.where)
            enter("fill")
            for name, stored in checked.items():
                coming.pop(name)
                if name in self.parameters:
                    self._write()
                    self.parameters[name].copy_(stored)
                else:
                    # The channel may use its buffers again.
                    self.found[name] = stored.to("cpu", copy=True)
        enter("spool")
        self._keep(batch)

    def _announced(self, batch: TensorBatch) -> dict[str, Tensor]:
        """Return the manifest's entries for a batch. `WeightsRefused` for an unlisted or repeated
        tensor.
        """
        coming = {}
        for name, tensor in batch.tensors.items():
            if name not in self.parameters and name not in self.others:
                if name.endswith("rotary_emb.inv_freq"):
                    continue
                raise WeightsRefused(
                    f"{batch.where}: tensor {name!r} is not in the manifest; push only what the "
                    "manifest names"
                )
            if name in self.sums:
                raise WeightsRefused(
                    f"{batch.where}: tensor {name!r} was already received; push each tensor once"
                )
            coming[name] = tensor
        return coming

    def _checked(
        self, tensors: Mapping[str, Tensor], declared: Mapping[str, TensorEntry], where: str
    ) -> dict[str, Tensor]:
        """Return the tensors in their stored form, and record their checksums. Tensors in host
        memory move to the device first: a GPU reads and slices them many times faster.
        """
        stored = {}
        for name, tensor in tensors.items():
            if name in VOCABULARY_MAP and name in self.others:
                stored[name] = map_tensor(name, tensor, where)
                continue
            expected: Stored = self.parameters.get(name, tensor)
            check_layout(name, tensor.shape, tensor.dtype, expected, where)
            device = expected.device if tensor.device.type == "cpu" else tensor.device
            stored[name] = tensor.to(device, expected.dtype)
        for name, found in zip(stored, contents([*stored.values()]), strict=True):
            self._check(name, tensors[name], stored[name], found, declared.get(name), where)
        return stored

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
            check_finite(name, tensor, where)
            raise WeightsRefused(
                f"{where}: tensor {name!r} holds values beyond the range of {stored.dtype}, in "
                "which this server keeps it; push values that fit, or serve with another --dtype"
            )
        check_content(tensor, entry, where, found.sum if stored.dtype == tensor.dtype else None)
        self.sums[name] = found.sum

    def _write(self) -> None:
        """Record that the network is about to change."""
        self.overwritten = self.in_place

    def _keep(self, batch: TensorBatch) -> None:
        if self.options.spool is None:
            return
        file = f"{len(set(self._kept.values())):05}.safetensors"
        if batch.file is not None:
            file = self._whole.setdefault(batch.file, file)
        else:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in batch.tensors.items()}
            self.options.spool.keep(self.role, file, written(tensors))
        self._kept |= dict.fromkeys(batch.tensors, file)

    # -- after the last tensor ---------------------------------------------------------------------

    def check_complete(self) -> None:
        missing = sorted(self.parameters.keys() - self.sums.keys())
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


def check_config(config: ModelConfig, data: bytes | None, where: str) -> None:
    """Reject a directory whose config describes another model; a directory without a config
    passes.
    """
    if data is None:
        return
    raw = json_object(data, where)
    pushed = ModelConfig.parse(layout_of(raw).flat(raw, where), where)
    pushed = replace(pushed, eos_token_ids=config.eos_token_ids, max_position=config.max_position)
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
