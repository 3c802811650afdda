"""Channel `ipc`: a trainer on the engine's host shares memory of a GPU or of the host, and the
engine copies buckets from it.

Both connect by a socket that the engine creates for this one push: the manifest's `path` is its
name in a directory that belongs to the engine alone. Both ends must run as one user. Every message
is one struct:

    trainer: Grant, with the memory's descriptors   once; two buckets alternate in that memory
    trainer: OFFER, sequence, offset, bytes         a bucket is ready: tensors in manifest order
    engine:  DONE, sequence                         it is copied, so its memory may be used again
    trainer: end of the stream                      nothing follows

The engine checks its own copy, so a trainer that writes too early cannot change checked bytes.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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
from tlt_client.channels.errors import ChannelLost, ContentRefused, PlaceForbidden
from tlt_client.channels.line import Line, address, entered
from tlt_client.channels.memory import SharedMemory, share
from tlt_client.channels.tensors import (
    TensorSpec,
    announced_buckets,
    buckets,
    entry,
    size_of,
    spec_of,
    unpacked,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tlt_client.client import Client

OFFER, DONE = struct.Struct("<QQQ"), struct.Struct("<Q")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
BUCKET_BYTES = 2**28
POLL_S = 0.0005
LOOK_S = 0.05  # interval at which a wait for a trainer looks whether it was ended


class IpcReceiver(Receiver):
    def __init__(self, push: Announcement, intake: Intake) -> None:
        assert intake.sockets is not None
        each = "ipc names each with dtype and shape, in order"
        self.name_announced(push, "the manifest", each)
        if not NAME.fullmatch(push.path):
            raise PlaceForbidden(
                f"path is {push.path[:80]!r}; by ipc it is a socket's name: 1 to 64 letters, "
                "digits, '_' and '-'"
            )
        self._buckets = announced_buckets(push, push.bucket_bytes)
        self._role, self._timeout_s = push.role, intake.timeout_s
        self._largest = max(map(size_of, self._buckets))
        # One copy, on the host or the GPU, wherever the trainer's memory is.
        self.buffers = Buffers(self._largest, self._largest)
        self._line: Line | None = None
        self._stopped = False
        self._memory: SharedMemory | None = None
        self._name, self._directory = push.path, entered(intake.sockets)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(address(self._directory, self._name))
            self._listener.listen(1)
        except OSError as error:
            self._listener.close()
            os.close(self._directory)
            raise ChannelLost(
                f"socket {self._name!r} cannot be made in {intake.sockets} ({error}); push by "
                "another name"
            ) from None

    def batches(self) -> Iterator[TensorBatch]:
        import torch

        line = self._line = self._accepted()
        self._check_goes_on()  # `stop` may have come before it could see the line
        memory = self._memory = line.receive_memory()
        copy = torch.empty(self._largest, dtype=torch.uint8, device=memory.view.device)
        for sequence, bucket in enumerate(self._buckets):
            size = size_of(bucket)
            offered, start, length = OFFER.unpack(line.receive(OFFER.size))
            if (offered, length) != (sequence, size) or start + size > memory.grant.size:
                raise ContentRefused(
                    f"bucket {offered} was offered, {length} bytes from {start} on of "
                    f"{memory.grant.size}, instead of bucket {sequence} of {size} bytes; send the "
                    "tensors that the manifest names, in its order"
                )
            try:
                copy[:size].copy_(memory.view[start : start + size])
                _settle(copy)
            except RuntimeError as error:
                raise ChannelLost(
                    f"bucket {sequence} cannot be copied ({str(error).splitlines()[0]}); push again"
                ) from None
            line.send(DONE.pack(sequence))
            yield from by_role(f"bucket {sequence + 1}", unpacked(bucket, copy[:size]), self._role)

    def _accepted(self) -> Line:
        self._listener.settimeout(LOOK_S)
        give_up_s = time.monotonic() + self._timeout_s
        while True:
            self._check_goes_on()
            try:
                connection, _ = self._listener.accept()
                break
            except OSError as error:
                if not isinstance(error, TimeoutError) or time.monotonic() > give_up_s:
                    raise ChannelLost(
                        f"no trainer used socket {self._name!r} within {self._timeout_s:g} s "
                        f"({error}); push again"
                    ) from None
        try:
            return Line(connection, self._timeout_s)
        except PlaceForbidden:
            connection.close()
            raise

    def _check_goes_on(self) -> None:
        if self._stopped:
            raise ChannelLost("the push ended before its trainer connected; push again")

    def confirm(self) -> None:
        """Check that the trainer has ended the stream too."""
        assert self._line is not None
        self._line.receive_end()

    def stop(self) -> None:
        self._stopped = True
        if self._line is not None:
            self._line.stop()

    def close(self) -> None:
        try:
            if self._memory is not None:
                self._memory.close()
        finally:
            if self._line is not None:
                self._line.close()
            self._listener.close()
            os.unlink(self._name, dir_fd=self._directory)
            os.close(self._directory)


class IpcSender(Sender):
    """Allocates memory for two buckets during a push: on a GPU if a tensor is on one, else on the
    host.
    """

    def __init__(
        self,
        client: Client,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        checksums: bool = False,
        timeout_s: float = 120.0,
    ) -> None:
        """`checksums`: the manifest declares them, which takes about a second per gigabyte on a
        CPU, hardly any time on a GPU.
        """
        self._client, self._bucket_bytes, self._checksums, self._timeout_s = (
            client,
            bucket_bytes,
            checksums,
            timeout_s,
        )

    def _push(self, tensors: Tensors, version: str, **fields: Any) -> Mapping[str, Any]:
        import torch

        held = {name: tensor.detach().contiguous() for name, tensor in tensors}
        entries = [entry(name, tensor, checksum=self._checksums) for name, tensor in held.items()]
        cut = list(
            buckets(
                [spec_of(one["name"], one["dtype"], one["shape"]) for one in entries],
                self._bucket_bytes,
            )
        )
        directory, name = self._client.weights()["sockets"], secrets.token_hex(16)
        if not directory:
            raise PlaceForbidden(
                "this server takes no weights by ipc; start it with ipc among its --weight-channels"
            )
        device = next(
            (tensor.device for tensor in held.values() if tensor.device.type == "cuda"),
            torch.device("cpu"),
        )
        memory = share(2 * max(1, *map(size_of, cut)), device)
        try:
            with ThreadPoolExecutor(1) as pool:
                reply = pool.submit(
                    self._client.push_weights,
                    version,
                    channel="ipc",
                    path=name,
                    tensors=entries,
                    bucket_bytes=self._bucket_bytes,
                    **fields,
                )
                try:
                    line = self._connected(Path(directory), name, reply)
                    try:
                        self._send(line, memory, cut, held)
                    finally:
                        line.close()
                except ChannelLost:
                    reply.result()  # raises the server's reason, if it has one
                    raise
                return reply.result()
        finally:
            memory.close()  # the push has ended, so the engine has closed it

    def _connected(self, directory: Path, name: str, reply: Future[Mapping[str, Any]]) -> Line:
        """Connect to the engine's socket. The engine creates it when it starts to stage, perhaps
        only after running sequences have ended.
        """
        descriptor = entered(directory)
        try:
            while not reply.done():
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    connection.connect(address(descriptor, name))
                    return Line(connection, self._timeout_s)
                except (FileNotFoundError, ConnectionRefusedError):  # it does not listen yet
                    connection.close()
                    time.sleep(POLL_S)
        finally:
            os.close(descriptor)
        raise ChannelLost("the server has ended the push before its socket was reached; push again")

    def _send(
        self,
        line: Line,
        memory: SharedMemory,
        cut: Sequence[list[TensorSpec]],
        held: Mapping[str, Tensor],
    ) -> None:
        import torch

        line.send(memory.grant.packed(), memory.descriptors)
        for sequence, bucket in enumerate(cut):
            if sequence >= 2:
                _await_done(line, sequence - 2)
            start = end = sequence % 2 * (memory.grant.size // 2)
            for piece in bucket:
                memory.view[end : end + piece.bytes].copy_(
                    held[piece.name].reshape(-1).view(torch.uint8)
                )
                end += piece.bytes
            _settle(memory.view)
            self._offer(line, memory, sequence, start, end - start)
        for sequence in range(max(0, len(cut) - 2), len(cut)):
            _await_done(line, sequence)
        line.end()

    def _offer(
        self, line: Line, memory: SharedMemory, sequence: int, start: int, size: int
    ) -> None:
        line.send(OFFER.pack(sequence, start, size))


def _await_done(line: Line, sequence: int) -> None:
    (done,) = DONE.unpack(line.receive(DONE.size))
    if done != sequence:
        raise ChannelLost(f"the server confirmed bucket {done} instead of {sequence}; push again")


def _settle(view: Tensor) -> None:
    """Wait for the current stream of its device, as the other process does not."""
    if view.device.type == "cuda":
        import torch

        torch.cuda.current_stream(view.device).synchronize()
