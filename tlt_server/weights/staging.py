"""From a manifest to complete, checked weights in storage of their own. Runs in a thread beside the loop; touches nothing live.

Every name, shape, dtype, value and declared checksum is checked on the very bytes that are kept. What comes back can be swapped in
without a further decision; whatever is wrong is an error, and what was live before never knew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from torch import Tensor

from tlt_server.errors import ModelError, PushFailed, WeightsRefused
from tlt_server.models.config import ModelConfig
from tlt_server.models.loader import check_names, check_tensor
from tlt_server.records import Manifest, TensorEntry
from tlt_server.weights.checkpoint import Checkpoint
from tlt_server.weights.checksums import checksum, digest, kind_of, values
from tlt_server.weights.parts import DRAFTER_PREFIX, Drafter, Parts, Target, TargetNetwork
from tlt_server.weights.source import Source

CALIBRATION = "calibration.safetensors"


@dataclass(frozen=True)
class Steps:
    """What staging calls as it goes."""

    enter: Callable[[str], None]  # a phase begins; raises to cancel
    keep: Callable[[str, str, bytes], None]  # role, file, its checked bytes: for the spool
    parse_calibration: Callable[[bytes, str], object]  # content, where from


def stage(manifest: Manifest, live: Parts, *, root: Path, marker: str, steps: Steps) -> Parts:
    """Complete new weights for the manifest's roles. `WeightsRefused` or `Forbidden` when there are none, `PushFailed` without a disk."""
    try:
        return _Staging(manifest, live, root, marker, steps).run()
    except ModelError as error:
        raise WeightsRefused(error.message) from None
    except OSError as error:
        raise PushFailed(f"{manifest.path}: reading it, or keeping it in the state directory, failed ({error}); check the disks "
                         "and push again") from None


