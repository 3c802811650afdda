"""The weights of a push, from manifests to complete, checked weights. Used in the staging thread.
It knows no channel: tensors come from a `Receiver`.

With its own storage a candidate leaves the live weights untouched, and its result can be swapped in
without another check. In place, each tensor is checked alone and then written, so a failure after
the first write leaves a mixture of the old and the new version; `overwritten` reports it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from tlt_client.channels import Receiver, owner
from tlt_client.channels.checkpoint import ADAPTER_CONFIG
from tlt_client.channels.checksums import digest
from tlt_client.channels.errors import ChannelError
from tlt_client.channels.source import json_object
from tlt_server.errors import ModelError, PushFailed, TltError, WeightsRefused, from_code
from tlt_server.models.adapters import BLOCKS, PREFIX, AdapterConfig, AdapterWeights
from tlt_server.models.shards import stored_bytes
from tlt_server.weights.arriving import Arriving, Enter
from tlt_server.weights.checks import check_config, check_dtype
from tlt_server.weights.parts import Changed, DrafterNetwork, Live, Network, Target, TargetNetwork
from tlt_server.weights.storage import Options, disk_is_full, ran_out
from tlt_server.wire.commands import Manifest, TensorEntry
from tlt_server.wire.labels import unnamed


class Candidate:
    """One manifest describes the whole push, or several `partial` manifests describe it together.
    With `headless`, the candidate starts from that target, and its sender adds the tied head.
    """

    def __init__(self, options: Options, headless: Target | None = None) -> None:
        self.opened: Manifest | None = None  # the newest that a receiver takes, or has taken
        self.headless = headless is not None
        self._version = headless.version if headless else ""
        self._options = options
        self._receiver: Receiver | None = None  # while a manifest is taken
        self.stopped = False
        self._roles: dict[str, Arriving] = {}
        if headless:
            arrived = Arriving.into("target", headless.network, options, headless.sums)
            self._roles["target"] = arrived

    @property
    def missing(self) -> list[str]:
        """The missing tensors of each role that has received some."""
        return [name for role in self._roles.values() for name in role.missing]

    @property
    def overwritten(self) -> list[str]:
        """Roles whose live values were overwritten by an in-place push."""
        return [name for name, role in self._roles.items() if role.overwritten]

    def has(self, manifest: Manifest) -> bool:
        """Return True if a tensor of the manifest has already arrived."""
        owners = (owner(entry.name, manifest.role) for entry in manifest.tensors)
        return any(role in self._roles and self._roles[role].has(name) for role, name in owners)

    def stop(self) -> None:
        """Cancel the wait for a trainer, even before that wait begins. Called from another
        thread.
        """
        self.stopped = True
        receiver = self._receiver
        if receiver is not None:
            receiver.stop()

    def release(self) -> list[Network]:
        """Drop the received tensors; return the networks that held them."""
        networks: list[Network] = [role.network for role in self._roles.values()]
        self._roles.clear()
        return networks

    def take(
        self, manifest: Manifest, live: Live, receive: Callable[[Manifest], Receiver], enter: Enter
    ) -> Changed | None:
        """Receive, check and keep tensors. Return the complete weights of all begun roles, or None
        if the push needs further manifests. `PushFailed` if a disk fails, another `TltError` if the
        push is wrong.
        """
        first: Exception | None = None
        try:
            enter("open")
            with closing(receive(manifest)) as receiver:
                self.opened, self._receiver = manifest, receiver
                if self.stopped:
                    receiver.stop()
                try:
                    return self._receive(manifest, live, receiver, enter)
                except Exception as error:
                    first = _exhausted(error) if ran_out(error) else error
                    raise first from None
        except ModelError as error:
            raise WeightsRefused(error.message) from None
        except ChannelError as error:
            # An error of closing matters more than why the receiver is closed.
            before = f". Before that: {first}" if isinstance(first, TltError) else ""
            raise from_code(error.code, str(error) + before) from None
        except OSError as error:
            raise PushFailed(
                f"{manifest.path or manifest.channel}: reading it, or keeping it in the state "
                f"directory, failed ({error}); check the disks and push again"
            ) from None
        finally:
            first = None  # its traceback holds this frame, and with it the network
            self._receiver = None

    def _receive(
        self, manifest: Manifest, live: Live, receiver: Receiver, enter: Enter
    ) -> Changed | None:
        declared = _declared(manifest, live)
        receiver.fetch()
        enter("check")
        for name in receiver.names:
            if receiver.names[name] or not manifest.partial:
                self._open(name, manifest, live, receiver, declared[name])
        enter("read")
        for batch in receiver.batches():
            self._roles[batch.role].take(batch, declared[batch.role], enter)
            enter("read")
        enter("check")
        if manifest.partial and self.missing:
            return None
        for role in self._roles.values():
            role.check_complete()
        target = self._roles["target"].target() if "target" in self._roles else None
        drafter = (
            self._roles["drafter"].drafter(live.drafter, receiver)
            if "drafter" in self._roles and live.drafter is not None
            else None
        )
        adapter = None
        if "adapter" in self._roles:
            adapter = self._roles["adapter"].adapter(manifest.adapter)
        receiver.confirm()
        made = Changed(adapter=adapter) if adapter is not None else Changed(target, drafter)
        _check_digests(made, manifest, receiver)
        enter("spool")
        for role in self._roles.values():
            role.keep_whole()
        if adapter is not None:
            return made.named(manifest.version or adapter.digest[:12])
        origin = Path(manifest.path).name or manifest.channel
        version = self._version or manifest.version or unnamed(origin, digest(made.sums))
        return made.named(version)

    def _open(
        self,
        name: str,
        manifest: Manifest,
        live: Live,
        receiver: Receiver,
        declared: Mapping[str, TensorEntry],
    ) -> None:
        """Allocate memory for a role's tensors, and check that the manifest lists the right
        ones.
        """
        if name == "adapter":
            weights = self._adapter(manifest, live, receiver)
            self._roles[name] = Arriving.into(name, weights, self._options)
            self._roles[name].open(receiver, declared, partial=False)
            return
        network, place = live.by_role[name].network, receiver.places[name]
        check_config(network.config, receiver.file(name, "config.json"), f"{place}/config.json")
        if name not in self._roles:
            # A drafter that comes in parts has an embedding if the one in use has.
            own = None if manifest.partial else "embed_tokens.weight" in receiver.names[name]
            need, make = stored_bytes(network.parameters()), partial(self._network, name, live, own)
            made = self._options.storage.make(need, receiver.buffers, make)
            self._roles[name] = Arriving.into(name, made, self._options)
        self._roles[name].open(receiver, declared, partial=manifest.partial)

    def _adapter(self, manifest: Manifest, live: Live, receiver: Receiver) -> AdapterWeights:
        """Return the matrices to fill, in the model's type."""
        data, model = receiver.file("adapter", ADAPTER_CONFIG), live.target.network
        place, names = receiver.places["adapter"], receiver.names["adapter"]
        where = "adapter_config"
        raw: Mapping[str, Any] = manifest.adapter_config
        if data is not None:
            where = f"{place}/{ADAPTER_CONFIG}"
            raw = json_object(data, where)
        elif not raw:
            raise WeightsRefused(
                f"{place} has no {ADAPTER_CONFIG}, which says r and lora_alpha; write it as PEFT "
                "does, or give adapter_config in the manifest"
            )
        if self._options.spool is not None:
            self._options.spool.keep("adapter", ADAPTER_CONFIG, [data or json.dumps(raw).encode()])
        config = AdapterConfig.parse(raw, where, self._options.max_lora_rank)
        maps = config.maps(names, model.config.layers)
        dtype = next(iter(model.parameters().values())).dtype
        weights = AdapterWeights(model.config, config, dtype, maps)
        strange = sorted(names.keys() - weights.parameters().keys())
        if strange or not maps:
            which = f"tensor {strange[0]!r} is not" if strange else "no tensor is"
            raise WeightsRefused(
                f"{place}: {which} a matrix of {', '.join(BLOCKS)} in one of the model's "
                f"{model.config.layers} layers; train these alone, and name them like "
                f"'{PREFIX}0.self_attn.q_proj.lora_A.weight'"
            )
        return weights

    def _network(
        self, name: str, live: Live, own_embedding: bool | None
    ) -> TargetNetwork | DrafterNetwork:
        """Return the network to fill. `own_embedding`: whether the pushed drafter has one; None: as
        in the active drafter.
        """
        target, in_place = live.target.network, self._options.storage.in_place
        if name == "target" or live.drafter is None:
            return target if in_place else target.blank()
        drafter = live.drafter.network
        own_embedding = drafter.own_embedding if own_embedding is None else own_embedding
        if in_place and own_embedding != drafter.own_embedding:
            raise WeightsRefused(
                "only one of the pushed and the active drafter has 'embed_tokens.weight', which "
                "cannot change with weight_staging none; push a drafter of the same layout"
            )
        of = self._roles["target"].network if "target" in self._roles else target
        return drafter if in_place else drafter.blank(of, own_embedding=own_embedding)


