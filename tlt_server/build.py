"""Composition root: puts frontend and engine together and runs them until a signal or a failure.

The engine is a separate process, `python -m tlt_server.engine.process DIR`: `DIR` has the sockets
`commands` and `events`, bound by the frontend. Its standard input carries one line, its
`EngineSettings` as JSON. The environment for strict numerics is set here, before the engine imports
torch. The supervisor starts such processes, and this module ends with the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import uvloop
from starlette.types import ASGIApp

from tlt_server.config import Config, ResolvedConfig
from tlt_server.engine.settings import EngineSettings, encode_settings
from tlt_server.errors import EngineFailed, StartupError
from tlt_server.frontend.app import build_app
from tlt_server.frontend.generation.generation import Generations
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.generation.validation import Validator
from tlt_server.frontend.http.access import tracing
from tlt_server.frontend.http.auth import Gate
from tlt_server.frontend.http.connections import raise_limit
from tlt_server.frontend.http.keys import Certificates, Watched, watched_certificates
from tlt_server.frontend.http.logs import left_behind, write_logs
from tlt_server.frontend.http.server import FLUSH_S, HttpServer
from tlt_server.frontend.http.slices import watch_turns
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.link import own_directory
from tlt_server.frontend.link.starting import ProgressLines, checked
from tlt_server.frontend.link.supervisor import Supervisor
from tlt_server.frontend.link.trainer import TrainerLink
from tlt_server.frontend.rollouts.owning import owned
from tlt_server.frontend.rollouts.rollouts import Rollouts
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.uploads import uploads_of
from tlt_server.metrics import Metrics
from tlt_server.models.environment import library_environment
from tlt_server.process.garbage import collect_while_few
from tlt_server.process.private import write_no_core_files
from tlt_server.settings.server import SharedSettings
from tlt_server.settings.sources import log_service_links
from tlt_server.training import ACTIVITY, activity_of, rings, trainer_of
from tlt_server.wire.seeds import SeedSource, choice_seed

ENGINE = (sys.executable, "-P", "-m", "tlt_server.engine.process")


def serve(config: ResolvedConfig, *, engine_command: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT (drains, returns 0) or until the engine ends too often (returns
    1). `StartupError` if it fails before it was ready.
    """
    return serve_with(config, partial(_own_engine, engine_command or ENGINE))


class Footing(NamedTuple):
    """The engine, or the engines, that a frontend stands on."""

    client: EngineClient
    run: Callable[[Service], Coroutine[Any, Any, EngineFailed]]  # until none will be left
    trainer: TrainerLink | None = None


Back = Callable[[ResolvedConfig, Path, Metrics, ProgressLines], Footing]


def serve_with(config: ResolvedConfig, back: Back) -> int:
    """Serve on the engines that `back` makes, as `serve` does. It gets the server's own directory,
    which is removed at the end.
    """
    write_logs(config.log_level, config.log_format)
    log_service_links()
    raise_limit(config)
    write_no_core_files()
    return uvloop.run(_serve(config, back))


def _own_engine(
    command: Sequence[str],
    config: ResolvedConfig,
    directory: Path,
    metrics: Metrics,
    progress: ProgressLines,
) -> Footing:
    """Return the backing of a plain server: an engine process, which is supervised."""
    client = EngineClient(admission(config), metrics, activity_of(config, directory))
    launch = partial(_launch, config, command)
    supervisor = Supervisor(config, launch, directory, client, metrics, progress)
    trainer = trainer_of(config, directory, metrics)

    async def run(service: Service) -> EngineFailed:
        if trainer is None:
            return await supervisor.run()
        training = asyncio.create_task(trainer.run(client, service.adoption))
        try:
            return await supervisor.run()
        finally:
            await _cancel(training)

    return Footing(client, run, trainer)


