"""Memory for a pushed version while it is staged: alongside the live version if it fits, else in
pinned host memory, else in mapped files.

The device reports its free memory, and space for a receiver's buffers is kept free. The requested
place is used, or the first with enough space. A model is constructed as usual, but its storage is
allocated in that place. If the allocation fails after all, the next place is tried. On a CPU the
device's memory is the host's.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tlt_client.channels import Buffers, Intake
from tlt_server.attention.pinned import pinned
from tlt_server.errors import Conflict, Forbidden, PushFailed
from tlt_server.process.private import FILE, private_directory
from tlt_server.weights.spool import Spool

Model = TypeVar("Model")
Place = Literal["device", "host", "disk"]
Asked = Literal["device", "host", "disk", "none"] | None  # None: the first with room
PLACES: tuple[Place, ...] = ("device", "host", "disk")
REMEDY = (
    "make room, name a --state-dir on a larger disk, or start the server with --weight-staging "
    "none, which writes over the weights in use"
)


class Free(NamedTuple):
    """Bytes that a staged version may take; 0 for a place that this device does not use."""

    device: int
    host: int
    disk: int


def disk_free(directory: Path | None) -> int:
    """Return the free bytes of the file system that holds `directory`; 0 without one."""
    return shutil.disk_usage(directory).free if directory else 0


def choose(asked: Asked, need: int, free: Free) -> list[Place]:
    """Return the places with enough space, best first. `PushFailed` if there are none."""
    assert asked != "none", "in place there is nothing to choose"
    allowed = PLACES if asked is None else (asked,)
    places = [place for place in allowed if getattr(free, place) >= need]
    if not places:
        found = ", ".join(f"{getattr(free, place) // 2**20} MiB ({place})" for place in allowed)
        raise PushFailed(f"a staged version takes {need // 2**20} MiB, free are {found}; {REMEDY}")
    return places


def disk_is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def ran_out(error: BaseException) -> bool:
    """Return True if the error means, in any of its many forms, that memory or a disk was full."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM or disk_is_full(error)
    said = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and ("out of memory" in said or "allocate memory" in said)
    )


class Storage:
    """`free` is called at every push. `directory` holds mapped files, which are invisible to other
    processes and vanish with the model.
    """

    def __init__(
        self, asked: Asked, free: Callable[[], Free], device: torch.device, directory: Path | None
    ) -> None:
        self.in_place = asked == "none"
        self.place: Place | None = None  # where the last version was staged
        self._asked, self._free, self._device, self._directory = asked, free, device, directory

    def make(self, need: int, buffers: Buffers, make: Callable[[], Model]) -> Model:
        """Make a model of `need` bytes in the first place with space for it and `buffers`.
        `PushFailed` if there is none.
        """
        if self.in_place:
            return make()
        for place in choose(self._asked, need, self._beside(buffers)):
            try:
                with self._mode(place):
                    made = make()
            except Exception as error:
                if not ran_out(error):
                    raise
                said = (str(error) or type(error).__name__).splitlines()[0]
                print(
                    f"tlt: no room for a staged version after all: {place}, {need // 2**20} MiB "
                    f"({said})",
                    file=sys.stderr,
                )
            else:
                self.place = place
                return made
        raise PushFailed(
            f"a staged version takes {need // 2**20} MiB, which seemed to be free and could not be "
            f"allocated ({said}); {REMEDY}"
        )

    def _beside(self, buffers: Buffers) -> Free:
        """Return the space left after the buffers. A GPU also needs room for the host's buffers,
        since it checks their tensors in its own memory.
        """
        free, most = self._free(), max(buffers)
        host = most if self._device.type == "cpu" else buffers.host
        return Free(max(0, free.device - most), max(0, free.host - host), free.disk)

    def _mode(self, place: Place) -> Any:
        if place == "disk":
            assert self._directory is not None
            directory = self._directory
            private_directory(directory, parents=True, exist_ok=True)
            return _Elsewhere(lambda shape, dtype: _mapped(directory, shape, dtype))
        if place == "host" and self._device.type == "cuda":
            return _Elsewhere(pinned)
        return nullcontext()


class _Elsewhere(TorchFunctionMode):
    """A mode in which `torch.empty`, `zeros` and `ones` of a shape take storage from `allocate`,
    even with an explicit device.
    """

    def __init__(self, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> None:
        super().__init__()
        self._allocate = allocate

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.empty, torch.zeros, torch.ones):
            return func(*args, **kwargs)
        shape = tuple(args[0]) if args and not isinstance(args[0], int) else tuple(args)
        made = self._allocate(shape, kwargs.get("dtype") or torch.get_default_dtype())
        return made if func is torch.empty else made.fill_(func is torch.ones)


def _mapped(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor in an unlinked file."""
    count = max(1, torch.Size(shape).numel())
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        os.fchmod(file.fileno(), FILE)  # it is opened again by name
        # A full disk fails here, instead of killing the process that writes.
        os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype)[
            : torch.Size(shape).numel()
        ].view(shape)


@dataclass(frozen=True)
class Options:
    channels: tuple[str, ...] = ()  # the open ones; without any there are no pushes
    intake: Intake = Intake()
    spool: Spool | None = None
    max_loras: int = 0  # adapters that can be loaded
    max_lora_rank: int = 0
    # content, where it is from -> the table that a drafter reads
    parse_calibration: Callable[[bytes, str], object] = lambda content, source: None
    storage: Storage = field(
        default_factory=lambda: Storage(
            "device", lambda: Free(2**62, 0, 0), torch.device("cpu"), None
        )
    )

    def check_slot(self, adapter: str, loaded: Collection[str]) -> None:
        """Reject an adapter if this server takes none, or if it is not loaded yet and all slots are
        taken.
        """
        if not self.max_loras:
            raise Forbidden(
                "this server takes no LoRA adapters; start it with --max-loras and --max-lora-rank"
            )
        if adapter not in loaded and len(loaded) >= self.max_loras:
            raise Conflict(
                f"{len(loaded)} adapters are loaded ({', '.join(loaded)[:200]}), and the limit is "
                f"{self.max_loras} (--max-loras); unload one first (DELETE /adapters/NAME)"
            )
