"""The listener for gateways (`--link-port`): the rules of attaching, and the stream of a gateway.

A server has one gateway at a time. Of one fleet an epoch lower than the highest seen is refused, so
that an old gateway that wakes up carries out nothing; a higher one ends the stream before. The
epochs are kept in the state directory. A stream that ends aborts what its gateway has open here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import msgspec
import structlog

from tlt_server.config import Config
from tlt_server.errors import (
    Cancelled,
    Conflict,
    InvalidRequest,
    RequestTimeout,
    StartupError,
    StorageFailed,
    TltError,
    TooLarge,
    Unavailable,
)
from tlt_server.frontend.http.auth import Gate, bearer
from tlt_server.frontend.http.connections import LINK_CONNECTIONS
from tlt_server.frontend.http.keys import Certificates, Watched
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.rpc.exchange import Context
from tlt_server.frontend.rpc.relay import GatewayRelay
from tlt_server.frontend.rpc.server import BEYOND, MAX_INT, listen, options_of
from tlt_server.process.private import replace_file
from tlt_server.wire.link import METHOD, Attach, Ended, LinkCommand, Ping, decode_link_command
from tlt_server.wire.records import encode

ATTACH_S = 5.0  # time for the first command
SILENT_S = 10.0  # a gateway that sends nothing, or reads nothing, for this long is cut off
# A connection may begin streams for this long, and closes after the last one. A client without a
# key, whose streams end at once, thus holds each of its connections no longer.
AGE_MS = 10_000
# A byte of a request's body may become a token id of four.
MESSAGE_BYTES_PER_BODY_BYTE = 4
EPOCHS, MAX_FLEETS = "link.json", 64  # the last fleets are remembered

log = structlog.get_logger()


class FleetEpochs:
    """The highest epoch of each fleet that has attached, the last fleet last."""

    def __init__(self, state_dir: Path | None) -> None:
        """`StartupError` if the file of an earlier start cannot be read."""
        self._file = state_dir / EPOCHS if state_dir is not None else None
        self._epochs: dict[str, int] = {}
        if self._file is not None and self._file.exists():
            try:
                self._epochs = msgspec.json.decode(self._file.read_bytes(), type=dict[str, int])
            except (OSError, msgspec.DecodeError) as error:
                raise StartupError(
                    f"{self._file} cannot be read ({error}); remove it if no gateway of an earlier "
                    "epoch runs any more"
                ) from None

    def of(self, fleet: str) -> int:
        return self._epochs.get(fleet, 0)

    def note(self, fleet: str, epoch: int) -> None:
        """Record an epoch, on disk before this returns. `StorageFailed` if that fails."""
        if epoch == self.of(fleet):
            return
        others = {name: seen for name, seen in self._epochs.items() if name != fleet}
        epochs = dict([*others.items(), (fleet, epoch)][-MAX_FLEETS:])
        if self._file is not None:
            try:
                replace_file(self._file, msgspec.json.encode(epochs))
            except OSError as error:
                raise StorageFailed(
                    f"the epoch of a gateway cannot be kept in {self._file}: {error.strerror}; "
                    "make room in the state directory"
                ) from None
        self._epochs = epochs


class Attachments:
    """The gateway that has this server, and the rules by which the next one gets it."""

    def __init__(self, client: EngineClient, epochs: FleetEpochs, url: str) -> None:
        """`url`: the server's HTTP address, for peers."""
        self._client, self._epochs, self._url = client, epochs, url
        self._attaching = asyncio.Lock()
        self._held: GatewayRelay | None = None
        self._streams = 0

    async def serve(
        self,
        attach: Attach,
        read: Callable[[], Awaitable[LinkCommand]],
        write: Callable[[bytes], Awaitable[None]],
    ) -> Ended:
        """Serve a gateway over its stream, see `GatewayRelay`, and return how it ended. `Conflict`
        if it may not attach now.
        """
        async with self._attaching:
            self._check(attach)
            self._epochs.note(attach.fleet, attach.epoch)
            if self._held is not None:
                reason = f"epoch {attach.epoch} of the fleet {attach.fleet} has attached"
                self._held.end(Ended.of(Conflict(reason)))
                await self._held.over.wait()
            self._streams += 1
            relay = GatewayRelay(self._client, attach, f"{self._streams}/", self._url, read, write)
            self._held = relay
        log.info("gateway_attached", gateway=attach.gateway, fleet=attach.fleet, epoch=attach.epoch)
        try:
            return await relay.run()
        finally:
            if self._held is relay:
                self._held = None

    def _check(self, attach: Attach) -> None:
        """Raise `Conflict` if this gateway may not attach now."""
        highest = self._epochs.of(attach.fleet)
        if attach.epoch < highest:
            raise Conflict(
                f"epoch {attach.epoch} of the fleet {attach.fleet} is over, since epoch {highest} "
                "has attached; stop this gateway, or start it again for a higher one"
            )
        holder = self._held.attach if self._held is not None else None
        if holder is not None and holder.fleet != attach.fleet and not attach.take_over:
            raise Conflict(
                f"the server is held by {holder.gateway or 'a gateway'} of the fleet "
                f"{holder.fleet}; stop that one, or start this one with --take-over"
            )

    async def close(self) -> None:
        if self._held is not None:
            self._held.end(Ended.of(Unavailable("the server has stopped")))
            await self._held.over.wait()


