"""From a manifest to complete, checked weights. Runs in a thread beside the loop and knows no
channel: tensors come from a `Receiver`.

Every name, shape, dtype, value and declared checksum is checked on the very bytes that are kept.
With storage of its own nothing live is touched, and what comes back can be swapped in without a
further decision. In place, a tensor is written once it alone was checked: `Steps.overwrite` is
called before the first one, and a failure after that has left neither the old nor the new version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from tlt_client.channels import Buffers, Receiver, TensorBatch, owner
from tlt_client.channels.checkpoint import INDEX
from tlt_client.channels.errors import ChannelError
from tlt_client.channels.source import json_object
from tlt_client.channels.tensors import dtype_named, written
from tlt_server.errors import ModelError, PushFailed, TltError, WeightsRefused, from_code
from tlt_server.models.config import ModelConfig
from tlt_server.models.loader import check_finite, check_layout, check_names, dtypes_for
from tlt_server.records import Manifest, TensorEntry
from tlt_server.weights.checksums import checksum, content, digest, kind_of
from tlt_server.weights.parts import Changed, Drafter, DrafterNetwork, Live, Target, TargetNetwork
from tlt_server.weights.spool import Data
from tlt_server.weights.storage import ran_out

CALIBRATION = "calibration.safetensors"
TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Model = TypeVar("Model")


Enter = Callable[[str], None]  # a phase begins; raises to cancel


class Make(Protocol):
    def __call__(self, need: int, buffers: Buffers, make: Callable[[], Model], /) -> Model:
        """What `make` gives, of `need` bytes, in storage of its own; beside it a receiver will take
        `buffers`.
        """


@dataclass(frozen=True)
class Steps:
    """What staging calls as it goes."""

    keep: (
        Callable[[str, str, Data], None] | None
    )  # role, file, what is in it: for the spool, if there is one
    parse_calibration: Callable[[bytes, str], object]  # content, where from
    storage: Make
    overwrite: Callable[[str], None] | None = (
        None  # in place: the first live value of a role is about to change
    )


@dataclass
class _Role:
    """One role's weights on their way."""

    network: TargetNetwork | DrafterNetwork
    parameters: Mapping[str, Tensor]
    others: Set[str]  # that may come and are no parameters
    place: str  # for messages
    sums: dict[str, str] = field(default_factory=dict)  # of what has come
    found: dict[str, Tensor] = field(default_factory=dict)  # of `others`
    kept: dict[str, str] = field(default_factory=dict)  # tensor -> the file it is kept in
    whole: dict[Path, str] = field(
        default_factory=dict
    )  # a file that came -> the file it is kept as

    @property
    def missing(self) -> list[str]:
        """Without which it is not complete where it comes by parts. The vocabulary map is then
        among them, as it may be yet to come.
        """
        return sorted((self.parameters.keys() | self.others) - {TIED_HEAD} - self.sums.keys())


