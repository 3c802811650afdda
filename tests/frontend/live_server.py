"""A whole frontend over real sockets, in a thread, before a `FakeEngine` that is a new one in each
epoch.
"""

import asyncio
import io
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import uvloop
from starlette.types import ASGIApp

from tests.frontend.fake_engine import FakeEngine
from tlt_client import Client
from tlt_server.build import Footing, admission, listening, serving_grpc, serving_link
from tlt_server.config import Config, ResolvedConfig
from tlt_server.errors import EngineFailed
from tlt_server.frontend.app import build_app
from tlt_server.frontend.generation.generation import Generations
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.generation.validation import Validator
from tlt_server.frontend.http.access import tracing
from tlt_server.frontend.http.auth import Gate
from tlt_server.frontend.http.keys import watched_certificates
from tlt_server.frontend.http.server import HttpServer
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.link import EngineProcess
from tlt_server.frontend.link.starting import ProgressLines
from tlt_server.frontend.link.supervisor import Supervisor
from tlt_server.frontend.rollouts.owning import owned
from tlt_server.frontend.rollouts.rollouts import Rollouts
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.uploads import uploads_of
from tlt_server.metrics import Metrics
from tlt_server.training import activity_of, trainer_of

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


class FakeProcess:
    """A fake engine, to the supervisor a process."""

    pid = os.getpid()

    def __init__(self, engine: FakeEngine) -> None:
        self._running = asyncio.create_task(engine.run())

    async def wait(self) -> int:
        await asyncio.wait({self._running})
        return -9 if self._running.cancelled() else self._running.result()

    def kill(self) -> None:
        self._running.cancel()


class LiveServer:
    def __init__(
        self,
        model: Path,
        directory: Path,
        engine: dict[str, Any],
        settings: dict[str, Any],
        *,
        apart: bool = False,
    ) -> None:
        """`apart`: the engine is a process, so that the loop is the server's alone."""
        self.config = Config(model=model, port=0, **settings).checked().resolved()
        self.directory, self._engine_options, self._apart = directory, engine, apart
        self.started = threading.Event()
        self.url = self.grpc_address = self.link_address = self.probe_url = ""
        self.engines: list[FakeEngine] = []  # one per epoch
        self.said = io.StringIO()
        self.may_launch = asyncio.Event()
        self.may_launch.set()
        self.client: EngineClient
        self.text: Text
        self.rollouts: Rollouts
        self.app: ASGIApp
        self.supervisor: Supervisor
        self.service: Service
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self.started.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` in the server's loop."""

        async def run() -> Any:
            return function()

        return self.run(run())

    def run(self, work: Coroutine[Any, Any, Any], within_s: float = 30) -> Any:
        """Return the result of a coroutine that runs in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def back(self, config: ResolvedConfig, metrics: Metrics) -> Footing:
        """Return what the frontend stands on: a fake engine, which is supervised."""
        client = EngineClient(admission(config), metrics, activity_of(config, self.directory))
        self.supervisor = Supervisor(
            config, self._launch, self.directory, client, metrics, ProgressLines(self.said)
        )
        trainer = trainer_of(config, self.directory, metrics)

        async def run(service: Service) -> EngineFailed:
            if trainer is None:
                return await self.supervisor.run()
            training = asyncio.create_task(trainer.run(client, service.adoption))
            try:
                return await self.supervisor.run()
            finally:
                training.cancel()
                await asyncio.wait({training})

        return Footing(client, run, trainer)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        update = {"port": listener.getsockname()[1]}
        config = self.config = self.config.model_copy(update=update)
        text = Text.load(config.model)
        metrics = Metrics(config.aliases, config.served_model_name)
        self.text = text
        owning = ExitStack()
        kept = owning.enter_context(owned(config.state_dir or self.directory))
        self.client, run, trainer = self.back(config, metrics)
        seeds = itertools.count(1000)
        validator = Validator(
            config,
            text,
            lambda: next(seeds),
            lambda seed, i: seed + i * 10**6,
            self.client.check_room,
        )
        generations = Generations(self.client, text, metrics)
        self.rollouts = Rollouts(kept, config, metrics, generations)
        service = self.service = Service(
            config,
            self.client,
            text,
            validator,
            metrics,
            generations,
            self.rollouts,
            uploads_of(config),
            trainer,
        )
        supervised = asyncio.create_task(run(service))
        await self.rollouts.open()
        gate, certificates = Gate(config, metrics), watched_certificates(config)
        async with AsyncExitStack() as stack:
            begin = await stack.enter_async_context(tracing(config.otlp_endpoint))
            self.app = build_app(service, gate, begin)
            stack.enter_context(listener)
            self.url = f"{'http' if certificates is None else 'https'}://127.0.0.1:{config.port}"
            self.grpc_address = await stack.enter_async_context(
                serving_grpc(self.app, service, gate, certificates)
            )
            self.link_address = await stack.enter_async_context(
                serving_link(service, gate, self.url, certificates)
            )
            server = HttpServer(self.app, config, certificates)
            probes = stack.enter_context(listening(config, "probe_port"))
            await server.start(listener, probes)
            if probes is not None:
                self.probe_url = (
                    f"{self.url.partition('://')[0]}://127.0.0.1:{probes.getsockname()[1]}"
                )
            await self.ready()
            self.started.set()
            await self._stop.wait()
            await self.rollouts.close()
            owning.close()
            service.close()
            await server.stop()
            supervised.cancel()
            with suppress(asyncio.CancelledError):
                await supervised  # a bug of the supervisor fails the test

    async def ready(self) -> None:
        await self.client.ready()

    async def _launch(self, directory: Path) -> EngineProcess:
        await self.may_launch.wait()
        if self._apart:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, FAKE_ENGINE, json.dumps(self._engine_options), directory),
                stdin=asyncio.subprocess.DEVNULL,
            )
        self.engines.append(FakeEngine(directory, **self._engine_options))
        return FakeProcess(self.engine)

    @property
    def engine(self) -> FakeEngine:
        """The engine of the last epoch."""
        return self.engines[-1]


BUILD: list[type[LiveServer]] = [LiveServer]  # the last one: what `live_server` starts


@contextmanager
def live_server(
    model: Path,
    *,
    engine: dict[str, Any] | None = None,
    apart: bool = False,
    keys: str = "",
    **settings: Any,
) -> Iterator[LiveServer]:
    """`keys` is the content of the server's file of keys; without it, the server asks for none."""
    with TemporaryDirectory(prefix="tlt-") as directory:
        if keys:
            settings["api_key_file"] = Path(directory, "keys")
            settings["api_key_file"].write_text(keys)
        build = LiveServer if "link_port" in settings else BUILD[-1]
        server = build(model, Path(directory), engine or {}, settings, apart=apart)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def server_and_client(model: Path, **options: Any) -> Iterator[tuple[LiveServer, Client]]:
    """Yield a live server with these options, and a client of it that waits for 40 s."""
    with live_server(model, **options) as server, Client(server.url, timeout_s=40) as client:
        yield server, client


def serving(*, scope: Literal["module", "function"] = "module", **options: Any) -> Any:
    """Return a fixture: a live server with these options, for a file or for each of its tests."""

    @pytest.fixture(scope=scope)
    def serve(model: Path) -> Iterator[LiveServer]:
        with live_server(model, **options) as running:
            yield running

    return serve
