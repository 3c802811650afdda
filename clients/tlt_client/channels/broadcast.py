"""Channel `broadcast`: the trainer is rank 0 of a process group and broadcasts, engines receive;
gloo on CPUs, nccl on GPUs.

Tensors follow the manifest's order, one broadcast each or packed: raw bytes in uint8 buckets. A
bucket closes after the tensor that takes it over `bucket_bytes`. Both halves compute the same
buckets, so only bytes travel. While one bucket is checked the next one arrives in another buffer.
gloo silently accepts a shorter message than expected, and a longer one ends the process. So a
buffer is filled with NaN before a bucket arrives. If it is safe, the buffer also has room for any
other bucket, and a mark after its own bytes that must not change.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from tlt_client.channels import (
    Announcement,
    Buffers,
    Intake,
    Receiver,
    Sender,
    TensorBatch,
    Tensors,
    by_role,
)
from tlt_client.channels.errors import ChannelLost, ContentRefused
from tlt_client.channels.groups import Membership, WeightGroup, host_store
from tlt_client.channels.tensors import (
    TensorSpec,
    announced_buckets,
    buckets,
    entry,
    size_of,
    spec_of,
    unpacked,
)
from tlt_client.errors import NotLive, ServerError

if TYPE_CHECKING:
    from torch import Tensor

    from tlt_client.client import Client

BUCKET_BYTES = 2**30
STOP_S = 1.0  # a push that was ended may still arrive in this time; then its group is left
GRACE_S = 30.0  # after a group's timeout, for the server to notice and to report
NAN_BYTE = 0xFF  # a floating-point number of such bytes is NaN in every type
MARK = bytes(range(0xA0, 0xC0))  # follows a bucket


class BroadcastReceiver(Receiver):
    def __init__(self, push: Announcement, intake: Intake) -> None:
        self._group, self._role = intake.groups[push.group], push.role
        each = "broadcast names each with dtype and shape, in order"
        self.name_announced(push, f"group {push.group!r}", each)
        self._left = announced_buckets(push, push.bucket_bytes if push.packed else None)
        self._buffers: list[Tensor] = []
        self._under_way: tuple[list[TensorSpec], Tensor, Any] | None = None
        self._give_up_s = math.inf  # by the monotonic clock
        largest = max(map(size_of, self._left))
        self._length = 2 * largest + len(MARK) if self._group.lenient else largest
        self.buffers = (
            Buffers(host=2 * largest)
            if self._group.device.type == "cpu"
            else Buffers(device=2 * largest)
        )

    def batches(self) -> Iterator[TensorBatch]:
        self._begin()
        count = 0
        while self._under_way is not None:
            bucket, data, work = self._under_way
            self._end(work)
            self._begin()
            count += 1
            tensors, end = unpacked(bucket, data), size_of(bucket)
            if bytes(data[end : end + len(MARK)].tolist()) != MARK[: len(data) - end]:
                raise ContentRefused(
                    f"bucket {count} brought more than the {end} bytes that the manifest gives it; "
                    "name dtypes and shapes as they are sent, in that order"
                )
            yield from by_role(f"bucket {count}", tensors, self._role)

    def _begin(self) -> None:
        """Start to receive the next bucket, if there is one."""
        self._under_way = None
        if self._left:
            bucket = self._left.pop(0)
            data = self._buffer(size_of(bucket))
            self._under_way = bucket, data, self._group.begin(data)

    def _end(self, work: Any) -> None:
        self._group.end(work, lambda: time.monotonic() > self._give_up_s)

    def _buffer(self, size: int) -> Tensor:
        """Return a buffer for `size` bytes; two of them alternate. Unwritten pages take no
        memory.
        """
        import torch

        if not self._buffers:
            self._buffers = [
                torch.empty(self._length, dtype=torch.uint8, device=self._group.device)
                for _ in range(2)
            ]
        self._buffers.reverse()
        data = self._buffers[0] if self._group.lenient else self._buffers[0][:size]
        data[:size].fill_(NAN_BYTE)
        if self._group.lenient:
            data[size : size + len(MARK)] = torch.tensor(list(MARK), dtype=torch.uint8)
        return data

    def confirm(self) -> None:
        """Check nothing more: every bucket was checked on arrival."""

    def stop(self) -> None:
        self._give_up_s = time.monotonic() + STOP_S

    def close(self) -> None:
        """Receive the rest of a push that was refused halfway, so that the group can carry the next
        push. Raise `ChannelLost` if it does not arrive.
        """
        try:
            while self._under_way is not None or self._left:
                if self._under_way is not None:
                    self._end(self._under_way[2])
                self._begin()
        except Exception as error:  # the next push must not take these bytes for its own
            self._group.close(
                f"could not take what was still on its way ({type(error).__name__}: "
                f"{str(error)[:200]})"
            )
            raise ChannelLost(self._group.broken) from None


class BroadcastSender(Sender):
    """Rank 0 of a group with the server, or with each replica of a gateway. The constructor forms
    the group; `push` forms it again if it broke. Engines reach this process at `address`.
    """

    def __init__(
        self,
        client: Client,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        backend: str = "gloo",
        name: str = "weights",
        packed: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        prefixed: bool = False,
        checksums: bool = False,
        timeout_s: float = 120.0,
    ) -> None:
        """Form the group. With `checksums` the manifest declares them; that takes about a second
        per gigabyte on a CPU, hardly any time on a GPU. `timeout_s` bounds joining and each bucket.
        A drain may delay the reply, so `push` waits for it as long as the client does.
        """
        self._client, self._packed, self._bucket_bytes, self._checksums = (
            client,
            packed,
            bucket_bytes,
            checksums,
        )
        self._member = Membership(name, backend, address, port, 0, 2, prefixed, timeout_s)
        self._reply_s = timeout_s + GRACE_S
        self._group = self._made()

    def _made(self) -> WeightGroup:
        replicas = int(self._client.server_info().get("dp_size", 1))
        wanted = self._member._replace(world_size=1 + replicas)
        store = host_store(
            wanted.master_address, wanted.master_port, wanted.world_size, wanted.timeout_s
        )
        member = wanted._replace(master_port=store.port)
        joined = _in_thread(
            partial(
                self._client.join_group,
                member.name,
                master_address=member.master_address,
                master_port=member.master_port,
                rank_offset=1,
                world_size=member.world_size,
                backend=member.backend,
                prefixed=member.prefixed,
            )
        )
        try:
            group = WeightGroup(member, store)
        except ChannelLost:
            wait([joined], self._reply_s)  # the server gives up too
            raise
        try:
            joined.result(self._reply_s)
        except TimeoutError:
            group.close()
            raise ChannelLost(
                f"the server is in group {wanted.name!r}, but has not replied within "
                f"{self._reply_s:g} s; check that it runs, then make the group again"
            ) from None
        except BaseException:
            group.close()
            raise
        return group

    def _push(self, tensors: Tensors, version: str, **fields: Any) -> Mapping[str, Any]:
        if self._group.broken:
            self._group = self._made()
        named = [
            (name, tensor.detach().to(self._group.device).contiguous()) for name, tensor in tensors
        ]
        entries = [entry(name, tensor, checksum=self._checksums) for name, tensor in named]
        reply = _in_thread(
            partial(
                self._client.push_weights,
                version,
                channel="broadcast",
                group=self._member.name,
                tensors=entries,
                packed=self._packed,
                bucket_bytes=self._bucket_bytes,
                **fields,
            )
        )
        try:
            self._send(named, reply)
        except ChannelLost:
            self._group.close()
            with contextlib.suppress(TimeoutError):
                reply.result(self._reply_s)  # raises the server's reason, if it has one
            raise
        try:
            return reply.result()
        except BaseException as error:
            heard = isinstance(error, NotLive) or (
                isinstance(error, ServerError) and error.code == ContentRefused.code
            )
            # Else the server may have left the group, or it never received this call and took none
            # of its bytes. The next push makes the group again.
            if not heard:
                self._group.close()
            raise

    def _send(self, named: list[tuple[str, Tensor]], reply: Future[Mapping[str, Any]]) -> None:
        import torch

        specs = [spec_of(name, str(tensor.dtype), tensor.shape) for name, tensor in named]
        data = dict(named)
        for bucket in buckets(specs, self._bucket_bytes if self._packed else None):
            packed = torch.cat([data[spec.name].reshape(-1).view(torch.uint8) for spec in bucket])
            self._group.end(
                self._group.begin(packed), lambda: reply.done() and reply.exception() is not None
            )

    def close(self) -> None:
        self._group.close()
        self._client.leave_group(self._member.name)


def _in_thread(call: Callable[[], Mapping[str, Any]]) -> Future[Mapping[str, Any]]:
    """Make the call in a daemon thread, as a reply may never come."""
    reply: Future[Mapping[str, Any]] = Future()

    def ask() -> None:
        try:
            reply.set_result(call())
        except BaseException as error:
            reply.set_exception(error)

    threading.Thread(target=ask, name="ask the server", daemon=True).start()
    return reply