class Staging:
    """What has come of one push. One manifest brings all of it, or several that are `partial` bring
    it together.
    """

    def __init__(self, live: Live, steps: Steps) -> None:
        self.live, self.steps = live, steps
        self.opened: Manifest | None = (
            None  # the last one of which a receiver takes what comes, or has taken it
        )
        self._receiver: Receiver | None = None  # of which something is taken now
        self._stopped = False
        self._roles: dict[str, _Role] = {}
        self._overwriting: set[str] = set()

    @property
    def missing(self) -> list[str]:
        """Tensors of the roles that have begun which have not come."""
        return [name for role in self._roles.values() for name in role.missing]

    def has(self, manifest: Manifest) -> bool:
        """Whether a tensor that the manifest names has come before."""
        owners = (owner(entry.name, manifest.role) for entry in manifest.tensors)
        return any(role in self._roles and name in self._roles[role].sums for role, name in owners)

    def stop(self) -> None:
        """From another thread: a wait for a trainer ends, also one that is about to begin."""
        self._stopped = True
        receiver = self._receiver
        if receiver is not None:
            receiver.stop()

    def check_repeated(self) -> None:
        """`WeightsRefused` unless the head that came is the live target's."""
        role = self._roles["target"]
        _check_tied(role.sums[TIED_HEAD], self.live.target.sums[EMBEDDING], role.place)

    @property
    def networks(self) -> list[TargetNetwork | DrafterNetwork]:
        """That it fills."""
        return [role.network for role in self._roles.values()]

    def take(
        self, manifest: Manifest, receive: Callable[[Manifest], Receiver], enter: Enter
    ) -> Changed | None:
        """Check and keep what comes. Complete new weights of all roles that have begun; None where
        further manifests bring the rest.

        A `TltError` when there is none of both; `PushFailed` without a disk.
        """
        first: Exception | None = None
        try:
            enter("open")
            with closing(receive(manifest)) as receiver:
                self.opened, self._receiver = manifest, receiver
                if self._stopped:
                    receiver.stop()
                try:
                    return self._receive(manifest, receiver, enter)
                except Exception as error:
                    first = _exhausted(error) if ran_out(error) else error
                    raise first from None
        except ModelError as error:
            raise WeightsRefused(error.message) from None
        except (
            ChannelError
        ) as error:  # perhaps of closing, which then matters more than why we closed
            before = f". Before that: {first}" if isinstance(first, TltError) else ""
            raise from_code(error.code, str(error) + before) from None
        except OSError as error:
            raise PushFailed(
                f"{manifest.path or manifest.channel}: reading it, or keeping it in the state directory, failed ({error}); "
                "check the disks and push again"
            ) from None
        finally:
            first = None  # its traceback holds this frame, and with it the network
            self._receiver = None

    def _receive(self, manifest: Manifest, receiver: Receiver, enter: Enter) -> Changed | None:
        declared = self._declared(manifest)
        enter("check")
        for name in receiver.names:
            if receiver.names[name] or not manifest.partial:
                self._open(name, manifest, receiver, declared[name])
        enter("read")
        for batch in receiver.batches():
            self._take(batch, declared[batch.role], enter)
            enter("read")
        enter("check")
        if manifest.partial and self.missing:
            return None
        for role in self._roles.values():
            self._check_complete(role)
        target = self._target(self._roles["target"]) if "target" in self._roles else None
        drafter = (
            self._drafter(self._roles["drafter"], receiver) if "drafter" in self._roles else None
        )
        receiver.confirm()
        enter("spool")
        self._keep_whole()
        name = Path(manifest.path).name or manifest.channel
        version = manifest.version or f"{name}@{digest(Changed(target, drafter).sums)[:8]}"
        return Changed(
            target and replace(target, version=version),
            drafter and replace(drafter, version=version),
        )

    # -- before the first tensor ---------------------------------------------------------------------------------

    def _declared(self, manifest: Manifest) -> dict[str, dict[str, TensorEntry]]:
        if manifest.role != "target" and self.live.drafter is None:
            raise WeightsRefused(
                f"role is {manifest.role!r}, but this server drafts without a network; start it with --drafter DIR, "
                "or push the target alone"
            )
        parameters = {role: part.network.parameters() for role, part in self.live.by_role.items()}
        declared: dict[str, dict[str, TensorEntry]] = {"target": {}, "drafter": {}}
        for entry in manifest.tensors:
            role, name = owner(entry.name, manifest.role)
            if name in declared[role]:
                raise WeightsRefused(
                    f"the manifest names tensor {entry.name!r} twice; name each tensor once"
                )
            declared[role][name] = entry
            _check_dtype(entry, parameters[role].get(name))
        return declared

    def _open(
        self, name: str, manifest: Manifest, receiver: Receiver, declared: Mapping[str, TensorEntry]
    ) -> None:
        """Where a role's tensors go, and that the right ones will come."""
        live, coming, place = (
            self.live.by_role[name].network,
            receiver.names[name],
            receiver.places[name],
        )
        self._check_config(live.config, receiver.file(name, "config.json"), f"{place}/config.json")
        if name not in self._roles:
            own_embedding = None if manifest.partial else "embed_tokens.weight" in coming
            need = sum(view.nbytes for view in live.parameters().values())
            network = self.steps.storage(
                need, receiver.buffers, partial(self._network, name, own_embedding)
            )
            tied = {TIED_HEAD} if network.config.tied_embeddings else set()
            self._roles[name] = _Role(
                network, network.parameters(), tied if name == "target" else {"d2t", "t2d"}, place
            )
        role = self._roles[name]
        expected = (
            {tensor: view for tensor, view in role.parameters.items() if tensor in coming}
            if manifest.partial
            else role.parameters
        )
        check_names(expected, coming, role.others, place)
        largest = max(view.numel() for view in role.parameters.values())
        for tensor, entry in declared.items():
            if entry.shape is not None:
                _check_shape(tensor, entry.shape, role.parameters, largest, "the manifest")
        for layout in receiver.layouts:
            if layout.role == name and layout.spec.name in role.parameters:
                check_layout(
                    layout.spec.name,
                    layout.spec.shape,
                    layout.spec.dtype,
                    role.parameters[layout.spec.name],
                    layout.where,
                )
            elif layout.role == name:
                _check_shape(
                    layout.spec.name, layout.spec.shape, role.parameters, largest, layout.where
                )
        for tensor in sorted(declared.keys() ^ coming.keys() if declared else ()):
            where = (
                "the manifest, but not in the files"
                if tensor in declared
                else "the files, but not in the manifest"
            )
            raise WeightsRefused(
                f"tensor {tensor!r} is in {where}; name exactly the tensors pushed, or none"
            )

    def _network(self, name: str, own_embedding: bool | None) -> TargetNetwork | DrafterNetwork:
        """`own_embedding`: whether the drafter that comes has one; None: as the one in use."""
        target, in_place = self.live.target.network, self.steps.overwrite is not None
        if name == "target":
            return target if in_place else target.blank()
        assert self.live.drafter is not None
        drafter = self.live.drafter.network
        own_embedding = drafter.own_embedding if own_embedding is None else own_embedding
        if in_place and own_embedding != drafter.own_embedding:
            raise WeightsRefused(
                "the drafter pushed and the one in use differ in whether they have 'embed_tokens.weight', and with "
                "weight_staging none that cannot change; push a drafter of the same layout"
            )
        beside = self._roles["target"].network if "target" in self._roles else target
        return drafter if in_place else drafter.blank(beside, own_embedding=own_embedding)

    @staticmethod
    def _check_config(config: ModelConfig, data: bytes | None, where: str) -> None:
        """Only values can be pushed: a directory that says it is another model is refused."""
        if data is None:
            return
        pushed = ModelConfig.parse(json_object(data, where), where)
        pushed = replace(
            pushed, eos_token_ids=config.eos_token_ids, max_position=config.max_position
        )
        for compared in fields(config):
            mine, theirs = getattr(config, compared.name), getattr(pushed, compared.name)
            if mine != theirs:
                raise WeightsRefused(
                    f"{where}: {compared.name} is {theirs!r}, the model in use has {mine!r}; "
                    "a push changes values only: for another model restart the server with --model"
                )

    # -- tensors -------------------------------------------------------------------------------------------------

    def _take(self, batch: TensorBatch, declared: Mapping[str, TensorEntry], enter: Enter) -> None:
        """Check every tensor and copy it to its place."""
        role = self._roles[batch.role]
        for name, tensor in batch.tensors.items():
            if name not in role.parameters and name not in role.others:
                if name.endswith("rotary_emb.inv_freq"):
                    continue
                raise WeightsRefused(
                    f"{batch.where}: tensor {name!r} came, but was not announced; push what the manifest names"
                )
            if name in role.sums:
                raise WeightsRefused(
                    f"{batch.where}: tensor {name!r} came before; push each tensor once"
                )
            enter("check")
            check_layout(
                name, tensor.shape, tensor.dtype, role.parameters.get(name, tensor), batch.where
            )
            stored = tensor.to(role.parameters[name].dtype) if name in role.parameters else tensor
            found = content(stored)
            if not found.finite:
                check_finite(name, tensor, batch.where)
                raise WeightsRefused(
                    f"{batch.where}: tensor {name!r} holds values beyond the range of {stored.dtype}, in which this "
                    "server keeps it; push values that fit, or serve with another --dtype"
                )
            _compare(
                tensor, declared.get(name), batch.where, found.sum if stored is tensor else None
            )
            role.sums[name] = found.sum
            enter("fill")
            if name in role.parameters:
                self._write(batch.role)
                role.parameters[name].copy_(stored)
            else:
                role.found[name] = tensor.to(
                    "cpu", copy=True
                )  # the channel may use its buffers again
        enter("spool")
        if self.steps.keep is not None:
            file = f"{len(set(role.kept.values())):05}.safetensors"
            if batch.file is not None:
                file = role.whole.setdefault(batch.file, file)
            else:
                self.steps.keep(
                    batch.role,
                    file,
                    written(
                        {name: tensor.cpu().contiguous() for name, tensor in batch.tensors.items()}
                    ),
                )
            role.kept |= dict.fromkeys(batch.tensors, file)

    def _write(self, role: str) -> None:
        if self.steps.overwrite is not None and role not in self._overwriting:
            self._overwriting.add(role)
            self.steps.overwrite(role)

    @staticmethod
    def _check_complete(role: _Role) -> None:
        missing = sorted(role.parameters.keys() - role.sums.keys())
        if missing:
            raise WeightsRefused(
                f"{role.place}: tensor {missing[0]!r} did not come, nor did {len(missing) - 1} others; push all that the "
                "manifest names"
            )

    def _keep_whole(self) -> None:
        """What was kept is a directory that a restart reads; with what comes later, it becomes that
        again.
        """
        for name, role in self._roles.items():
            if self.steps.keep is not None:
                while role.whole:
                    path, file = role.whole.popitem()
                    self.steps.keep(name, file, path)
                self.steps.keep(name, INDEX, [json.dumps({"weight_map": role.kept}).encode()])

    # -- after the last tensor -----------------------------------------------------------------------------------

    def _target(self, role: _Role) -> Target:
        sums = dict(role.sums)
        if TIED_HEAD in role.others and TIED_HEAD in sums:
            _check_tied(sums.pop(TIED_HEAD), sums[EMBEDDING], role.place)
        return Target("", role.network, sums)  # type: ignore[arg-type]

    def _drafter(self, role: _Role, receiver: Receiver) -> Drafter:
        assert self.live.drafter is not None
        place, network, sums = role.place, role.network, dict(role.sums)
        if len(role.found) == 1:
            raise WeightsRefused(
                f"{place}: of the vocabulary map only {next(iter(role.found))!r} is there; "
                "push both 'd2t' and 't2d', or neither to keep the map in use"
            )
        if self.steps.overwrite is not None and not role.found:
            raise WeightsRefused(
                f"{place}: the vocabulary map is not there; with weight_staging none a failed push may have left another "
                "one in use: push 'd2t' and 't2d', too"
            )
        if role.found:
            self._write("drafter")
            network.set_vocabulary(role.found["d2t"], role.found["t2d"], Path(place))  # type: ignore[union-attr]
        sums.pop("t2d", None)  # says nothing that d2t does not
        sums.setdefault("d2t", self.live.drafter.sums["d2t"])
        calibration = self.live.drafter.calibration
        data = receiver.file("drafter", CALIBRATION)
        if data is not None:
            calibration = self.steps.parse_calibration(data, f"{place}/{CALIBRATION}")
            if self.steps.keep is not None:
                self.steps.keep("drafter", CALIBRATION, [data])
        return Drafter("", network, calibration, sums)  # type: ignore[arg-type]