class _Staging:
    def __init__(self, manifest: Manifest, live: Parts, root: Path, marker: str, steps: Steps) -> None:
        self.manifest, self.live, self.root, self.marker, self.steps = manifest, live, root, marker, steps
        self.declared: dict[str, dict[str, TensorEntry]] = {"target": {}, "drafter": {}}
        for entry in manifest.tensors:
            prefixed = entry.name.startswith(DRAFTER_PREFIX)
            role = "drafter" if manifest.role == "drafter" or (manifest.role == "all" and prefixed) else "target"
            name = entry.name.removeprefix(DRAFTER_PREFIX) if role == "drafter" else entry.name
            if name in self.declared[role]:
                raise WeightsRefused(f"the manifest names tensor {entry.name!r} twice; name each tensor once")
            self.declared[role][name] = entry

    def run(self) -> Parts:
        manifest, target, drafter = self.manifest, None, None
        assert self.live.target is not None
        if manifest.role != "target" and self.live.drafter is None:
            raise WeightsRefused(f"role is {manifest.role!r}, but this server drafts without a network; start it with --drafter DIR, "
                                 "or push the target alone")
        if manifest.role != "drafter":
            target = self._target(manifest.path, self.live.target.network)
        if manifest.role != "target":
            path = manifest.drafter_path if manifest.role == "all" else manifest.path
            drafter = self._drafter(path, (target or self.live.target).network)
        version = manifest.version or f"{Path(manifest.path).name}@{digest(Parts(target, drafter).sums)[:8]}"
        return Parts(target and replace(target, version=version), drafter and replace(drafter, version=version))

    def _target(self, path: str, old: TargetNetwork) -> Target:
        source = self._open(path, old.config)
        checkpoint, network = Checkpoint(source), old.blank()
        tied = {"lm_head.weight"} if old.config.tied_embeddings else set()
        sums = self._fill("target", source, checkpoint, network.parameters(), tied)
        head = sums.pop("lm_head.weight", None) if tied else None
        if head is not None and head != sums["model.embed_tokens.weight"]:
            raise WeightsRefused(f"{source.path}: 'lm_head.weight' differs from 'model.embed_tokens.weight', but this model ties them; "
                                 "leave it out, or serve a model whose config.json says tie_word_embeddings: false")
        source.confirm()
        return Target("", network, sums)

    def _drafter(self, path: str, target: TargetNetwork) -> Drafter:
        assert self.live.drafter is not None
        old = self.live.drafter.network
        source = self._open(path, old.config)
        checkpoint = Checkpoint(source)
        network = old.blank(target, own_embedding="embed_tokens.weight" in checkpoint.names)
        vocabulary: dict[str, Tensor] = {}
        sums = self._fill("drafter", source, checkpoint, network.parameters(), {"d2t", "t2d"}, vocabulary)
        if len(vocabulary) == 1:
            raise WeightsRefused(f"{source.path}: of the vocabulary map only {next(iter(vocabulary))!r} is there; "
                                 "push both 'd2t' and 't2d', or neither to keep the map in use")
        if vocabulary:
            network.set_vocabulary(vocabulary["d2t"], vocabulary["t2d"], source.path)
        sums.pop("t2d", None)  # says nothing that d2t does not
        sums.setdefault("d2t", self.live.drafter.sums["d2t"])
        calibration = self.live.drafter.calibration
        if source.has(CALIBRATION):
            data = source.read(CALIBRATION)
            calibration = self.steps.parse_calibration(data, str(source.path / CALIBRATION))
            self.steps.keep("drafter", CALIBRATION, data)
        source.confirm()
        return Drafter("", network, calibration, sums)

    def _open(self, path: str, config: ModelConfig) -> Source:
        self.steps.enter("open")
        source = Source(self.root, path)
        if self.marker and not source.has(self.marker):
            raise WeightsRefused(f"{source.path} has no file {self.marker!r}, so its writer is not done; push it once that file is there, "
                                 "or start the server without --weight-marker")
        if source.has("config.json"):
            self._check_config(config, source)
        self.steps.enter("read")
        return source

    @staticmethod
    def _check_config(config: ModelConfig, source: Source) -> None:
        """Only values can be pushed: a directory that says it is another model is refused."""
        pushed = ModelConfig.parse(source.read_json("config.json"), str(source.path / "config.json"))
        pushed = replace(pushed, eos_token_ids=config.eos_token_ids, max_position=config.max_position)
        for field in fields(config):
            mine, theirs = getattr(config, field.name), getattr(pushed, field.name)
            if mine != theirs:
                raise WeightsRefused(f"{source.path / 'config.json'}: {field.name} is {theirs!r}, the model in use has {mine!r}; "
                                     "a push changes values only: for another model restart the server with --model")

    def _fill(self, role: str, source: Source, checkpoint: Checkpoint, parameters: Mapping[str, Tensor], others: Collection[str],
              found: dict[str, Tensor] | None = None) -> dict[str, str]:
        """Check every tensor and copy it to its place; those of `others` are collected. Returns the sums of the values."""
        self.steps.enter("check")
        check_names(dict(parameters), checkpoint.names, others, source.path)
        declared = self.declared[role]
        for name in sorted(declared.keys() ^ checkpoint.names.keys() if declared else ()):
            where = "the manifest, but not in the files" if name in declared else "the files, but not in the manifest"
            raise WeightsRefused(f"tensor {name!r} is in {where}; name exactly the tensors pushed, or none")
        sums: dict[str, str] = {}
        for shard in checkpoint.shards():
            for name, tensor in shard.tensors.items():
                if name not in parameters and name not in others:
                    continue  # a rotary table
                self.steps.enter("check")
                path = source.path / shard.file
                check_tensor(name, tensor, parameters.get(name, tensor), path)
                _compare(tensor, declared.get(name), path)
                self.steps.enter("fill")
                stored = tensor.to(parameters[name].dtype) if name in parameters else tensor
                sums[name] = checksum("sha256", values(stored))
                if name in parameters:
                    parameters[name].copy_(stored)
                elif found is not None:
                    found[name] = tensor
            self.steps.enter("spool")
            self.steps.keep(role, shard.file, shard.data)
            self.steps.enter("read")
        return sums


def _compare(tensor: Tensor, entry: TensorEntry | None, path: Path) -> None:
    """With what the manifest declares."""
    if entry is None:
        return
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if entry.dtype and entry.dtype.removeprefix("torch.") != dtype:
        raise WeightsRefused(f"{path}: tensor {entry.name!r} has dtype {dtype}, the manifest says {entry.dtype}; push what it describes")
    if entry.shape is not None and entry.shape != shape:
        raise WeightsRefused(f"{path}: tensor {entry.name!r} has shape {shape}, the manifest says {entry.shape}; push what it describes")
    if entry.checksum:
        found = checksum(kind_of(entry.checksum), tensor)
        if found != entry.checksum.lower():
            raise WeightsRefused(f"{path}: tensor {entry.name!r} has checksum {found}, the manifest says {entry.checksum}; "
                                 "the file is damaged or of another version: write and push it again")
