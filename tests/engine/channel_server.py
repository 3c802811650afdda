"""An engine that takes weights by every channel, and a trainer that joins its groups."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from safetensors.torch import load_file

from tests.engine.pushing import Pushable, cpu_settings, perturbed, small_request
from tests.engine.tiny import SMALLEST, Shape, write_eagle, write_target
from tlt_client import ServerError
from tlt_client.channels import CHANNELS
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.errors import ChannelError
from tlt_client.errors import server_error
from tlt_server.errors import TltError, from_code
from tlt_server.frontend.weights.uploads import Uploads
from tlt_server.wire.commands import JoinGroup, LeaveGroup, Manifest, PushWeights
from tlt_server.wire.events import WeightReport

CHUNKS = 19  # per push; the checkpoint is cut so that every channel has at least this many
SHORT_S, LONG_S = 0.3, 30.0  # waits of the two ends of a group for each other


class Server:
    """Engine and uploads of one process, with the methods of `tlt_client.Client` that the trainers'
    halves call.
    """

    def __init__(
        self, root: Path, staging: str | None = None, shape: Shape = SMALLEST, **fields: Any
    ) -> None:
        """`fields`: further settings of the engine."""
        self.root = root
        (root / "weights").mkdir(parents=True)
        write_target(root / "base", shape=shape)
        write_eagle(root / "drafter", shape=shape, draft_vocab=40)
        perturbed(root / "base", root / "new", 1)
        perturbed(root / "drafter", root / "new-drafter", 2)
        self.old = load_file(root / "base" / "model.safetensors")
        self.new = load_file(root / "new" / "model.safetensors")
        self.new_drafter = load_file(root / "new-drafter" / "model.safetensors")
        self.engine = Pushable(
            cpu_settings(
                root / "base",
                root / "drafter",
                kv_memory_mb=4,
                weight_root=str(root / "weights"),
                threads=1,
                weight_channels=",".join(CHANNELS),
                weight_staging=staging,
                state_dir=str(root / "state"),
                max_loras=1,
                max_lora_rank=4,
                **fields,
            )
        )
        self._made: list[weakref.ref[Any]] = []  # networks that pushes were staged in
        self._note_networks()
        self.runner = asyncio.Runner()
        limits = SimpleNamespace(
            state_dir=root / "state",
            max_uploads=2,
            max_upload_parts=64,
            max_upload_mb=64,
            upload_ttl_s=600,
        )
        self.uploads = self.runner.run(self._uploads(limits))
        self.versions = (f"v{i}" for i in itertools.count())
        self.ids = (f"c{i}" for i in itertools.count())
        self.known: list[tuple[dict[str, str], Any]] = []
        for tensors in (self.new, self.old):  # what each says; the old one is live in the end
            assert (
                DiskSender(self, root / "weights").push(tensors.items(), next(self.versions))[
                    "state"
                ]
                == "committed"
            )  # type: ignore[arg-type]
            self.known.append((self.engine.checksums(), self.speak()))

    def _note_networks(self) -> None:
        storage: Any = self.engine.engine.pushes.transaction.options.storage
        sound = storage.make

        def noted(*given: Any) -> Any:
            network = sound(*given)
            self._made.append(weakref.ref(network))
            return network

        storage.make = noted

    @staticmethod
    async def _uploads(limits: Any) -> Uploads:
        return Uploads(limits)

    def speak(self) -> Any:
        return self.engine.run(small_request(3))

    # what a client calls

    def _ask(self, command: Any) -> WeightReport:
        """Steps the loop until it answers; a sender asks in a thread of its own, one at a time."""
        self.engine.engine.send(command)
        report = self.engine.report(command.id)
        if report.error is not None:
            error = from_code(*report.error)
            raise server_error(
                error.code, error.message, status=error.http_status, retryable=error.retryable
            )
        return report

    def push_weights(self, version: str, **fields: Any) -> dict[str, Any]:
        sealed = self.uploads.seal(version) if fields.get("channel") == "http" else None
        try:
            path = {"path": sealed.path} if sealed is not None else {}
            manifest = msgspec.convert({"version": version, **fields, **path}, Manifest)
            return {"state": self._ask(PushWeights(next(self.ids), manifest)).result}
        finally:
            if sealed is not None:
                self.uploads.release(version, sealed, keep=False)

    def abort_weights(self, version: str, *, upload_only: bool) -> None:
        assert upload_only, "a sender ends nothing else"
        self.uploads.forget(version)

    def put_weights(
        self, version: str, part: str, data: bytes, *, start: int, total: int
    ) -> dict[str, Any]:
        async def body() -> Any:
            yield data

        return self._http(lambda: self.uploads.write(version, part, start, total, body()))

    def weights_part(self, version: str, part: str) -> dict[str, Any]:
        async def status() -> Any:
            return self.uploads.status(version, part)

        return self._http(status)

    def _http(self, call: Callable[[], Any]) -> dict[str, Any]:
        try:
            return dict(msgspec.to_builtins(self.runner.run(call())))
        except TltError as error:
            raise server_error(
                error.code, error.message, status=error.http_status, retryable=error.retryable
            ) from None

    def server_info(self) -> dict[str, Any]:
        return {}

    def join_group(self, name: str, *, rank_offset: int, **fields: Any) -> dict[str, Any]:
        return {
            "groups": self._ask(
                JoinGroup(next(self.ids), name, rank=rank_offset, **fields)
            ).state.groups
        }

    def leave_group(self, name: str) -> dict[str, Any]:
        return {"groups": self._ask(LeaveGroup(next(self.ids), name)).state.groups}

    def weights(self) -> dict[str, Any]:
        return {"sockets": self.engine.engine.pushes.state().sockets}

    def weights_groups(self) -> list[str]:
        return list(self.engine.engine.pushes.state().groups)

    # after a case

    def check(self, *, speaks: bool = True) -> str:
        """Return the version that is live and whole, or that nothing is generated. Compare its
        checksums, and what it says if it `speaks`.
        """
        if self.engine.engine.pushes.refusal is not None:
            self.engine.submit(small_request(1, "q"))
            self.engine.finish()
            (said,) = self.engine.said.pop("q")
            assert (
                said.token_ids == [] and said.error is not None and said.error[0] == "unavailable"
            )
            return "quarantined"
        sums, found = self.engine.checksums(), self.speak() if speaks else None
        at = [i for i, known in enumerate(self.known) if sums == known[0]]
        at = [i for i in at if not speaks or found == self.known[i][1]]
        assert len(at) == 1, "live weights are of no version, or say what they never said"
        return ("new", "old")[at[0]]

    def check_settled(self) -> None:
        """Assert that pushes that ended hold no step, network, folder or socket."""
        engine, transaction = self.engine.engine, self.engine.engine.pushes.transaction
        assert transaction.push is None and engine.gate.state == "open"
        assert list(Path(engine.pushes.state().sockets).iterdir()) == []
        self.engine.until(lambda: self._networks() and self._folders(), "end of what it took")

    def _networks(self) -> bool:
        versions = self.engine.engine.pushes.transaction.versions
        kept = [
            part.network for parts in (versions.live, versions.previous) for _, part in parts.parts
        ]
        alive = [network for ref in self._made if (network := ref()) is not None]
        return all(any(network is other for other in kept) for network in alive)

    def _folders(self) -> bool:
        spool = self.engine.engine.pushes.transaction.options.spool
        assert spool is not None
        kept = {place.partition("/")[0] for place in spool._places.values()}
        return {folder.name for folder in spool.directory.glob("push-*")} <= kept


def in_group(server: Server, kind: type[BroadcastSender], timeout_s: float, **options: Any) -> Any:
    """A sender in a new group; a connection that does not come about in time (a busy machine) is
    tried again.
    """
    server.engine.engine.pushes.transaction.options.intake.groups.timeout_s = timeout_s
    for _ in range(20):
        try:
            return kind(server, timeout_s=timeout_s, **options)  # type: ignore[arg-type]
        except (ChannelError, ServerError) as error:
            broken = error
    raise broken


def bucket_bytes(server: Server) -> int:
    return sum(tensor.nbytes for tensor in server.new.values()) // (2 * CHUNKS)