def _check_tied(head: str, embedding: str, where: str) -> None:
    """By their sums."""
    if head != embedding:
        raise WeightsRefused(
            f"{where}: {TIED_HEAD!r} differs from {EMBEDDING!r}, but this model ties them; leave it out, or serve a model "
            "whose config.json says tie_word_embeddings: false"
        )


def _exhausted(error: Exception) -> PushFailed:
    said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return PushFailed(
        f"memory ran out while weights were received ({said}); push smaller buckets (bucket_bytes), or serve with "
        "--weight-staging host or disk, or with less --memory-fraction"
    )


def _check_dtype(entry: TensorEntry, parameter: Tensor | None) -> None:
    """Declared is one that can be taken."""
    if not entry.dtype:
        return
    dtype, taken = (
        dtype_named(entry.dtype, entry.name),
        dtypes_for(parameter) if parameter is not None else (),
    )
    if taken and dtype not in taken:
        raise WeightsRefused(
            f"the manifest says that tensor {entry.name!r} has dtype {entry.dtype}, this server takes it as "
            f"{' or '.join(str(one).removeprefix('torch.') for one in taken)}; convert it before it is pushed"
        )


def _check_shape(
    name: str, shape: Sequence[int], parameters: Mapping[str, Tensor], largest: int, where: str
) -> None:
    """Before memory is taken for what is said to come; `largest`: elements of any parameter."""
    if name in parameters and tuple(shape) != tuple(parameters[name].shape):
        raise WeightsRefused(
            f"{where}: tensor {name!r} has shape {list(shape)}, the model in use has {list(parameters[name].shape)}; "
            "push the same architecture"
        )
    if math.prod(shape) > largest:
        raise WeightsRefused(
            f"{where}: tensor {name!r} has shape {list(shape)}, more elements than any of the model ({largest}); push the "
            "same architecture"
        )


def _compare(tensor: Tensor, entry: TensorEntry | None, where: str, mix64: str | None) -> None:
    """With what the manifest declares. `mix64`: of the tensor, if it is known."""
    if entry is None:
        return
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if entry.dtype and entry.dtype.removeprefix("torch.") != dtype:
        raise WeightsRefused(
            f"{where}: tensor {entry.name!r} has dtype {dtype}, the manifest says {entry.dtype}; push what it describes"
        )
    if entry.shape is not None and list(entry.shape) != shape:
        raise WeightsRefused(
            f"{where}: tensor {entry.name!r} has shape {shape}, the manifest says {entry.shape}; push what it describes"
        )
    if entry.checksum:
        kind = kind_of(entry.checksum)
        found = mix64 if kind == "mix64" and mix64 else checksum(kind, tensor)
        if found != entry.checksum.lower():
            raise WeightsRefused(
                f"{where}: tensor {entry.name!r} has checksum {found}, the manifest says {entry.checksum}; "
                "it is damaged or of another version: write and push it again"
            )
