"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.waiting import until
from tlt_kernels.parents import bound

SERVING = """
import signal, sys, time
from tlt_server.demo import server
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
said = "import sys, time; print('tlt: ready at once', file=sys.stderr, flush=True); time.sleep(60)"
server.COMMAND = (sys.executable, "-c", said)
with server.ServerProcess() as running:
    print(running.process.pid, flush=True)
    time.sleep(60)
"""


FORKS = """
from tlt_server.process.threads import prepare_grpc
prepare_grpc()
import asyncio, collections, grpc.aio, os, uvloop
async def answer(request, context):
    return request
async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    method = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", {"M": method}),))
    await server.start()
    call = grpc.aio.insecure_channel(f"127.0.0.1:{port}").unary_unary("/S/M")
    async def ask():
        while True:
            await call(b"x")
    asking = [asyncio.create_task(ask()) for _ in range(4)]
    ends = collections.Counter()
    for _ in range(200):
        ends[await (await asyncio.create_subprocess_exec("true")).wait()] += 1
    print(dict(ends), flush=True)
    os._exit(0)
uvloop.run(main())
"""


@pytest.mark.slow
def test_children_of_a_process_with_grpc_do_not_crash() -> None:
    """One in fifty crashed before it became its program, as gRPC's threads ran on in it."""
    assert processes.completed([sys.executable, "-c", FORKS]).stdout == "{0: 200}\n"


def test_server_ends_when_its_caller_is_killed() -> None:
    """The caller ignores and blocks the signal by which the server ends."""
    with subprocess.Popen([sys.executable, "-c", SERVING], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        server = caller.stdout.readline().decode().strip()
        assert b"ready at once" in processes.command(server)
        caller.kill()
    until(lambda: not processes.command(server))


def test_bound_command_keeps_process_arguments_and_status() -> None:
    said = "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)"
    command = bound([sys.executable, "-c", said, "a b", "--flag"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate(timeout=60)[0] == f"{process.pid} a b --flag\n"
    assert process.returncode == 7


def test_command_of_an_ended_caller_is_not_run() -> None:
    *python, pid = bound([])
    assert pid == str(os.getpid())
    for parent, status in ((pid, 7), ("0", 0)):
        command = [*python, parent, sys.executable, "-c", "import sys; sys.exit(7)"]
        assert subprocess.run(command, timeout=60).returncode == status


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("tlt_server.engine.process", []),
        ("tlt_server.engine.ranks.rank", ["0", str(os.getpid())]),
        ("tlt_server.trainer.process.main", []),
        ("tlt_server.frontend.reading_process", []),
        ("tlt_server.frontend.reading_process.templates", []),
    ],
)
def test_a_process_ignores_ctrl_c_before_it_imports_libraries(
    module: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text(
        "import os, signal\nos._exit(3 if signal.getsignal(2) is signal.SIG_IGN else 4)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    command = [sys.executable, "-P", "-m", module, *arguments]
    assert subprocess.run(command, timeout=60, check=False).returncode == 3
