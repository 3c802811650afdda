"""Channels: how weights travel from a trainer to the engine. One file each, with both halves; torch
is imported inside functions only.

A trainer's half sends what `state_dict().items()` gives. The engine's half is a `Receiver`, made in
the thread that stages a push and closed by it whatever happens. It says which tensors will come and
hands them over in whatever groups the channel has; that they are the right ones is checked by its
caller, once for all channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tlt_client.arguments import version_of
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.groups import Groups

if TYPE_CHECKING:
    from torch import Tensor

    from tlt_client.channels.tensors import TensorSpec

CHANNELS = {  # name -> the engine's half; its file holds the trainer's, too
    "disk": "tlt_client.channels.disk:DiskReceiver",
    "http": "tlt_client.channels.http:HttpReceiver",
    "broadcast": "tlt_client.channels.broadcast:BroadcastReceiver",
    "ipc": "tlt_client.channels.ipc:IpcReceiver",
}
DRAFTER_PREFIX = "draft."  # of the drafter's tensors where both roles come in one stream

Tensors = Iterable[tuple[str, "Tensor"]]


class Announced(Protocol):
    """One tensor of a manifest; empty fields are not known beforehand."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Sequence[int] | None: ...


class Announcement(Protocol):
    """What a manifest says that a channel needs."""

    @property
    def role(self) -> str: ...  # target | drafter | all

    @property
    def path(self) -> str: ...

    @property
    def drafter_path(self) -> str: ...

    @property
    def tensors(self) -> Sequence[Announced]: ...

    @property
    def group(self) -> str: ...

    @property
    def packed(self) -> bool: ...

    @property
    def bucket_bytes(self) -> int: ...


@dataclass(frozen=True)
class Intake:
    """Where an engine takes weights from."""

    root: Path | None = None  # directories of the channel disk lie below it
    marker: str = ""  # a file that a complete one of them holds
    uploads: Path | None = None  # where the server puts what comes by http
    sockets: Path | None = (
        None  # directory of its own in which it meets trainers of the channel ipc
    )
    groups: Groups = field(default_factory=Groups)  # that the engine has joined

    @property
    def timeout_s(self) -> float:
        """Of one wait for a trainer."""
        return self.groups.timeout_s


class TensorBatch(NamedTuple):
    """Tensors of one role, as many as the channel gives at once."""

    role: str
    where: str  # for messages
    tensors: dict[str, Tensor]
    file: Path | None = (
        None  # below the state directory, of which this is all or a part, under its own names; it is not written any more
    )


class Layout(NamedTuple):
    """A tensor of one role, as a file's header says it before any is read."""

    role: str
    where: str  # for messages
    spec: TensorSpec


class Buffers(NamedTuple):
    """Bytes of memory that a receiver takes for itself while it receives."""

    host: int = 0
    device: int = 0  # of the one that the engine computes on


class Receiver(Protocol):
    """The engine's half, of one push. Everything raises `ChannelError` with a remedy, or `OSError`."""

    @property
    def buffers(self) -> Buffers: ...

    @property
    def names(
        self,
    ) -> Mapping[
        str, Mapping[str, str]
    ]: ...  # role -> tensor that will come -> from where, for messages

    @property
    def layouts(self) -> Sequence[Layout]: ...  # none where the manifest alone says what will come

    @property
    def places(self) -> Mapping[str, str]: ...  # role -> where its tensors come from, for messages

    def file(self, role: str, name: str) -> bytes | None:
        """A small file beside the tensors, if there is one."""

    def batches(self) -> Iterator[TensorBatch]: ...

    def confirm(self) -> None:
        """Once everything was taken: it belongs together."""

    def stop(self) -> None:
        """From another thread: what waits for a trainer breaks within a moment. `close` still
        comes.
        """

    def close(self) -> None: ...


class Sender(ABC):
    """The trainer's half, for any number of pushes."""

    def push(
        self, tensors: Tensors | Mapping[str, Tensor], version: str, **fields: Any
    ) -> Mapping[str, Any]:
        """The server's reply once the push has ended. `tensors`: a state dict, or its items, which
        are taken one by one. `fields`: further ones of the manifest, such as `role` or `in_flight`.
        `ContentRefused` where it names no tensors, or what is none.
        """
        return self._push(named(tensors), version_of(version), **fields)

    @abstractmethod
    def _push(self, tensors: Tensors, version: str, **fields: Any) -> Mapping[str, Any]:
        """As this channel brings them; each name comes once, and one comes at least."""

    @abstractmethod
    def close(self) -> None: ...


def named(tensors: Tensors | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What a trainer gives to be pushed, one by one; `ContentRefused` where it is something else."""
    given = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(given, Iterable):
        raise ContentRefused(
            f"tensors is a {type(given).__name__}; push a state dict (model.state_dict()), or its items"
        )
    names: set[str] = set()
    for item in given:
        match item:
            case (str() as name, tensor) if hasattr(tensor, "detach"):
                if name in names:
                    raise ContentRefused(f"tensor {name!r} comes twice; push each tensor once")
                names.add(name)
                yield name, tensor
            case (str() as name, other):
                raise ContentRefused(
                    f"tensor {name!r} is a {type(other).__name__}; push tensors of torch (torch.as_tensor makes one)"
                )
            case _:
                raise ContentRefused(
                    f"tensors gives a {type(item).__name__}, where a name and a tensor are due; push a state dict "
                    "(model.state_dict()), or its items"
                )
    if not names:
        raise ContentRefused(
            "no tensors came; push a state dict (model.state_dict()), or its items, and an iterator only once"
        )


def owner(name: str, role: str) -> tuple[str, str]:
    """Whose a tensor of a push of `role` is, and what it is called there."""
    if role == "drafter" or (role == "all" and name.startswith(DRAFTER_PREFIX)):
        return "drafter", name.removeprefix(DRAFTER_PREFIX)
    return "target", name


def split(names: Iterable[str], role: str) -> dict[str, dict[str, str]]:
    """One stream's tensors by role: role -> own name -> name in the stream."""
    roles: dict[str, dict[str, str]] = {}
    for name in names:
        whose, own = owner(name, role)
        roles.setdefault(whose, {})[own] = name
    return roles


def announced(push: Announcement, where: str) -> dict[str, dict[str, str]]:
    """A receiver's `names` where the manifest alone says what will come; each role that is pushed
    has an entry.
    """
    roles = split((tensor.name for tensor in push.tensors), push.role)
    return {
        role: dict.fromkeys(roles.get(role, ()), where)
        for role in ("target", "drafter")
        if push.role in (role, "all")
    }


def by_role(
    where: str, tensors: Mapping[str, Tensor], role: str, file: Path | None = None
) -> Iterator[TensorBatch]:
    """What came at once in a push of `role`."""
    for whose, names in split(tensors, role).items():
        yield TensorBatch(whose, where, {name: tensors[sent] for name, sent in names.items()}, file)
