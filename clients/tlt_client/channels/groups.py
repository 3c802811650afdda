"""Process groups between a trainer (rank 0, which hosts the store) and engines.

A group uses torch's process groups without torch's global state, or NCCL's communicator (`nccl`),
so it can be formed again at any time. Every wait is bounded: joining as a whole and each broadcast
raise `ChannelLost` if they break or take longer than `timeout_s`. A broken group is not used again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from tlt_client.channels import nccl
from tlt_client.channels.errors import ChannelLost, ContentRefused

if TYPE_CHECKING:
    from torch import Tensor

MAX_GROUPS = 8
POLL_S = 0.0002
LOOK_S = 0.2  # pause between two attempts to reach the trainer
BACKENDS = ("gloo", "nccl")


class Membership(NamedTuple):
    """A group, and this process's rank in it."""

    name: str
    backend: str
    master_address: str
    master_port: int
    rank: int
    world_size: int
    prefixed: bool = False  # keys of the store begin with the group's name, as torch's named groups
    timeout_s: float = 120.0
    unique_id: bytes = b""  # NCCL's id; with it there is no store


class WeightGroup:
    """A group that all ranks have joined when the constructor returns. Rank 0 hosts the store."""

    def __init__(self, member: Membership, store: Any = None) -> None:
        """`store`: rank 0's, from `host_store`."""
        import torch

        if member.backend not in BACKENDS:
            raise ContentRefused(f"backend is {member.backend[:40]!r}; use {' or '.join(BACKENDS)}")
        if member.backend == "nccl" and not torch.cuda.is_available():
            raise ContentRefused("backend is nccl, and there is no GPU here; use gloo")
        self.member, self.broken = member, ""
        self.under_way = 0  # broadcasts that have not ended
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if member.backend == "nccl"
            else torch.device("cpu")
        )
        self._timeout, self._until = (
            timedelta(seconds=member.timeout_s),
            time.monotonic() + member.timeout_s,
        )
        connects = store is None and not member.unique_id
        with self._bounded("joining"):
            self._store = (
                connected(member.master_address, member.master_port, member.world_size, self._until)
                if connects
                else store
            )
            self._group: Any = self._made()
            if connects:
                self._store.set_timeout(self._timeout)  # so far it had the time left to join

    def _made(self) -> Any:
        from torch import distributed
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store = self._store
        if self.member.backend == "nccl" and not self.member.prefixed:
            id = self._id()
            return nccl.Communicator(
                id, self.member.rank, self.member.world_size, self.device, left(self._until)
            )
        if self.member.prefixed:
            for prefix in (self.member.name, f"{self.member.name}/", f"{self.device.type}/"):
                store = PrefixStore(prefix, store)
        rank, size = self.member.rank, self.member.world_size
        if self.member.backend == "nccl":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return distributed.ProcessGroupNCCL(store, rank, size, options)
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(
            seconds=left(self._until)
        )  # for joining; a broadcast has its own
        gloo = distributed.ProcessGroupGloo
        local = _is_loopback(self.member.master_address)
        options._devices = [
            gloo.create_device(hostname="127.0.0.1") if local else gloo.create_default_device()
        ]
        return gloo(store, rank, size, options)

    def _id(self) -> bytes:
        """Return the id of NCCL's communicator, which rank 0 creates."""
        if self.member.unique_id:
            return self.member.unique_id
        if self.member.rank == 0:
            self._store.set(nccl.KEY, nccl.new_id())
        return nccl.id_in(self._store.get(nccl.KEY))

    @property
    def lenient(self) -> bool:
        """Return True if a message of unexpected length still arrives: a shorter one unnoticed, a
        longer one if there is room.

        That is so for gloo with one receiver. Several receivers forward messages in the length that
        they expect themselves.
        """
        return self.member.backend == "gloo" and self.member.world_size == 2

    def begin(self, tensor: Tensor) -> Any:
        """Start to broadcast rank 0's values into every rank's tensor, on the group's device; `end`
        must follow.
        """
        from torch import distributed

        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        with self._bounded("broadcasting"):
            self.under_way += 1
            return self._group.broadcast([tensor], options)

    def end(self, work: Any, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for a broadcast. Poll `given_up`, which ends the wait, rather than rely on the
        library's timeout.
        """
        with self._bounded("broadcasting"):
            give_up_s = time.monotonic() + self.member.timeout_s
            while not work.is_completed():
                if given_up():
                    raise RuntimeError("the push was ended")
                if time.monotonic() > give_up_s:
                    raise RuntimeError("the other side takes no part")
                time.sleep(POLL_S)
            work.wait(self._timeout)
            if self.device.type == "cuda":
                import torch

                torch.cuda.current_stream(self.device).synchronize()
            self.under_way -= 1

    @contextlib.contextmanager
    def _bounded(self, doing: str) -> Iterator[None]:
        """Turn the library's errors into `ChannelLost`, and mark the group as broken."""
        if self.broken:
            raise ChannelLost(self.broken)
        try:
            yield
        except (RuntimeError, ValueError) as error:
            member = self.member
            reason = re.sub(
                r"^\[\S+\] ", "", (str(error).strip().splitlines() or [type(error).__name__])[0]
            )[:120]
            via = (
                "by its id"
                if member.unique_id
                else f"at {member.master_address}:{member.master_port}"
            )
            self.broken = (
                f"group {member.name!r} (rank {member.rank} of {member.world_size} {via}, "
                f"{member.backend}) broke while {doing}, or {member.timeout_s:g} s passed "
                f"({reason}); make the group again, then push"
            )
            raise ChannelLost(self.broken) from None

    def close(self, why: str = "was left") -> None:
        self.broken = (
            self.broken or f"group {self.member.name!r} {why}; make the group again, then push"
        )
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._group.abort()
        held, waits = [self._group], self.under_way > 0
        self._group, self._store, self.under_way = None, None, 0
        # gloo's destructor waits for an open broadcast until its peer leaves or time is up, so a
        # thread drops the last reference. If no thread can be started this one waits.
        if waits:
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=held.clear, name="leave group", daemon=True).start()


