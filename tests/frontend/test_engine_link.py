"""One epoch of the engine: when it takes commands."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from tests.frontend.fake_engine import INFO
from tests.waiting import in_loop
from tlt_server.frontend.link import link as link_module
from tlt_server.frontend.link.link import Death, EngineLink
from tlt_server.wire.commands import SetPolicy, decode_command
from tlt_server.wire.events import Event, Ready
from tlt_server.wire.records import encode


class Process:
    """An engine that exits on request."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await self.exited

    def kill(self) -> None:
        self.exited.set_result(-9)


@in_loop
async def test_a_ready_engine_takes_commands_from_its_listeners(tmp_path: Path) -> None:
    """The link's two sockets connect in any order; here the commands' comes long after the
    events'.
    """
    received: list[object] = []
    sent: list[bool] = []
    link, process = EngineLink(tmp_path, startup_timeout_s=60, hang_timeout_s=60), Process()
    context = zmq.asyncio.Context()
    events, commands = context.socket(zmq.PUSH), context.socket(zmq.PULL)

    def take(event: Event) -> None:
        sent.append(link.send(SetPolicy("off")))

    living = asyncio.create_task(link.run(process, take))
    events.connect(f"ipc://{tmp_path}/events")
    await events.send(encode(Ready(INFO)))
    await asyncio.sleep(0.2)
    assert sent == []
    commands.connect(f"ipc://{tmp_path}/commands")
    received.append(decode_command(await asyncio.wait_for(commands.recv(), 30)))
    process.exited.set_result(0)
    assert (await living).ending == "exited"
    context.destroy(linger=0)
    link.close()
    assert sent == [True] and received == [SetPolicy("off")]


@pytest.mark.parametrize(
    ("sent", "reason"), [(signal.SIGSTOP, "SIGSTOP"), (signal.SIGCONT, "startup_timeout_s")]
)
def test_a_stopped_engine_is_killed_sooner_than_a_silent_one(
    sent: signal.Signals, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "STOPPED_S", 0.2)

    async def run() -> Death:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        process.send_signal(sent)
        link = EngineLink(tmp_path, startup_timeout_s=1.0, hang_timeout_s=60)
        death = await link.run(process, lambda event: None)
        link.close()
        assert process.returncode == -signal.SIGKILL
        return death

    death = asyncio.run(run())
    assert death.ending == "hung" and reason in death.error.message
