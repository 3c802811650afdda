"""What a version consists of: complete weights of target and drafter, each with its checksums.
Never changed once made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from tlt_client.channels import DRAFTER_PREFIX
from tlt_server.models.config import ModelConfig
from tlt_server.weights.checksums import digest, live_sums


class TargetNetwork(Protocol):
    """A target on whatever device."""

    config: ModelConfig
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def parameters(self) -> dict[str, Tensor]:
        """Hugging Face name -> view [out, in] of the live storage."""

    def blank(self) -> Self:
        """The same model with storage of its own, to be filled with other weights."""


class DrafterNetwork(Protocol):
    """An EAGLE-3 network on whatever device."""

    config: ModelConfig
    draft_vocab_size: int
    own_embedding: bool

    @property
    def target_ids(self) -> Tensor:
        """int64 [draft vocabulary], draft id -> target id."""

    def parameters(self) -> dict[str, Tensor]: ...

    def blank(self, target: Any, *, own_embedding: bool) -> Self:
        """The same network beside `target`, with storage of its own."""

    def set_vocabulary(self, d2t_C: Tensor, t2d_V: Tensor, path: Path) -> None: ...


@dataclass(frozen=True)
class Target:
    version: str
    network: TargetNetwork
    sums: Mapping[str, str]  # mix64 of the values, by tensor

    @cached_property
    def digest(self) -> str:
        return digest(self.sums)

    def live_sums(self) -> dict[str, str]:
        """Computed anew from the storage in use."""
        return live_sums(self.network.parameters())


@dataclass(frozen=True)
class Drafter:
    version: str
    network: DrafterNetwork
    calibration: object  # the drafter's own affair
    sums: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        return digest(self.sums)

    def live_sums(self) -> dict[str, str]:
        return live_sums(drafter_tensors(self.network))


@dataclass(frozen=True)
class Parts:
    """The weights of one or both roles: what is live, what is staged, what a rollback restores."""

    target: Target | None = None
    drafter: Drafter | None = None

    @property
    def by_role(self) -> dict[str, Target | Drafter]:
        both = {"target": self.target, "drafter": self.drafter}
        return {role: part for role, part in both.items() if part is not None}

    @property
    def role(self) -> str:
        return "all" if len(self.by_role) == 2 else next(iter(self.by_role), "")

    @property
    def version(self) -> str:
        """The version of a push: all its parts share it."""
        return next((part.version for part in self.by_role.values()), "")

    @property
    def sums(self) -> dict[str, str]:
        return self._merged({role: part.sums for role, part in self.by_role.items()})

    def live_sums(self) -> dict[str, str]:
        return self._merged({role: part.live_sums() for role, part in self.by_role.items()})

    def complete(self) -> Parts:
        """The same with sums, computed where they are missing; the storage must not change
        meanwhile.
        """
        target, drafter = self.target, self.drafter
        return Parts(
            target and (target if target.sums else replace(target, sums=target.live_sums())),
            drafter and (drafter if drafter.sums else replace(drafter, sums=drafter.live_sums())),
        )

    def named(self, version: str) -> Parts:
        """The same weights as another version."""
        return Parts(
            self.target and replace(self.target, version=version),
            self.drafter and replace(self.drafter, version=version),
        )

    def over(self, other: Parts) -> Parts:
        """These parts, and of `other` those that are missing here."""
        return Parts(self.target or other.target, self.drafter or other.drafter)

    def only(self, roles: Collection[str]) -> Parts:
        return Parts(
            self.target if "target" in roles else None, self.drafter if "drafter" in roles else None
        )

    @staticmethod
    def _merged(sums: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """The drafter's names are prefixed where both roles are meant."""
        prefix = DRAFTER_PREFIX if len(sums) == 2 else ""
        drafter = {prefix + name: value for name, value in sums.get("drafter", {}).items()}
        return {**sums.get("target", {}), **drafter}


def drafter_tensors(network: DrafterNetwork) -> dict[str, Tensor]:
    """Everything that makes a version of the drafter, the vocabulary map included."""
    return {
        **network.parameters(),
        "d2t": network.target_ids - torch.arange(network.draft_vocab_size),
    }


def let_go(networks: list[TargetNetwork | DrafterNetwork]) -> None:
    """Empty the list and free the memory that nobody else holds, without the interpreter's lock: to
    unmap a gigabyte takes 100 ms.
    """
    with torch.inference_mode():
        held = [view.detach() for network in networks for view in network.parameters().values()]
        networks.clear()
        for view in held:
            view.set_()  # type: ignore[call-overload]
