"""Channel `http`: safetensors files in parts over HTTP, in chunks that can be resumed, then a
manifest with every tensor's checksum.

The server's frontend stores parts in an upload directory that only it writes to; the engine's half
reads that directory as `disk` does. The bytes are checked against the manifest, so it must name
each tensor with its checksum.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt_client.channels import (
    DRAFTER_PREFIX,
    Announcement,
    Buffers,
    Intake,
    Layout,
    Receiver,
    Sender,
    TensorBatch,
    Tensors,
    by_role,
    owner,
)
from tlt_client.channels.checkpoint import ADAPTER_CONFIG, CALIBRATION, Files
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.files import opened
from tlt_client.channels.source import Source
from tlt_client.channels.tensors import FILE_BYTES, Joined, entry, files, written
from tlt_client.errors import Conflict, ConnectionFailed, ServerError

if TYPE_CHECKING:
    from tlt_client.client import Client

CHUNK_BYTES = 8 * 2**20
MAX_ATTEMPTS = 8  # tries of one chunk, with pauses that double from RETRY_S
RETRY_S = 0.05
OnBytes = Callable[[str, int, int], None]  # part, bytes that the server has, bytes in all


class HttpReceiver(Receiver):
    def __init__(self, push: Announcement, intake: Intake) -> None:
        assert intake.uploads is not None
        if not (intake.uploads / push.path).is_dir():
            raise ContentRefused(
                "this version has no parts; send them by PUT "
                "/weights/{version}/{part} first. Parts are removed with their "
                "push or its abort, at a restart of the server, and upload_ttl_s after their last "
                "byte"
            )
        self.name_announced(push, "the manifest", "http names each with its checksum")
        self.read_headers(Source(intake.uploads, push.path), push)

    def read_headers(self, source: Source, push: Announcement) -> None:
        """Read the headers of all files of a directory."""
        self._source, self._role = source, push.role
        self._files = Files(source, sorted(path.name for path in source.path.glob("*.safetensors")))
        self.layouts = [
            Layout(role, _where(part), spec._replace(name=own))
            for part, specs in self._files.specs.items()
            for spec in specs
            for role, own in [owner(spec.name, push.role)]
        ]
        self._pure = {  # parts of one role whose tensors have their own names
            part
            for part, specs in self._files.specs.items()
            if all(owner(spec.name, push.role)[1] == spec.name for spec in specs)
        }
        self.buffers = Buffers(host=self._files.largest)

    def file(self, role: str, name: str) -> bytes | None:
        known = (role, name) in (("drafter", CALIBRATION), ("adapter", ADAPTER_CONFIG))
        exists = known and self._source.has(name)
        return self._source.read(name) if exists else None

    def batches(self) -> Iterator[TensorBatch]:
        for path, tensors in self._files.batches():
            yield from by_role(
                _where(path.name), tensors, self._role, path if path.name in self._pure else None
            )

    def confirm(self) -> None:
        self._source.confirm()


class HttpSender(Sender):
    """Sends files of at most `max_file_bytes` in chunks of `chunk_bytes`. After a broken connection
    it continues from the server's position.

    A push that fails for good, or is interrupted, removes its parts from the server, so that they
    take no space from the next one. It leaves them if the same push may still succeed
    (`ConnectionFailed`, a retryable error), or if another sender started this version.
    """

    def __init__(
        self,
        client: Client,
        *,
        max_file_bytes: int = FILE_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        on_bytes: OnBytes = lambda part, stored, total: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._max_file_bytes, self._chunk_bytes = client, max_file_bytes, chunk_bytes
        self._on_bytes, self._sleep = on_bytes, sleep
        self._started: set[str] = set()  # open versions whose first bytes this sender sent

    def _push(self, tensors: Tensors, version: str, **fields: Any) -> Mapping[str, Any]:
        entries: list[dict[str, Any]] = []
        with self._sending(version):
            for count, group in enumerate(files(tensors, self._max_file_bytes), 1):
                self.send(version, f"part-{count:05}.safetensors", Joined(written(group)))
                entries += [entry(name, tensor, checksum=True) for name, tensor in group.items()]
            return self._client.push_weights(version, channel="http", tensors=entries, **fields)

    def push_directory(
        self, directory: Path, version: str, *, drafter: Path | None = None, **fields: Any
    ) -> Mapping[str, Any]:
        """Push the safetensors files of a directory and its calibration, or one file. With
        `drafter`, also push a drafter's, for the role `all`. Needs no torch.
        """
        entries: list[dict[str, Any]] = []
        with self._sending(version):
            for folder, prefix in (
                (directory, ""),
                *([(drafter, DRAFTER_PREFIX)] if drafter is not None else []),
            ):
                paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
                if not paths:
                    raise ContentRefused(
                        f"{folder} holds no .safetensors file; name a directory that does"
                    )
                for path in paths:
                    with opened(path) as file:
                        self.send(
                            version,
                            ("drafter-" if prefix else "") + path.name,
                            file.prefixed(prefix) if prefix else file.data,
                        )
                        entries += file.entries(prefix)
                if (folder / CALIBRATION).is_file():
                    self.send(version, CALIBRATION, (folder / CALIBRATION).read_bytes())
            return self._client.push_weights(version, channel="http", tensors=entries, **fields)

    @contextmanager
    def _sending(self, version: str) -> Iterator[None]:
        """Remove the parts of the enclosed push if it fails for good."""
        try:
            yield
        except BaseException as error:  # the tensors' iterator may raise anything; or an interrupt
            if not isinstance(error, ConnectionFailed) and not (
                isinstance(error, ServerError) and error.retryable
            ):
                self._take_back(version)
            raise
        self._started.discard(version)

    def _take_back(self, version: str) -> None:
        if version in self._started:
            self._started.remove(version)
            with suppress(Exception):  # the caller must see the error that ended the push
                self._client.abort_weights(version, upload_only=True)

    def send(self, version: str, part: str, data: bytes | mmap.mmap | Joined) -> None:
        """Send one part, from the first byte that the server lacks. Raise `ConnectionFailed` if a
        chunk fails `MAX_ATTEMPTS` times.
        """
        stored = failures = 0
        while stored < len(data):
            chunk = data[stored : stored + self._chunk_bytes]
            try:
                reply = self._client.put_weights(
                    version, part, chunk, start=stored, total=len(data)
                )
                stored, failures = reply["bytes"], 0
                if reply.get("begins"):
                    self._started.add(version)
                self._on_bytes(part, stored, len(data))
            except Conflict:
                # Another sender sends or pushes the version too, or has ended it.
                self._started.discard(version)
                raise
            except (ConnectionFailed, ServerError) as error:
                failures += 1
                if failures == MAX_ATTEMPTS or (
                    isinstance(error, ServerError) and not error.retryable
                ):
                    raise
                self._sleep(RETRY_S * 2**failures)
                stored = self._stored(version, part, stored)

    def _stored(self, version: str, part: str, stored: int) -> int:
        """Return the server's size of the part; `stored` while the server is unreachable."""
        try:
            return int(self._client.weights_part(version, part)["bytes"])
        except ConnectionFailed:
            return stored
        except ServerError as error:
            if error.status == 404:
                return 0  # a restart has removed the part
            raise


def _where(part: str) -> str:
    return f"part {part!r}"
