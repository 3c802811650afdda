"""Composition root: puts frontend and engine together and runs them until a signal or a failure.

The engine is a process of its own, `python -m tlt_server.engine.process DIR`: `DIR` holds the sockets `commands` and `events`, both
bound here. Its standard input carries one line, its `EngineSettings` as JSON. The environment for
strict numerics is set here, before the engine imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import structlog
import uvicorn
import uvloop

from tlt_server.config import Config
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.frontend.admission import Admission
from tlt_server.frontend.app import build_app
from tlt_server.frontend.auth import Keys
from tlt_server.frontend.engine_client import EngineClient
from tlt_server.frontend.generation import Service
from tlt_server.frontend.progress import Progress
from tlt_server.frontend.protocol import bounded_protocol
from tlt_server.frontend.text import Text
from tlt_server.frontend.validation import Validator
from tlt_server.metrics import Metrics
from tlt_server.models.environment import library_environment
from tlt_server.seeds import SeedSource, choice_seed

ENGINE = (sys.executable, "-m", "tlt_server.engine.process")
STOP_S = 5.0  # time the engine has to exit before it is killed


def serve(config: Config, *, engine_command: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT (drains, returns 0) or until the engine fails (returns 1). `StartupError` before it is ready."""
    _log_to_stderr(config.log_level)
    return uvloop.run(_serve(config, engine_command or ENGINE))


async def _serve(config: Config, engine_command: Sequence[str]) -> int:
    keys = Keys.read(config.api_key_file) if config.api_key_file is not None else None
    text, metrics, progress = Text.load(config.model), Metrics(), Progress()
    with _listener(config) as listener, tempfile.TemporaryDirectory(prefix="tlt-") as name:  # a directory of mode 0700
        client = EngineClient(Path(name), admission(config), metrics, progress.phase)
        async with _engine(config, engine_command, Path(name)) as process, contextlib.AsyncExitStack() as stack:
            client.start(process.wait())
            service = Service(config, client, text, _validator(config, text, client), metrics)
            server = _Server(uvicorn.Config(
                build_app(service, keys), http=bounded_protocol(config), ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, timeout_graceful_shutdown=int(STOP_S),
            ))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            stack.push_async_callback(_finish, server, serving)
            stack.push_async_callback(client.close)  # first: what is still open ends with a typed error, which `_finish` lets out
            url = _url(config.host, listener)
            progress.listening(url)
            return await _run(config, client, progress, url)


async def _run(config: Config, client: EngineClient, progress: Progress, url: str) -> int:
    """From starting to stopped; the caller tears down."""
    stop, stop_now = _signals()
    stopping, starting = asyncio.create_task(stop.wait()), asyncio.create_task(client.ready())
    done, _ = await asyncio.wait({starting, stopping}, timeout=config.startup_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        raise StartupError(f"the engine was not ready within {config.startup_timeout_s:g} s (startup_timeout_s); raise it, or see above")
    if starting not in done:
        starting.cancel()
        return 0
    gc.collect()
    gc.freeze()  # what was loaded stays; looking through it again would keep every reply waiting for a quarter of a second
    progress.ready(url, config, await starting)
    dying = asyncio.create_task(client.dead.wait())
    await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
    if dying.done():
        return 1
    progress.draining(len(client), config.drain_timeout_s)
    drained = asyncio.create_task(client.drain(config.drain_timeout_s))
    await asyncio.wait({drained, asyncio.create_task(stop_now.wait())}, return_when=asyncio.FIRST_COMPLETED)
    return 0


def admission(config: Config) -> Admission:
    return Admission(max_queue=config.max_queue, max_queue_tokens=config.max_queue_tokens, max_page_forecast=config.max_page_forecast)


def _validator(config: Config, text: Text, client: EngineClient) -> Validator:
    return Validator(config, text, SeedSource().next, choice_seed, client.check_room)


class _Server(uvicorn.Server):
    """Signals are ours: the first one drains, the second one stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    first, second = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: second.set() if first.is_set() else first.set())
    return first, second


async def _finish(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    """Let replies in progress go out, then stop listening."""
    await asyncio.sleep(0.05)
    server.should_exit = True
    await serving


@contextlib.asynccontextmanager
async def _engine(config: Config, command: Sequence[str], directory: Path) -> AsyncIterator[Process]:
    """The engine process. It ignores Ctrl-C, on which the frontend drains; both are in one session, where its niceness counts."""
    environment = {**os.environ, **library_environment(config.numerics)}
    process = await asyncio.create_subprocess_exec(*command, str(directory), stdin=PIPE, env=environment)
    assert process.stdin is not None
    try:
        with contextlib.suppress(ConnectionError):  # it has exited already; the caller learns that from `wait`
            process.stdin.write(msgspec.json.encode(engine_settings(config)) + b"\n")
            await process.stdin.drain()
        yield process
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def engine_settings(config: Config) -> EngineSettings:
    """The engine's part of a resolved configuration."""
    chosen = {name: getattr(config, name, None) for name in EngineSettings.__struct_fields__}
    given = {name: value for name, value in chosen.items() if value not in ("auto", None)}
    paths = {name: str(value.resolve()) for name, value in given.items() if isinstance(value, Path)}
    return EngineSettings(**{**given, **paths, "model": str(config.model), "strategy": config.strategy})


@contextlib.contextmanager
def _listener(config: Config) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            raise StartupError(f"cannot bind {config.host}:{config.port}: {error.strerror}; choose another host or port "
                               "(0 = a free one)") from None
        yield listener


def _url(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _log_to_stderr(level: str) -> None:
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso"),
                    structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