class LinkServer:
    """The listener, and what its gRPC streams may do."""

    def __init__(
        self,
        config: Config,
        gate: Gate,
        attachments: Attachments,
        certificates: Watched[Certificates] | None = None,
    ) -> None:
        self._config, self._gate, self._attachments = config, gate, attachments
        self._certificates = certificates
        self._largest = MESSAGE_BYTES_PER_BODY_BYTE * config.max_body_mb * 2**20
        self._largest = min(self._largest, MAX_INT // BEYOND)
        bounds = {
            "grpc.max_receive_message_length": BEYOND * self._largest,
            "grpc.max_concurrent_streams": LINK_CONNECTIONS,
            "grpc.max_allowed_incoming_connections": LINK_CONNECTIONS,
            "grpc.max_connection_age_ms": AGE_MS,
            "grpc.max_connection_age_grace_ms": MAX_INT,  # without end
        }
        self._server = grpc.aio.server(
            options=[*(dict(options_of(config)) | bounds).items()],
            maximum_concurrent_rpcs=LINK_CONNECTIONS,
        )
        stream = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = METHOD.strip("/").split("/")
        handler = grpc.method_handlers_generic_handler(service, {method: stream})
        self._server.add_generic_rpc_handlers([handler])

    async def start(self) -> str:
        """Listen, and return the address with its port. `StartupError` if it cannot be bound."""
        return await listen(self._server, self._config, "link_port", self._certificates)

    async def stop(self) -> None:
        await self._attachments.close()
        await self._server.stop(0)

    async def _serve(self, requests: object, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        token = bearer(str(metadata.get("authorization", "")))

        async def read() -> LinkCommand:
            command = await self._read(context, SILENT_S)
            if isinstance(command, Ping):
                self._gate.admit(token, "link")  # its key may have been removed
            return command

        async def write(message: bytes) -> None:
            try:
                async with asyncio.timeout(SILENT_S):
                    await context.write(message)
            except (TimeoutError, grpc.aio.BaseError):
                raise Cancelled(f"the gateway has read nothing for {SILENT_S:g} s") from None

        try:
            caller = self._gate.admit(token, "link")
            attach = await self._read(context, ATTACH_S)
            if not isinstance(attach, Attach):
                raise InvalidRequest(
                    f"the first command is {type(attach).__name__}; a gateway attaches first"
                )
            with structlog.contextvars.bound_contextvars(key=caller.name):
                ended = await self._attachments.serve(attach, read, write)
        except TltError as error:
            ended = Ended.of(error)
            with contextlib.suppress(Cancelled):
                await write(encode([ended]))
        log.warning("link_ended", code=ended.code, reason=ended.message, peer=context.peer())

    async def _read(self, context: Context, within_s: float) -> LinkCommand:
        """Return the next command. `Cancelled` after the last; a typed error if none comes in time,
        or it is not one.
        """
        try:
            async with asyncio.timeout(within_s):
                data = await context.read()
        except TimeoutError:
            raise RequestTimeout(
                f"no command came for {within_s:g} s; a gateway sends a ping every second"
            ) from None
        if not isinstance(data, bytes):
            raise Cancelled("the gateway has ended the stream")
        if len(data) > self._largest:
            raise TooLarge(
                f"a message has {len(data)} bytes; the limit is {self._largest} "
                f"({MESSAGE_BYTES_PER_BODY_BYTE} x max_body_mb): send fewer requests at once"
            )
        try:
            return decode_link_command(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"a message is not a command of a link: {error}") from None
