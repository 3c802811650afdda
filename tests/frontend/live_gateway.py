"""A gateway over live servers with fake engines, for tests of whole fleets without processes."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.frontend.fake_engine import FakeEngine
from tests.frontend.live_server import BUILD, LiveServer, live_server
from tlt_server.build import Footing
from tlt_server.config import ResolvedConfig
from tlt_server.fleet.gateway import gateway
from tlt_server.fleet.launchers.plan import FleetPlan
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.starting import ProgressLines
from tlt_server.metrics import Metrics

RECORDED = ("submitted", "aborted", "controls", "policies", "weight_commands")
SHARED = ("drafter", "model_name")  # settings that the replicas get, too


class Given:
    """A launcher of servers that run already."""

    def __init__(self, addresses: dict[str, str]) -> None:
        """`addresses`: of links, by name; may change before `tell`."""
        self.addresses = addresses
        self.tell: Callable[[], None] = lambda: None

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        self.tell = lambda: found([ReplicaAddress(*each) for each in self.addresses.items()])
        self.tell()
        await asyncio.Event().wait()

    def check(self, more: int = 0) -> None:
        """Any number can be started."""

    async def start(self) -> str:
        raise AssertionError("nothing is started")

    async def stop(self, name: str) -> None:
        del self.addresses[name]
        self.tell()

    async def restart(self, name: str) -> None:
        self.tell()


class LiveGateway(LiveServer):
    """A gateway over replicas of its own, each with an engine of the same options."""

    number = 3

    def __init__(
        self, model: Path, directory: Path, engine: Any, settings: Any, *, apart: bool = False
    ) -> None:
        super().__init__(model, directory, engine, settings)
        self._stack = ExitStack()
        lists = {} if apart else {name: [] for name in RECORDED}
        options: Any = {"engine": engine | lists, "apart": apart, "link_port": 0}
        shared = {name: value for name, value in settings.items() if name in SHARED}
        self.replicas = [
            self._stack.enter_context(live_server(model, **options, **shared))
            for _ in range(self.number)
        ]
        links = {f"r{i}": each.link_address for i, each in enumerate(self.replicas)}
        self.launcher = Given(links)

    @property
    def engine(self) -> FakeEngine:
        """One engine; its lists have what all were asked."""
        return self.replicas[0].engine

    def stop(self) -> None:
        super().stop()
        self._stack.close()

    def back(self, config: ResolvedConfig, metrics: Metrics) -> Footing:
        progress = ProgressLines(self.said)
        return gateway(self.launcher, FleetPlan(config), config, self.directory, metrics, progress)

    async def ready(self) -> None:
        """Wait until all replicas are used, and forget what they were asked for that."""
        await self.client.ready()
        assert self.client.fleet is not None
        while any(each.state != "ready" for each in self.client.fleet.status()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for replica in self.replicas:
            replica.engine.weight_commands.clear()


@contextmanager
def live_gateway(model: Path, **options: Any) -> Iterator[LiveGateway]:
    """Yield a gateway, with the options of `live_server`."""
    BUILD.append(LiveGateway)
    try:
        with live_server(model, **options) as server:
            assert isinstance(server, LiveGateway)
            yield server
    finally:
        BUILD.pop()


def behind_a_gateway(module: ModuleType, *without: str, replicas: int = 3) -> dict[str, Any]:
    """Return the tests and fixtures of a module, whose servers are then gateways. `without`: tests
    of what one engine was asked, and in which order.
    """

    class OfSize(LiveGateway):
        number = replicas

    @pytest.fixture(scope="module", autouse=True)
    def fronted() -> Iterator[None]:
        BUILD.append(OfSize)
        yield
        BUILD.pop()

    named = {
        name: value
        for name, value in vars(module).items()
        if (name.startswith("test_") and name not in without)
        or type(value).__name__ == "FixtureFunctionDefinition"
    }
    return {**named, "fronted": fronted}
