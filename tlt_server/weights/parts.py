"""The weights of a version: a target and perhaps a drafter, each complete and with its checksums.

The engine uses `Live`; a `Changed` replaces some of its parts. Both are immutable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from tlt_client.channels import DRAFTER_PREFIX
from tlt_client.channels.checksums import digest
from tlt_server.models.adapters import AdapterWeights
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.draft_part import DrafterPart
from tlt_server.models.shards import Stored, tensors_of
from tlt_server.settings.server import QuantizationName
from tlt_server.weights.checksums import live_sums, origin_of
from tlt_server.wire.records import LoadedAdapter, drafter_key


class TargetNetwork(Protocol):
    """A target model on any device."""

    config: ModelConfig
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def parameters(self) -> Mapping[str, Stored]:
        """Return a view [out, in] of the live storage for each Hugging Face name."""

    def blank(self) -> Self:
        """Make an uninitialized copy of the model with its own storage."""


class DrafterNetwork(Protocol):
    """A drafter's network on any device."""

    config: ModelConfig
    draft_vocab_size: int
    kv_layers: int  # layers of KV next to the target's
    own_embedding: bool
    own_head: bool  # False: it drafts with the target's
    vocabulary_map: frozenset[str]  # tensors that it is set by: d2t and t2d, or none

    @property
    def part(self) -> DrafterPart | None:
        """Return the part of a GPU rank; None on a CPU, where the model is whole."""

    @property
    def quantization(self) -> QuantizationName:
        """The form of all matrices but `fc`."""

    @property
    def target_ids(self) -> Tensor:
        """The target id of each draft id; int64 [draft vocabulary]."""

    def parameters(self) -> Mapping[str, Stored]: ...

    def blank(self, target: Any, *, own_embedding: bool) -> Self:
        """Make an uninitialized copy of the network for `target`, with its own storage."""

    def follow(self, target: Any) -> None:
        """Draft for this target on all ranks: read its embedding and, unless the drafter has its
        own head, its head.
        """

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None: ...


Network = TargetNetwork | DrafterNetwork | AdapterWeights


@dataclass(frozen=True)
class _Served:
    """Weights of the target or the drafter."""

    version: str
    network: Any
    sums: Mapping[str, str]  # tensor -> mix64 of its values; empty until they are needed
    origin: str = ""  # `origin_of` the files that were loaded at the start

    @cached_property
    def digest(self) -> str:
        return digest(self.sums)

    @property
    def content(self) -> str:
        """Return the name of the content, unchanged for as long as the content is kept."""
        return self.origin or self.digest

    def live_sums(self) -> dict[str, str]:
        """Compute the checksums of the storage in use."""
        return live_sums(self.network.parameters())


@dataclass(frozen=True)
class Target(_Served):
    network: TargetNetwork

    @property
    def quantization(self) -> QuantizationName:
        return "fp8" if self.network.config.quantization is not None else "none"

    @classmethod
    def loaded(cls, version: str, network: TargetNetwork, directory: Path | None) -> Self:
        """`directory`: the source of the weights; None for random weights."""
        return cls(version, network, {}, origin_of(directory) if directory else "random")


@dataclass(frozen=True)
class Drafter(_Served):
    network: DrafterNetwork
    calibration: object = None  # opaque here; the drafter reads it

    @classmethod
    def loaded(
        cls, version: str, network: DrafterNetwork, calibration: object, directory: Path
    ) -> Self:
        return cls(version, network, {}, origin_of(directory), calibration)

    def live_sums(self) -> dict[str, str]:
        return live_sums(drafter_tensors(self.network))


@dataclass(frozen=True)
class Adapter:
    """A version of a LoRA adapter of the target. A newer version of the same name replaces it."""

    name: str
    version: str
    network: AdapterWeights
    sums: Mapping[str, str]
    slot: int = -1  # where it is loaded

    @cached_property
    def digest(self) -> str:
        return digest({**self.sums, "scale": self.network.adapter.scale.hex()})

    @property
    def loaded(self) -> LoadedAdapter:
        return LoadedAdapter(self.name, self.version, self.digest, self.slot)


Part = Target | Drafter | Adapter


