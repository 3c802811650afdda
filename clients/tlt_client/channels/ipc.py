"""Channel `ipc`: a trainer on the engine's host shares memory, and the engine copies buckets out of
it; GPU memory or the CPU's.

Both meet at a socket that the engine makes for this one push: the manifest's `path` names it, in a
directory that is the engine's alone. Both ends must be of one user. Every message is one struct:

    trainer: Grant, with the memory's descriptors    once; two buckets take turns in that memory
    trainer: OFFER, sequence, offset, bytes          a bucket is ready; its bytes lie as the manifest's tensors follow one another
    engine:  DONE, sequence                          it is copied, and its place may be used again
    trainer: end of the stream                       nothing follows

What is checked is the engine's copy, so a trainer that goes on writing too early cannot change what
was checked.
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
    Sender,
    TensorBatch,
    Tensors,
    announced,
    by_role,
)
from tlt_client.channels.errors import ChannelLost, ContentRefused, PlaceForbidden
from tlt_client.channels.line import Line, address, entered
from tlt_client.channels.memory import SharedMemory, share
from tlt_client.channels.tensors import TensorSpec, buckets, entry, size_of, spec_of, unpacked

if TYPE_CHECKING:
    from torch import Tensor

    from tlt_client.client import Client

OFFER, DONE = struct.Struct("<QQQ"), struct.Struct("<Q")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
BUCKET_BYTES = 2**28
POLL_S = 0.0005
LOOK_S = 0.05  # a wait for a trainer to come is asked so often whether it was ended


class IpcReceiver:
    layouts = ()  # the manifest says dtypes and shapes

    def __init__(self, push: Announcement, intake: Intake) -> None:
        assert intake.sockets is not None
        if not push.tensors:
            raise ContentRefused(
                "the manifest names no tensors; a push by ipc names each with dtype and shape, in order"
            )
        if not NAME.fullmatch(push.path):
            raise PlaceForbidden(
                f"path is {push.path[:80]!r}; by ipc it is a socket's name: 1 to 64 letters, digits, '_' and '-'"
            )
        specs = [spec_of(tensor.name, tensor.dtype, tensor.shape) for tensor in push.tensors]
        self._buckets, self._role, self._timeout_s = (
            list(buckets(specs, push.bucket_bytes)),
            push.role,
            intake.timeout_s,
        )
        self._largest = max(map(size_of, self._buckets))
        self.buffers = Buffers(
            self._largest, self._largest
        )  # one copy, where the trainer's memory turns out to be
        self.names = announced(push, "the manifest")
        self.places = dict.fromkeys(self.names, "the manifest")
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
                f"socket {self._name!r} cannot be made in {intake.sockets} ({error}); push by another name"
            ) from None

    def file(self, role: str, name: str) -> bytes | None:
        return None

    def batches(self) -> Iterator[TensorBatch]:
        import torch

        line = self._line = self._accepted()
        self._check_goes_on()  # who stops it has not seen the line, or we see that it is stopped
        memory = self._memory = line.receive_memory()
        copy = torch.empty(self._largest, dtype=torch.uint8, device=memory.view.device)
        for sequence, bucket in enumerate(self._buckets):
            size = size_of(bucket)
            offered, start, length = OFFER.unpack(line.receive(OFFER.size))
            if (offered, length) != (sequence, size) or start + size > memory.grant.size:
                raise ContentRefused(
                    f"bucket {offered} was offered, {length} bytes from {start} on of {memory.grant.size}, where bucket "
                    f"{sequence} of {size} bytes was due; send what the manifest names, in its order"
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
                        f"no trainer came to socket {self._name!r} within {self._timeout_s:g} s ({error}); push "
                        "again"
                    ) from None
        try:
            return Line(connection, self._timeout_s)
        except PlaceForbidden:
            connection.close()
            raise

    def _check_goes_on(self) -> None:
        if self._stopped:
            raise ChannelLost("the push was ended before its trainer came; push again")

    def confirm(self) -> None:
        """The trainer, too, takes the push to be complete."""
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
    """Takes memory for two buckets while it pushes: on the GPU where tensors are on one, else the
    CPU's.
    """

    def __init__(
        self,
        client: Client,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        checksums: bool = False,
        timeout_s: float = 120.0,
    ) -> None:
        """`checksums`: the manifest declares them, which takes a trainer about a second per
        gigabyte on a CPU, hardly any time on a GPU.
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
                [spec_of(said["name"], said["dtype"], said["shape"]) for said in entries],
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
                    reply.result()  # says why, if the server knows
                    raise
                return reply.result()
        finally:
            memory.close()  # the push has ended, so the engine has closed it

    def _connected(self, directory: Path, name: str, reply: Future[Mapping[str, Any]]) -> Line:
        """The engine makes the socket when it begins to stage, which may be after what runs has
        ended.
        """
        descriptor = entered(directory)
        try:
            while not reply.done():
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    connection.connect(address(descriptor, name))
                    return Line(connection, self._timeout_s)
                except (
                    FileNotFoundError,
                    ConnectionRefusedError,
                ):  # not there, or not listening yet
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

    def close(self) -> None:
        """Nothing is held."""


def _await_done(line: Line, sequence: int) -> None:
    (done,) = DONE.unpack(line.receive(DONE.size))
    if done != sequence:
        raise ChannelLost(
            f"the server says that it has bucket {done}, and {sequence} is due; push again"
        )


def _settle(view: Tensor) -> None:
    """What was begun on its device has been done, as the other process waits for no stream of ours."""
    if view.device.type == "cuda":
        import torch

        torch.cuda.current_stream(view.device).synchronize()
