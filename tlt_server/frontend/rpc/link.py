"""The listener for gateways (`--link-port`): the rules of attaching, and the stream of a gateway.

A server has one gateway at a time. Of one fleet an epoch lower than the highest seen is refused, so
that an old gateway that wakes up carries out nothing; a higher one ends the stream before. The
epochs are kept in the state directory. A stream that ends aborts what its gateway has open here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

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
from tlt_server.frontend.rpc.server import BEYOND, MAX_INT, listen, options_of, refuse
from tlt_server.process.private import replace_file
from tlt_server.wire.link import (
    METHOD,
    Attach,
    LinkCommand,
    Ping,
    decode_link_command,
    event_messages,
)

ATTACH_S = 5.0  # time for the first command
SILENT_S = 10.0  # a gateway that sends nothing, or reads nothing, for this long is cut off
IDLE_MS = 10_000  # a connection without a stream for this long is closed
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


class LinkServer(grpc.GenericRpcHandler):
    def __init__(
        self,
        config: Config,
        gate: Gate,
        client: EngineClient,
        url: str,
        certificates: Watched[Certificates] | None = None,
    ) -> None:
        """`url`: the server's HTTP address, for peers."""
        self._config, self._gate, self._client, self._url = config, gate, client, url
        self._certificates = certificates
        self._epochs = FleetEpochs(config.state_dir)
        self._largest = MESSAGE_BYTES_PER_BODY_BYTE * config.max_body_mb * 2**20
        self._largest = min(self._largest, MAX_INT // BEYOND)
        self._attaching = asyncio.Lock()
        self._attached: _Stream | None = None
        self._streams = 0
        bounds = {
            "grpc.max_receive_message_length": BEYOND * self._largest,
            "grpc.max_concurrent_streams": LINK_CONNECTIONS,
            "grpc.max_allowed_incoming_connections": LINK_CONNECTIONS,
            "grpc.max_connection_idle_ms": IDLE_MS,
            "grpc.max_connection_age_ms": MAX_INT,  # never
        }
        self._server = grpc.aio.server(
            options=[*(dict(options_of(config)) | bounds).items()],
            maximum_concurrent_rpcs=LINK_CONNECTIONS,
        )
        self._server.add_generic_rpc_handlers([self])

    async def start(self) -> str:
        """Listen, and return the address with its port. `StartupError` if it cannot be bound."""
        return await listen(self._server, self._config, "link_port", self._certificates)

    async def stop(self) -> None:
        if self._attached is not None:
            await self._attached.end(Unavailable("the server has stopped"))
        await self._server.stop(0)

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if details.method != METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(self._serve)

    async def _serve(self, requests: object, context: Context) -> None:
        try:
            metadata = dict(context.invocation_metadata() or ())
            token = bearer(str(metadata.get("authorization", "")))
            admit = partial(self._gate.admit, token, "link")
            caller = admit()
            attach = await _read(context, ATTACH_S, self._largest)
            if not isinstance(attach, Attach):
                raise InvalidRequest(
                    f"the first command is {type(attach).__name__}; a gateway attaches first"
                )
            async with self._attaching:
                self._check(attach)
                self._epochs.note(attach.fleet, attach.epoch)
                if self._attached is not None:
                    await self._attached.end(
                        Conflict(f"epoch {attach.epoch} of the fleet {attach.fleet} has attached")
                    )
                self._streams += 1
                stream = self._attached = _Stream(
                    context, attach, self._client, self._largest, admit
                )
            known = {name: getattr(attach, name) for name in ("gateway", "fleet", "epoch")}
            log.info("gateway_attached", key=caller.name, **known)
            try:
                await stream.run(self._streams, self._url)
            finally:
                if self._attached is stream:
                    self._attached = None
        except TltError as error:
            log.warning("link_ended", code=error.code, reason=error.message, peer=context.peer())
            await refuse(context, error, [])

    def _check(self, attach: Attach) -> None:
        """Raise `Conflict` if this gateway may not attach now."""
        highest = self._epochs.of(attach.fleet)
        if attach.epoch < highest:
            raise Conflict(
                f"epoch {attach.epoch} of the fleet {attach.fleet} is over, since epoch {highest} "
                "has attached; stop this gateway, or start it again for a higher one"
            )
        holder = self._attached.attach if self._attached is not None else None
        if holder is not None and holder.fleet != attach.fleet and not attach.take_over:
            raise Conflict(
                f"the server is held by {holder.gateway or 'a gateway'} of the fleet "
                f"{holder.fleet}; stop that one, or start this one with --take-over"
            )


class _Stream:
    """The stream of the attached gateway."""

    def __init__(
        self,
        context: Context,
        attach: Attach,
        client: EngineClient,
        largest: int,
        admit: Callable[[], object],
    ) -> None:
        """`admit`: raises an error once the gateway's key is no longer known."""
        self.attach, self._context, self._admit = attach, context, admit
        self._client, self._largest = client, largest
        self._error: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def end(self, error: BaseException) -> None:
        """End the stream with this error, and wait until its sequences are aborted."""
        if not self._error.done():
            self._error.set_exception(error)
        await self._over.wait()

    async def run(self, number: int, url: str) -> None:
        """Carry out commands and send events until the stream ends, which raises its error."""
        relay = GatewayRelay(self._client, self.attach, number, url, self._start)
        self._client.relay = relay
        try:
            # Were it cut off with the first event, no status could follow.
            await self._context.send_initial_metadata(())
            relay.attach()
            for work in (self._listen(relay), self._tell(relay), self._until_draining()):
                self._start(work)
            await self._error
        finally:
            self._client.relay = None
            relay.close()
            for task in self._tasks:
                task.cancel()
            self._over.set()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose error ends the stream."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._error.done():
            self._error.set_exception(error)

    async def _listen(self, relay: GatewayRelay) -> None:
        while True:
            command = await _read(self._context, SILENT_S, self._largest)
            if isinstance(command, Ping):
                self._admit()
            relay.take(command)
            await asyncio.sleep(0)  # what a command starts begins before the next command

    async def _tell(self, relay: GatewayRelay) -> None:
        while True:
            for event in await relay.events():
                for message in event_messages(event):
                    try:
                        async with asyncio.timeout(SILENT_S):
                            await self._context.write(message)
                    except (TimeoutError, grpc.aio.InternalError):
                        raise Cancelled(
                            f"the gateway has read nothing for {SILENT_S:g} s"
                        ) from None

    async def _until_draining(self) -> None:
        while True:
            change = self._client.changes.next
            self._client.check_taking()
            await change.wait()


async def _read(context: Context, within_s: float, largest: int) -> LinkCommand:
    """Return the next command. A typed error if none comes in time, or it is not a command."""
    try:
        async with asyncio.timeout(within_s):
            data = await context.read()
    except TimeoutError:
        raise RequestTimeout(
            f"no command came for {within_s:g} s; a gateway sends a ping every second"
        ) from None
    if not isinstance(data, bytes):
        raise Cancelled("the gateway has ended the stream")
    if len(data) > largest:
        raise TooLarge(
            f"a message has {len(data)} bytes; the limit is {largest} "
            f"({MESSAGE_BYTES_PER_BODY_BYTE} x max_body_mb): send fewer requests at once"
        )
    try:
        return decode_link_command(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"a message is not a command of a link: {error}") from None