@dataclass(frozen=True)
class Changed:
    """The weights of a push or a rollback: one or both roles, or an adapter. It also holds the
    previous version of each role that keeps one.
    """

    target: Target | None = None
    drafter: Drafter | None = None
    adapter: Adapter | None = None

    @property
    def by_role(self) -> dict[str, Part]:
        every = {"target": self.target, "drafter": self.drafter, "adapter": self.adapter}
        return {role: part for role, part in every.items() if part is not None}

    @property
    def parts(self) -> list[tuple[str, Part]]:
        """Return the role and the weights of each part."""
        return [*self.by_role.items()]

    @property
    def role(self) -> str:
        return "all" if len(self.by_role) == 2 else next(iter(self.by_role), "")

    @property
    def version(self) -> str:
        """The version of a push, shared by all its parts."""
        return next((part.version for part in self.by_role.values()), "")

    @property
    def sums(self) -> dict[str, str]:
        return _merged({role: part.sums for role, part in self.by_role.items()})

    def named(self, version: str) -> Changed:
        """Return the same weights under another version."""
        return Changed(
            self.target and replace(self.target, version=version),
            self.drafter and replace(self.drafter, version=version),
            self.adapter and replace(self.adapter, version=version),
        )

    def only(self, roles: Collection[str]) -> Changed:
        return Changed(
            self.target if "target" in roles else None, self.drafter if "drafter" in roles else None
        )

    def updated(self, newer: Changed) -> Changed:
        """Return these weights with the roles in `newer` replaced."""
        return Changed(newer.target or self.target, newer.drafter or self.drafter)


@dataclass(frozen=True)
class Live:
    """The weights in use: always a target, and a drafter where the server has a network for one."""

    target: Target
    drafter: Drafter | None = None
    # by name; of the target, whichever version of it is live
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    @property
    def drafter_version(self) -> str:
        """Return the drafter's version; empty without a drafter."""
        return self.drafter.version if self.drafter else ""

    @property
    def drafter_quantization(self) -> QuantizationName:
        return self.drafter.network.quantization if self.drafter else "none"

    @property
    def drafter_key(self) -> str:
        """Return the drafter's name in records: version and quantization decide its drafts."""
        return drafter_key(self.drafter_version, self.drafter_quantization)

    @property
    def drafter_content(self) -> str:
        """Return the name of all that decides its drafts; empty without a drafter."""
        content = self.drafter.content if self.drafter else ""
        return drafter_key(content, self.drafter_quantization)

    @property
    def by_role(self) -> dict[str, Target | Drafter]:
        both = {"target": self.target, "drafter": self.drafter}
        return {role: part for role, part in both.items() if part is not None}

    @property
    def parts(self) -> list[tuple[str, Part]]:
        """Return the role and the weights of each part, including every adapter."""
        return [*self.by_role.items(), *(("adapter", part) for part in self.adapters.values())]

    def only(self, roles: Collection[str]) -> Changed:
        return Changed(self.target, self.drafter).only(roles)

    def updated(self, newer: Changed) -> Live:
        """Return these weights with the roles in `newer` replaced."""
        adapter, adapters = newer.adapter, self.adapters
        if adapter is not None:
            adapters = {**adapters, adapter.name: adapter}
        return Live(newer.target or self.target, newer.drafter or self.drafter, adapters)

    def without(self, adapter: str) -> Live:
        kept = {name: part for name, part in self.adapters.items() if name != adapter}
        return replace(self, adapters=kept)

    @property
    def draft_network(self) -> str:
        """Return the sizes that determine a draft's time; empty without a network."""
        if self.drafter is None:
            return ""
        network, config = self.drafter.network, self.drafter.network.config
        return (
            f"({config.architecture}, MLP {config.intermediate_size}, heads {config.heads}, draft "
            f"vocab {network.draft_vocab_size}{', FP8' * (network.quantization == 'fp8')})"
        )

    def complete(self) -> Live:
        """Compute the missing checksums; the storage must not change meanwhile."""
        target, drafter = self.target, self.drafter
        return Live(
            target if target.sums else replace(target, sums=target.live_sums()),
            drafter and (drafter if drafter.sums else replace(drafter, sums=drafter.live_sums())),
            self.adapters,
        )

    def live_sums(self) -> dict[str, str]:
        """Compute the checksums of the storage in use."""
        return _merged({role: part.live_sums() for role, part in self.by_role.items()})


def _merged(sums: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Join the checksums of the roles. If there are two, the drafter's names get a prefix."""
    prefixes = {"drafter": DRAFTER_PREFIX} if len(sums) == 2 else {}
    return {
        prefixes.get(role, "") + name: value
        for role, each in sums.items()
        for name, value in each.items()
    }


def drafter_tensors(network: DrafterNetwork) -> dict[str, Stored]:
    """Return every tensor of a drafter's version, including the vocabulary map."""
    return {
        **network.parameters(),
        "d2t": network.target_ids - torch.arange(network.draft_vocab_size),
    }


def let_go(networks: list[Network]) -> None:
    """Empty the list and free the memory that has no other holder. `set_` frees it without the
    interpreter's lock, since unmapping a gigabyte takes 100 ms.
    """
    with torch.inference_mode():
        held = [
            view.detach()
            for network in networks
            for stored in network.parameters().values()
            for view in tensors_of(stored)
        ]
        networks.clear()
        for view in held:
            view.set_()  # type: ignore[call-overload]
