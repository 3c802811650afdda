"""Channel `broadcast`: the trainer is rank 0 of a process group and broadcasts, engines receive; gloo on CPUs, nccl on GPUs.

Tensors come in the manifest's order, one broadcast each or packed: raw bytes one after another in uint8 buckets, where a bucket closes
after the tensor that takes it over `bucket_bytes`. Both halves cut the same buckets, so nothing but bytes travels. While one bucket is
checked the next one is under way, in another buffer. gloo takes a shorter message than expected without a word and ends the process at
a longer one; so a buffer is filled with NaN before it is received into and, where that is safe, has room for any other bucket and a mark
behind its own that must stay as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tlt_client.channels import Announcement, Batch, Intake, Tensors, announced, by_role
from tlt_client.channels.errors import ChannelBroken, ChannelError, ContentRefused
from tlt_client.channels.groups import Group, Membership, host_store
from tlt_client.channels.tensors import Slot, buckets, entry, size_of, slot, unpacked

if TYPE_CHECKING:
    from torch import Tensor

    from tlt_client.client import Client

BUCKET_BYTES = 2**30
POLL_S = 0.0005
NAN_BYTE = 0xFF  # a floating-point number of such bytes is NaN, whatever its type
MARK = bytes(range(0xA0, 0xC0))  # behind a bucket


class BroadcastReceiver:
    def __init__(self, push: Announcement, intake: Intake) -> None:
        self._group, self._role = intake.groups[push.group], push.role
        if not push.tensors:
            raise ContentRefused("the manifest names no tensors; a push by broadcast names each with dtype and shape, in order")
        slots = [slot(tensor.name, tensor.dtype, tensor.shape) for tensor in push.tensors]
        self._left = list(buckets(slots, push.bucket_bytes if push.packed else None))
        self._buffers: list[Tensor] = []
        self._under_way: tuple[list[Slot], Tensor, Any] | None = None
        self.names = announced(push, f"group {push.group!r}")
        self.places = dict.fromkeys(self.names, f"group {push.group!r}")

    def file(self, role: str, name: str) -> bytes | None:
        return None

    def batches(self) -> Iterator[Batch]:
        self._begin()
        count = 0
        while self._under_way is not None:
            bucket, data, work = self._under_way
            self._group.end(work)
            self._begin()
            count += 1
            tensors, end = unpacked(bucket, data), size_of(bucket)
            if bytes(data[end : end + len(MARK)].tolist()) != MARK[: len(data) - end]:
                raise ContentRefused(f"bucket {count} brought more than the {end} bytes that the manifest gives it; name dtypes and "
                                     "shapes as they are sent, in that order")
            yield from by_role(f"bucket {count}", tensors, self._role)

    def _begin(self) -> None:
        """The next bucket is on its way, if there is one."""
        self._under_way = None
        if self._left:
            bucket = self._left.pop(0)
            data = self._buffer(size_of(bucket))
            self._under_way = bucket, data, self._group.begin(data)

    def _buffer(self, size: int) -> Tensor:
        """For `size` bytes; the two that there are alternate. Pages that nothing is written to take no memory."""
        import torch

        device = self._group.device
        if not self._buffers:
            largest = max(size, *map(size_of, self._left), 0)
            length = 2 * largest + len(MARK) if self._group.lenient else largest
            self._buffers = [torch.empty(length, dtype=torch.uint8, device=device) for _ in range(2)]
        self._buffers.reverse()
        data = self._buffers[0] if self._group.lenient else self._buffers[0][:size]
        data[:size].fill_(NAN_BYTE)
        if self._group.lenient:
            data[size : size + len(MARK)] = torch.tensor(list(MARK), dtype=torch.uint8)
        return data

    def confirm(self) -> None:
        """The group is in order: what it brought has been checked tensor by tensor."""

    def close(self) -> None:
        """What was refused halfway is still taken off the wire, so that the group can bring the next push."""
        try:
            while self._under_way is not None or self._left:
                if self._under_way is not None:
                    self._group.end(self._under_way[2])
                self._begin()
        except ChannelError:
            self._group.close()


class BroadcastSender:
    """Rank 0. Makes the group with the server at construction, and anew in `push` once it broke; `address` is where engines reach us."""

    def __init__(self, client: Client, *, address: str = "127.0.0.1", port: int = 0, backend: str = "gloo", name: str = "weights",
                 packed: bool = True, bucket_bytes: int = BUCKET_BYTES, prefixed: bool = False, checksums: bool = False,
                 timeout_s: float = 120.0) -> None:
        """`checksums`: the manifest declares them, which takes a trainer about a second per gigabyte on a CPU, hardly any time on a GPU."""
        self._client, self._packed, self._bucket_bytes, self._checksums = client, packed, bucket_bytes, checksums
        self._member = Membership(name, backend, address, port, 0, 2, prefixed, timeout_s)
        self._group = self._made()

    def _made(self) -> Group:
        asked = self._member
        store = host_store(asked.master_address, asked.master_port, asked.world_size, asked.timeout_s)
        member = asked._replace(master_port=store.port)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self._client.join_group, member.name, master_address=member.master_address, master_port=member.master_port,
                                 rank_offset=1, world_size=member.world_size, backend=member.backend, prefixed=member.prefixed)
            group = Group(member, store)
            joined.result()
        return group

    def push(self, tensors: Tensors, version: str, **fields: Any) -> Mapping[str, Any]:
        if self._group.broken:
            self._group = self._made()
        named = [(name, tensor.detach().to(self._group.device).contiguous()) for name, tensor in tensors]
        entries = [entry(name, tensor, checksum=self._checksums) for name, tensor in named]
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self._client.push_weights, version, channel="broadcast", group=self._member.name, tensors=entries,
                                packed=self._packed, bucket_bytes=self._bucket_bytes, **fields)
            try:
                self._send(named, reply)
            except ChannelBroken:
                self._group.close()
                reply.result()  # says why, if the server knows
                raise
            return reply.result()

    def _send(self, named: list[tuple[str, Tensor]], reply: Future[Mapping[str, Any]]) -> None:
        import torch

        slots = [slot(name, str(tensor.dtype), tensor.shape) for name, tensor in named]
        data = dict(named)
        for bucket in buckets(slots, self._bucket_bytes if self._packed else None):
            packed = torch.cat([data[slot.name].reshape(-1).view(torch.uint8) for slot in bucket])
            work = self._group.begin(packed)
            while not work.is_completed():
                if reply.done() and reply.exception() is not None:
                    raise ChannelBroken("the server has ended the push")
                time.sleep(POLL_S)
            self._group.end(work)

    def close(self) -> None:
        self._group.close()
        self._client.leave_group(self._member.name)