async def _serve(config: ResolvedConfig, back: Back) -> int:
    text, progress = Text.load(config.model), ProgressLines()
    metrics = Metrics(config.aliases, config.served_model_name)
    gate, read = Gate(config, metrics), partial(metrics.exchanges.file_read, "certificates")
    certificates = watched_certificates(config, read)
    asyncio.get_running_loop().set_exception_handler(left_behind)
    if config.state_dir is not None:
        metrics.disk.watch(config.state_dir)
    with (
        listening(config) as listener,
        listening(config, "probe_port") as probes,
        own_directory() as directory,
        owned(config.state_dir or directory) as kept,  # before `back` changes anything there
    ):
        config = config.model_copy(update={"port": listener.getsockname()[1]})
        client, run, trainer = back(config, directory, metrics, progress)
        async with contextlib.AsyncExitStack() as stack:
            begin = await stack.enter_async_context(tracing(config.otlp_endpoint))
            generations = Generations(client, text, metrics)
            rollouts = Rollouts(kept, config, metrics, generations)
            service = Service(
                config,
                client,
                text,
                _validator(config, text, client),
                metrics,
                generations,
                rollouts,
                uploads_of(config),
                trainer,
            )
            await service.exports.clear()
            service.reader.start()
            stack.callback(service.reader.close)
            supervised = asyncio.create_task(run(service))
            stack.push_async_callback(_cancel, supervised)
            signals = _signals()
            await checked(client.replica.start.checked, supervised, signals[0])
            await rollouts.open()
            app = build_app(service, gate, begin)
            grpc_address = await stack.enter_async_context(
                serving_grpc(app, service, gate, certificates)
            )
            url = _url(config, listener)
            link_address = await stack.enter_async_context(
                serving_link(service, gate, url, certificates)
            )
            stack.push_async_callback(_cancel, asyncio.create_task(watch_turns(metrics)))
            stack.push_async_callback(_cancel, asyncio.create_task(collect_while_few()))
            server = HttpServer(app, config, certificates)
            await server.start(listener, probes)
            stack.push_async_callback(_finish, server)
            stack.callback(service.close)  # open requests end with an error, sent by `_finish`
            stack.push_async_callback(rollouts.close)  # before that, where their journals last
            probe_url = _url(config, probes) if probes else ""
            progress.listening(url, grpc_address, probe_url, link_address)
            return await _run(config, client, supervised, rollouts, progress, url, signals)


async def _run(
    config: ResolvedConfig,
    client: EngineClient,
    supervised: asyncio.Task[EngineFailed],
    rollouts: Rollouts,
    progress: ProgressLines,
    url: str,
    signals: tuple[asyncio.Event, asyncio.Event],
) -> int:
    """Run from the start to the stop and return the exit status; the caller tears down.
    `supervised` ends when the engine is gone for good.
    """
    stop, stop_now = signals
    stopping, starting = asyncio.create_task(stop.wait()), asyncio.create_task(client.ready())
    await asyncio.wait({starting, stopping, supervised}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        gc.collect()
        gc.freeze()  # else a collection looks through all of it, and replies wait for 0.25 s
        progress.ready(url, config, starting.result())
        if client.versions.lost:
            progress.lost(client.versions.reason)
    await asyncio.wait({stopping, supervised}, return_when=asyncio.FIRST_COMPLETED)
    starting.cancel()
    if supervised.done():
        supervised.result()  # `StartupError`, if it was never ready
        return 1
    if rollouts.lasting:
        await rollouts.suspend(detached_only=True)
    progress.draining(len(client), config.drain_timeout_s)
    drained = asyncio.create_task(client.drain(config.drain_timeout_s))
    await asyncio.wait(
        {drained, supervised, asyncio.create_task(stop_now.wait())},
        return_when=asyncio.FIRST_COMPLETED,
    )
    return 0


@contextlib.asynccontextmanager
async def serving_grpc(
    app: ASGIApp, service: Service, gate: Gate, certificates: Watched[Certificates] | None
) -> AsyncIterator[str]:
    """Yield the address of the gRPC server, empty without a `grpc_port`. At the end, let calls in
    progress end.
    """
    if service.config.grpc_port is None:
        yield ""
        return
    from tlt_server.frontend.rpc.server import RpcServer

    server = RpcServer(
        app,
        service.config,
        gate,
        service.metrics,
        lambda: service.ready,
        service.engine.changes,
        certificates,
    )
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop(FLUSH_S)


@contextlib.asynccontextmanager
async def serving_link(
    service: Service, gate: Gate, url: str, certificates: Watched[Certificates] | None
) -> AsyncIterator[str]:
    """Yield the address of the listener for gateways, empty without a `link_port`."""
    if service.config.link_port is None:
        yield ""
        return
    from tlt_server.frontend.rpc.link import Attachments, FleetEpochs, LinkServer

    attachments = Attachments(service.engine, FleetEpochs(service.config.state_dir), url)
    server = LinkServer(service.config, gate, attachments, certificates)
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop()


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


def admission(config: Config) -> Admission:
    return Admission(
        max_queue=config.max_queue,
        max_queue_tokens=config.max_queue_tokens,
        max_page_forecast=config.max_page_forecast,
        restart_window_s=config.restart_window_s,
    )


def _validator(config: ResolvedConfig, text: Text, client: EngineClient) -> Validator:
    return Validator(config, text, SeedSource().next, choice_seed, client.check_room)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    first, second = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: second.set() if first.is_set() else first.set()
        )
    return first, second


