"""Channels: ways of weights from a trainer to the engine. One file each, with both halves; torch is
imported only inside functions.

A trainer's half is a `Sender`; it sends the items of a state dict. The engine's half is a
`Receiver`, created in the thread that stages a push and always closed by it. It announces the
tensors and yields them in batches; its caller checks that they are the right ones, once for all
channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tlt_client.arguments import version_of
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.groups import Groups

if TYPE_CHECKING:
    from torch import Tensor

    from tlt_client.channels.tensors import TensorSpec


class PushChannel(NamedTuple):
    """A row of the table of channels: the engine's half, and the fields of its manifests."""

    receiver: str  # "module:Class"; the module holds the trainer's half too
    needs: tuple[str, ...]  # required fields of a manifest
    describes: tuple[str, ...] = ()  # required fields of each of its tensors
    takes: tuple[str, ...] = ()  # optional fields of this channel alone
    reads_directories: bool = False  # on the server; adapters bring their config
    repeatable: bool = True  # tensors stay, so a call may be sent again


CHANNELS = {
    "disk": PushChannel(
        "tlt_client.channels.disk:DiskReceiver",
        needs=("path",),
        takes=("drafter_path",),
        reads_directories=True,
    ),
    "http": PushChannel(
        "tlt_client.channels.http:HttpReceiver", needs=("tensors",), describes=("checksum",)
    ),
    "broadcast": PushChannel(
        "tlt_client.channels.broadcast:BroadcastReceiver",
        needs=("group", "tensors"),
        describes=("dtype", "shape"),
        takes=("partial",),
        repeatable=False,
    ),
    "ipc": PushChannel(
        "tlt_client.channels.ipc:IpcReceiver",
        needs=("path", "tensors"),
        describes=("dtype", "shape"),
        repeatable=False,
    ),
}
# Channels that no trainer may push by, so that the table leaves them out: drafters that the server
# trains itself, and files of other servers, which a gateway's manifests name.
TRAINED, PEER = "trained", "peer"
DRAFTER_PREFIX = "draft."  # begins the names of the drafter's tensors in a push of both roles

Tensors = Iterable[tuple[str, "Tensor"]]


