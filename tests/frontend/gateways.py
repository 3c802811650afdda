"""A gateway of a fleet in the loop of the server that it attaches to; it collects all events."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, cast

import grpc
import msgspec

from tests.frontend.live_server import LiveServer, live_server
from tlt_server.errors import TltError, from_code
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.link import Death
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.remote import RemoteLink
from tlt_server.frontend.link.replica import Replica
from tlt_server.wire.commands import Command, Submit
from tlt_server.wire.events import ControlReport, Event, Outputs, Ready, WeightReport
from tlt_server.wire.link import METHOD, Attach, Ended, decode_link_events
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput, encode


async def happens(condition: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (another thread may change it)
            await asyncio.sleep(0.005)


class FakeGateway:
    def __init__(self, address: str, *, key: str = "", tls: Any = None, **attach: Any) -> None:
        self.attach = Attach(**({"fleet": "f", "epoch": 1, "gateway": "http://g:8000"} | attach))
        self.events: list[Event] = []
        self.deaths: list[tuple[Death, float | None]] = []
        self.outputs: dict[str, list[StepOutput]] = {}
        self.member, fleet = Member(ReplicaAddress("r", address)), cast(Any, self)
        self.link = RemoteLink(address, lambda: self.attach, fleet, self.member, key=key, tls=tls)

    def take(self, event: Event, replica: Replica) -> None:
        self.events.append(event)
        if isinstance(event, Outputs):
            for output in event.outputs:
                self.outputs.setdefault(output.id, []).append(output)

    def died(
        self,
        replica: Replica,
        death: Death,
        restart_in_s: float | None,
        start_s: float,
        *,
        blames: bool,
    ) -> None:
        self.deaths.append((death, restart_in_s))
        self.blames = blames

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def ready(self, times: int = 1) -> None:
        await happens(lambda: len(self.of(Ready)) >= times)

    async def ask(self, command: Any) -> Any:
        """Send a command, and return its report."""
        assert self.link.send(command)

        def answers() -> list[Any]:
            reports = self.of(WeightReport) + self.of(ControlReport)
            return [report for report in reports if report.id == command.id]

        await happens(answers)
        return answers()[0]

    def submit(self, *requests: GenerateRequest) -> None:
        assert self.link.send(Submit([*requests]))

    def ended(self, *ids: str) -> bool:
        """Return True if the last outputs of all these have come."""
        return all(self.outputs.get(id) and self.outputs[id][-1].finish_reason for id in ids)


@asynccontextmanager
async def attached(
    server: LiveServer, *, ready: bool = True, **options: Any
) -> AsyncIterator[FakeGateway]:
    """Yield a gateway whose link runs; by default it has attached."""
    gateway = FakeGateway(server.link_address, **options)
    task = asyncio.create_task(gateway.link.run())
    try:
        if ready:
            await gateway.ready()
        yield gateway
    finally:
        task.cancel()
        await asyncio.wait({task})


def on_link(
    **options: Any,
) -> Callable[[Callable[[LiveServer], Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run a test that is a coroutine in the loop of a server with a link port."""

    def decorated(test: Callable[[LiveServer], Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @wraps(test)
        def run(model: Path) -> None:
            with live_server(model, link_port=0, **options) as server:
                server.run(test(server), within_s=120)

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY)]
        )
        return run

    return decorated


async def refusal(address: str, *messages: bytes | Command | Attach, key: str = "") -> TltError:
    """Send these messages on a stream of their own, and return the error that ends it. Events
    before that are decoded and dropped.
    """
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(METHOD)(metadata=metadata)
        try:
            with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the stream has ended
                for message in messages:
                    await call.write(message if isinstance(message, bytes) else encode(message))
            async for data in call:
                *_, event = decode_link_events(data)
                if isinstance(event, Ended):
                    return from_code(event.code, event.message)
        except grpc.aio.AioRpcError as failed:
            return TltError(f"{failed.code().name}: {failed.details()}")
    raise AssertionError("the stream ended without an error")


def request(id: str, prompt: list[int], max_tokens: int = 12, **fields: Any) -> GenerateRequest:
    """Return a request that the fake engine ends by its length only."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    made = GenerateRequest(id=id, token_ids=prompt, sampling=sampling, seed=7)
    return msgspec.structs.replace(made, **fields)