def host_store(address: str, port: int, world_size: int, timeout_s: float) -> Any:
    """Host the store of a group's rank 0. For port 0, `.port` is the chosen one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(
            address, port, world_size, True, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except RuntimeError as error:
        raise ChannelLost(
            f"the store at {address}:{port} cannot be hosted ({str(error).splitlines()[0][:120]}); "
            "choose another port or address (port 0 = a free one)"
        ) from None


def connected(address: str, port: int, world_size: int, until: float) -> Any:
    """Connect to the store that rank 0 hosts, once its port listens.

    torch tries twice with the full timeout each, and waits for ever for a peer that accepts and
    stays silent. So torch is called only once the port listens, in a thread, and the wait for it
    ends at `until`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    made: Future[Any] = Future()

    def connect() -> None:
        try:
            _await_listener(address, port, until)
            made.set_result(
                TCPStore(address, port, world_size, False, timedelta(seconds=left(until)))
            )
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=connect, name="connect to a store", daemon=True).start()
    try:
        return made.result(left(until))
    except TimeoutError:
        raise RuntimeError("no store answers there") from None


def _await_listener(address: str, port: int, until: float) -> None:
    while True:
        try:
            with socket.create_connection((address, port), timeout=left(until)) as found:
                # A free port may be given to this very socket, which then reaches itself.
                if found.getsockname() != found.getpeername():
                    return
                raise ConnectionRefusedError("connection refused")
        except OSError as error:
            if time.monotonic() + LOOK_S >= until:
                raise RuntimeError(f"the port does not listen: {error}") from None
            time.sleep(LOOK_S)


def left(until: float) -> float:
    """Return the seconds left, above 0: the libraries read 0 as no limit."""
    return max(0.01, until - time.monotonic())


class Groups:
    """The groups that an engine has joined, by name, for any thread. `timeout_s` bounds every wait
    for the trainer.
    """

    def __init__(self, timeout_s: float = 120.0) -> None:
        self.timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._joining: list[Membership] = []
        self._lock = threading.Lock()

    @property
    def hold_gpu(self) -> bool:
        """Return True while a kernel on the GPU waits for a trainer. A wait for the whole GPU would
        then wait for that trainer too.
        """
        working = [group.member for group in list(self._groups.values()) if group.under_way]
        return any(member.backend == "nccl" for member in [*self._joining, *working])

    def join(self, member: Membership) -> None:
        """Join a group; return once all ranks have. First leave a group of the same name, and all
        broken ones.
        """
        for name in (member.name, *(set(self._groups) - set(self))):
            self.leave(name)
        if len(self._groups) >= MAX_GROUPS:
            raise ContentRefused(
                f"{len(self._groups)} groups are joined, the limit is {MAX_GROUPS}; leave one of "
                f"{sorted(self._groups)}"
            )
        self._joining.append(member)
        try:
            group = WeightGroup(member)
        finally:
            self._joining.remove(member)
        with self._lock:
            before = self._groups.pop(member.name, None)
            self._groups[member.name] = group
        if before is not None:
            before.close()

    def leave(self, name: str) -> bool:
        with self._lock:
            group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of unbroken groups."""
        return iter([name for name, group in list(self._groups.items()) if not group.broken])

    def __getitem__(self, name: str) -> WeightGroup:
        group = self._groups.get(name)
        if group is None:
            raise ChannelLost(
                f"there is no group {name[:80]!r}; joined are {sorted(self._groups) or 'none'}: "
                "make the group first"
            )
        return group


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