def _declared(manifest: Manifest, live: Live) -> dict[str, dict[str, TensorEntry]]:
    """Return the manifest's tensor entries by role."""
    if "drafter" in manifest.roles and live.drafter is None:
        raise WeightsRefused(
            f"role is {manifest.role!r}, but this server drafts without a network; start it with "
            "--drafter DIR, or push the target alone"
        )
    parameters = {role: part.network.parameters() for role, part in live.by_role.items()}
    declared: dict[str, dict[str, TensorEntry]] = {"target": {}, "drafter": {}, "adapter": {}}
    for entry in manifest.tensors:
        role, name = owner(entry.name, manifest.role)
        if name in declared[role]:
            raise WeightsRefused(
                f"the manifest names tensor {entry.name!r} twice; name each tensor once"
            )
        declared[role][name] = entry
        check_dtype(entry, parameters.get(role, {}).get(name))
    return declared


def _check_digests(made: Changed, manifest: Manifest, receiver: Receiver) -> None:
    """Check that the tensors are those that the manifest and the channel have announced."""
    announced = [(role, made.by_role[role].digest, want) for role, want in receiver.digests.items()]
    for role, found, wanted in [(manifest.role, digest(made.sums), manifest.digest), *announced]:
        if wanted and found != wanted:
            raise WeightsRefused(
                f"the {role}'s tensors have the digest {found[:12]}, announced was {wanted[:12]}; "
                "push them again, from another place"
            )


def _exhausted(error: Exception) -> PushFailed:
    said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if disk_is_full(error):
        return PushFailed(
            f"a disk is full: the weights cannot be kept in the state directory ({said}); make "
            "room there, or name a --state-dir on a larger disk, and push again"
        )
    return PushFailed(
        f"memory ran out while weights were received ({said}); push smaller buckets "
        "(bucket_bytes), or serve with less --memory-fraction, or, on one rank, with "
        "--weight-staging host or disk"
    )