class Announced(Protocol):
    """One tensor of a manifest; empty fields are unknown until the tensor arrives."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Sequence[int] | None: ...


class Announcement(Protocol):
    """A manifest's fields for channels."""

    @property
    def role(self) -> str: ...  # target | drafter | all | adapter

    @property
    def version(self) -> str: ...

    @property
    def adapter(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def key(self) -> str: ...

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
    """Places from which an engine takes weights."""

    root: Path | None = None  # directories of the channel disk lie below it
    marker: str = ""  # a file that each complete directory holds
    uploads: Path | None = None  # directory of parts that came by http
    sockets: Path | None = None  # private directory in which it meets trainers of the channel ipc
    trained: Path | None = None  # directory of the server's own trainer
    pulled: Path | None = None  # directory for files of other servers, on the spool's file system
    tls: Mapping[str, str] = field(default_factory=dict)  # files of `Tls` for these servers
    groups: Groups = field(default_factory=Groups)  # the engine's joined groups

    @property
    def timeout_s(self) -> float:
        """The time limit of one wait for a trainer."""
        return self.groups.timeout_s


class TensorBatch(NamedTuple):
    """Tensors of one role that a channel yields together."""

    role: str
    where: str  # for messages
    tensors: dict[str, Tensor]
    # A file below the state directory that holds these tensors under these names, and perhaps more
    # of them. Nothing writes to it any more.
    file: Path | None = None


class Layout(NamedTuple):
    """A tensor of one role as a file's header describes it, known before it is read."""

    role: str
    where: str  # for messages
    spec: TensorSpec


class Buffers(NamedTuple):
    """Bytes of memory that a receiver needs while it receives."""

    host: int = 0
    device: int = 0  # on the device that the engine computes on


class Receiver(ABC):
    """The engine's half of one push. Every method raises `ChannelError` with a remedy, or
    `OSError`.
    """

    buffers: Buffers
    names: Mapping[str, Mapping[str, str]]  # role -> tensor that will come -> its origin
    places: Mapping[str, str]  # role -> the origin of its tensors; both are for messages
    layouts: Sequence[Layout] = ()  # empty where only the manifest describes the tensors
    digests: Mapping[str, str] = MappingProxyType({})  # role -> the version's, where it is known

    def name_announced(self, push: Announcement, where: str, each: str) -> None:
        """Read the tensors' names from the manifest; refuse one without tensors. `each`: the rest
        of a message that begins with the channel's name.
        """
        if not push.tensors:
            raise ContentRefused(f"the manifest names no tensors; a push by {each}")
        roles = split((tensor.name for tensor in push.tensors), push.role)
        self.names = {role: dict.fromkeys(roles.get(role, ()), where) for role in pushed(push.role)}
        self.places = dict.fromkeys(self.names, where)

    def fetch(self) -> None:
        """Get what the attributes describe, if the constructor does not; `stop` ends it. Called
        once, before anything else.
        """
        return

    def file(self, role: str, name: str) -> bytes | None:
        """Return a small file sent with the tensors; None without one."""
        return None

    @abstractmethod
    def batches(self) -> Iterator[TensorBatch]: ...

    @abstractmethod
    def confirm(self) -> None:
        """Check, after all batches, that they belong together."""

    def stop(self) -> None:
        """End waits for a trainer with an error, soon. Called from another thread; `close` still
        follows. A channel that reads files has no such waits.
        """
        return

    def close(self) -> None:
        """Release open resources; none by default."""
        return


class Sender(ABC):
    """The trainer's half, for any number of pushes."""

    def push(
        self, tensors: Tensors | Mapping[str, Tensor], version: str, **fields: Any
    ) -> Mapping[str, Any]:
        """Push and return the server's reply. `tensors`: a state dict, or its items, which are read
        one by one. `fields`: further fields of the manifest, such as `role` or `in_flight`. Raise
        `ContentRefused` if there are no tensors, or other objects among them.
        """
        return self._push(named(tensors), version_of(version), **fields)

    @abstractmethod
    def _push(self, tensors: Tensors, version: str, **fields: Any) -> Mapping[str, Any]:
        """Push by this channel. `tensors` has at least one item, and each name once."""

    def close(self) -> None:
        """Release resources kept between pushes; none by default."""
        return


def named(tensors: Tensors | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield a trainer's tensors with their names; raise `ContentRefused` for anything else."""
    given = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(given, Iterable):
        raise ContentRefused(
            f"tensors is a {type(given).__name__}; push a state dict (model.state_dict()), or its "
            "items"
        )
    names: set[str] = set()
    for item in given:
        match item:
            case (str() as name, tensor) if hasattr(tensor, "detach"):
                if name in names:
                    raise ContentRefused(f"tensor {name!r} is given twice; push each tensor once")
                names.add(name)
                yield name, tensor
            case (str() as name, other):
                raise ContentRefused(
                    f"tensor {name!r} is a {type(other).__name__}; push torch tensors "
                    "(torch.as_tensor makes one)"
                )
            case _:
                raise ContentRefused(
                    f"tensors yields a {type(item).__name__} instead of a name and a tensor; push "
                    "a state dict (model.state_dict()), or its items"
                )
    if not names:
        raise ContentRefused(
            "there are no tensors; push a state dict (model.state_dict()) or its items, and make a "
            "new iterator for each push"
        )


def owner(name: str, role: str) -> tuple[str, str]:
    """Return the role of a tensor in a push of `role`, and its name there."""
    if role == "adapter":
        return role, name
    if role == "drafter" or (role == "all" and name.startswith(DRAFTER_PREFIX)):
        return "drafter", name.removeprefix(DRAFTER_PREFIX)
    return "target", name


def split(names: Iterable[str], role: str) -> dict[str, dict[str, str]]:
    """Sort one stream's tensors by role: role -> own name -> name in the stream."""
    roles: dict[str, dict[str, str]] = {}
    for name in names:
        whose, own = owner(name, role)
        roles.setdefault(whose, {})[own] = name
    return roles


def pushed(role: str) -> tuple[str, ...]:
    """Return the roles of the tensors in a push of `role`."""
    return ("target", "drafter") if role == "all" else (role,)


def by_role(
    where: str, tensors: Mapping[str, Tensor], role: str, file: Path | None = None
) -> Iterator[TensorBatch]:
    """Yield tensors that arrived together in a push of `role`, one batch for each role."""
    for whose, names in split(tensors, role).items():
        yield TensorBatch(whose, where, {name: tensors[sent] for name, sent in names.items()}, file)