async def _finish(server: HttpServer) -> None:
    """Send the replies in progress, then stop listening."""
    await asyncio.sleep(0.05)
    await server.stop()


async def _launch(config: Config, command: Sequence[str], directory: Path) -> Process:
    """Start an engine process. It ignores Ctrl-C, since the frontend drains; both are in one
    session, in which its niceness counts.
    """
    environment = {**os.environ, **library_environment(config.numerics)}
    environment.pop(config.api_key_variable, None)  # an engine has no use for keys
    process = await asyncio.create_subprocess_exec(
        *command, str(directory), stdin=PIPE, env=environment
    )
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has exited already, as `wait` tells
        samples, features = rings(config, directory.parent)
        settings = replace(
            engine_settings(config),
            parent=os.getpid(),
            sample_ring=samples,
            feature_ring=features,
            activity=directory.parent / ACTIVITY if samples else None,
        )
        process.stdin.write(encode_settings(settings))
        await process.stdin.drain()
    process.stdin.close()
    return process


def engine_settings(config: Config) -> EngineSettings:
    """Return the engine's part of a configuration, with directories by their absolute paths."""
    shared = {field.name: getattr(config, field.name) for field in fields(SharedSettings)}
    paths = {name: path.resolve() for name, path in shared.items() if isinstance(path, Path)}
    captures = config.drafter_training != "off"
    return EngineSettings(
        **{**shared, **paths, "model": config.model},
        feature_bytes=config.drafter_feature_mb * 2**20 if captures else 0,
        ring_bytes=(config.drafter_ring_mb or 0) * 2**20 if captures else 0,
        link_port=config.link_port,
        peer_tls={
            "ca": str(config.tls_client_ca),
            "cert": str(config.tls_cert),
            "key": str(config.tls_key),
        }
        if config.tls_client_ca
        else {},
    )


@overload
def listening(config: Config) -> AbstractContextManager[socket.socket]: ...


@overload
def listening(
    config: Config, setting: Literal["grpc_port", "link_port", "probe_port"]
) -> AbstractContextManager[socket.socket | None]: ...


@contextlib.contextmanager
def listening(
    config: Config, setting: Literal["port", "grpc_port", "link_port", "probe_port"] = "port"
) -> Iterator[Any]:
    """Yield the bound socket, or None if the setting is. `StartupError`: it cannot be bound."""
    port = getattr(config, setting)
    if port is None:
        yield None
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, port))
        except OSError as error:
            raise StartupError(
                f"cannot bind {config.host}:{port}: {error.strerror}; choose another --host or "
                f"--{setting.replace('_', '-')} (0 = a free one)"
            ) from None
        yield listener


def _url(config: Config, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'http' if config.tls_cert is None else 'https'}://{host}:{listener.getsockname()[1]}"
