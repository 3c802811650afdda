"""Launchers: replicas that are started here, kept running and ended, with a small program in place
of `tlt serve`; and replicas at addresses.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.contextvars import bound_contextvars, get_contextvars

from tests import processes
from tests.unit.small_fleet import settle
from tests.waiting import in_loop, until
from tlt_server.config import Config
from tlt_server.errors import Conflict, NotFound, StartupError
from tlt_server.fleet.launchers import child, local, ray, static
from tlt_server.fleet.launchers.child import Change, StartedReplicas
from tlt_server.fleet.launchers.local import local as local_launcher
from tlt_server.fleet.launchers.plan import FleetPlan
from tlt_server.fleet.launchers.static import Static
from tlt_server.frontend.link.launching import Launcher, ReplicaAddress

# Says where it listens, by a port that is its pid; `--threads 7` in its flags ends it at once.
SERVER = """
import json, os, sys, time
def say(line): print(line, file=sys.stderr, flush=True)
if sys.argv[sys.argv.index("--threads") + 1] == "7":
    say("tlt: there is no config.json; name a model")
    sys.exit(2)
say("x" * 2**21)
say(json.dumps({"event": "seen", "flags": sys.argv[1:], "variables": dict(os.environ)}))
say(f"tlt: listening on 127.0.0.1:{os.getpid()} for a gateway")
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "COMMAND", (sys.executable, "-c", SERVER))
    monkeypatch.setattr(local, "visible_gpus", lambda: [])


def plan(tmp_path: Path, number: int = 2, flags: Sequence[str] = (), **given: Any) -> FleetPlan:
    fields = {name: given.pop(name) for name in ("addresses", "ray_labels") if name in given}
    config = Config(model=tmp_path, **given)
    return FleetPlan(config, flags, "the-key", replicas=number, **fields)


class Seen:
    """The addresses that a launcher has found."""

    def __init__(self) -> None:
        self.addresses: Sequence[ReplicaAddress] = ()
        self.every: list[Sequence[ReplicaAddress]] = []
        self._changed = asyncio.Event()

    def __call__(self, addresses: Sequence[ReplicaAddress]) -> None:
        self.addresses = addresses
        self.every.append(addresses)
        self._changed.set()

    async def until(self, condition: Callable[[dict[str, ReplicaAddress]], object]) -> None:
        async with asyncio.timeout(240):
            while not condition({each.name: each for each in self.addresses}):
                self._changed.clear()
                await self._changed.wait()

    def pid(self, name: str) -> int:
        (link,) = [each.link for each in self.addresses if each.name == name]
        return int(link.rpartition(":")[2])


@asynccontextmanager
async def running(launcher: Launcher):  # type: ignore[no-untyped-def]
    seen = Seen()
    task = asyncio.create_task(launcher.run(seen))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait({task})


def all_linked(found: dict[str, ReplicaAddress]) -> bool:
    return bool(found) and all(address.link for address in found.values())


def ended(pid: int) -> bool:
    return not processes.command(str(pid))


@in_loop
async def test_local_replicas_get_flags_directory_key_and_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLT_PORT", "8000")
    monkeypatch.setenv("TLT_MAX_QUEUE", "5")
    asked = plan(tmp_path, 2, ["--max-n", "3"], state_dir=tmp_path / "state")
    async with running(local_launcher(asked)) as seen:
        await seen.until(all_linked)
        pids = [seen.pid("r0"), seen.pid("r1")]
    said = capfd.readouterr().err.splitlines()
    assert all(ended(pid) for pid in pids)
    for name, pid in zip(("r0", "r1"), pids, strict=True):
        (line,) = [line for line in said if line.startswith(f'{{"replica":"{name}"')]
        directory = tmp_path / "state" / "replicas" / name
        assert '"--max-n", "3", "--threads"' in line and f'"--state-dir", "{directory}"' in line
        assert '"--port", "0", "--link-port", "0", "--api-key-variable", "FLEET_KEY"' in line
        assert '"FLEET_KEY": "the-key scopes=link name=gateway"' in line
        assert '"TLT_MAX_QUEUE"' in line and '"TLT_PORT"' not in line
        assert f"{name} | tlt: listening on 127.0.0.1:{pid} for a gateway" in said
        assert directory.stat().st_mode & 0o777 == 0o700


@in_loop
async def test_killed_replica_starts_again_in_its_directory(tmp_path: Path) -> None:
    async with running(local_launcher(plan(tmp_path, 2, state_dir=tmp_path))) as seen:
        await seen.until(all_linked)
        killed, other = seen.pid("r0"), seen.pid("r1")
        os.kill(killed, 9)
        await seen.until(lambda found: all_linked(found) and seen.pid("r0") != killed)
        assert seen.pid("r1") == other
        without_link = [each[0] for each in seen.every if each[0].fault.startswith("its server")]
    assert [each.link for each in without_link] == [""]
    assert without_link[0].fault.startswith("its server was ended by SIGKILL: listening on")
    assert without_link[0].fault.endswith("started again in 0 s")


@in_loop
async def test_replicas_are_stopped_started_and_restarted_by_name(tmp_path: Path) -> None:
    launcher = local_launcher(plan(tmp_path, 2))
    async with running(launcher) as seen:
        await seen.until(all_linked)
        first, second = seen.pid("r0"), seen.pid("r1")
        await launcher.stop("r0")
        assert ended(first) and [each.name for each in seen.addresses] == ["r1"]
        await launcher.restart("r1")
        assert ended(second)
        assert [await launcher.start(), await launcher.start()] == ["r0", "r2"]
        await seen.until(lambda found: len(found) == 3 and all_linked(found))
        for call in (launcher.stop, launcher.restart):
            with pytest.raises(NotFound, match="no replica 'r7' runs"):
                await call("r7")
    assert all(ended(seen.pid(each.name)) for each in seen.addresses if each.link)


@in_loop
async def test_local_launcher_divides_the_visible_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "visible_gpus", lambda: ["0", "GPU-5", "2", "3", "7"])
    launcher = local_launcher(plan(tmp_path, 2, ["--threads", "1"], tensor_parallel=2))
    async with running(launcher) as seen:
        await seen.until(all_linked)
        assert [each.place for each in seen.addresses] == ["GPU 0, GPU-5", "GPU 2, 3"]
        launcher.check()
        for more in (1, 2):
            with pytest.raises(Conflict, match=f"{more + 2} replicas of 2 GPUs each need"):
                launcher.check(more)
        with pytest.raises(Conflict, match="3 replicas of 2 GPUs each need 6, and 5 are visible"):
            await launcher.start()
        await launcher.restart("r1")
        await seen.until(all_linked)
        assert seen.addresses[1].place == "GPU 2, 3"
    said = capfd.readouterr().err
    assert all(f'"CUDA_VISIBLE_DEVICES": "{gpus}"' in said for gpus in ("0,GPU-5", "2,3"))


@pytest.mark.parametrize(
    ("given", "gpus", "need"),
    [
        ({"tensor_parallel": 2}, ["0", "1", "2"], "2 GPUs each need 4, and 3 are visible"),
        ({"device": "cuda"}, [], "1 GPUs each need 2, and 0 are visible"),
        ({"drafter_training": "device"}, ["0", "1"], "2 GPUs each need 4, and 2 are visible"),
    ],
)
def test_too_few_gpus_are_refused_before_a_start(
    given: dict[str, Any],
    gpus: list[str],
    need: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "visible_gpus", lambda: gpus)
    with pytest.raises(StartupError, match=f"2 replicas of {need}; lower --replicas"):
        local_launcher(plan(tmp_path, 2, **given))


def test_replicas_on_the_cpu_are_bounded_by_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "available_processors", lambda: 2)
    for given in ({}, {"device": "cpu"}):
        assert local_launcher(plan(tmp_path, 8, **given))
        with pytest.raises(StartupError, match="2 processors take 8 replicas, not 9; lower"):
            local_launcher(plan(tmp_path, 9, **given))


@in_loop
async def test_user_error_of_the_first_start_ends_the_launcher(tmp_path: Path) -> None:
    launcher = local_launcher(plan(tmp_path, 2, ["--threads", "7"], threads=7))
    with pytest.raises(StartupError, match="replica r.: its server ended with status 2: there is"):
        await launcher.run(Seen())


@in_loop
async def test_later_fault_of_a_replica_leaves_the_others_running() -> None:
    """A fault need not be a `StartupError`: a call to Ray may fail."""
    faults: list[Exception] = [RuntimeError("no answer"), StartupError("no config.json")]

    async def live(name: str, change: Change) -> str:
        if name == "r1" and faults:
            raise faults.pop(0)
        change(link=f"{name}:1", fault="")
        return await asyncio.Future()

    launcher = StartedReplicas(1, live, lambda number: "")
    async with running(launcher) as seen:
        await seen.until(all_linked)
        await launcher.start()
        await seen.until(lambda found: len(found) == 2 and all_linked(found))
        told = {found[1].fault for found in seen.every if len(found) == 2}
        assert all(found[0].link == "r0:1" for found in seen.every[2:])
    no_answer = "it could not be started: RuntimeError: no answer | started again in 0 s"
    assert {no_answer, "no config.json | started again in 0.5 s"} < told


@in_loop
async def test_orders_to_one_replica_wait_for_each_other() -> None:
    began, may_end = list[str](), asyncio.Event()

    async def live(name: str, change: Change) -> str:
        began.append(name)
        change(link=f"{name}:1", fault="")
        try:
            return await asyncio.Future()
        finally:
            await may_end.wait()

    launcher = StartedReplicas(2, live, lambda number: "")
    async with running(launcher) as seen:
        await seen.until(all_linked)
        orders = [launcher.restart("r0"), launcher.restart("r0"), launcher.stop("r0")]
        tasks = [asyncio.create_task(order) for order in orders]
        await settle()
        await launcher.start()  # an order to another one does not wait
        may_end.set()
        await asyncio.gather(*tasks)
        assert [each.name for each in seen.addresses] == ["r1", "r2"]
    assert began.count("r1") == 1 and began[:2] == ["r0", "r1"]


@in_loop
async def test_replica_starts_in_the_place_of_one_that_ends() -> None:
    began, may_end = list[str](), asyncio.Event()

    async def live(name: str, change: Change) -> str:
        began.append(name)
        change(link=f"{name}:1", fault="")
        try:
            return await asyncio.Future()
        finally:
            await may_end.wait()

    launcher = StartedReplicas(2, live, lambda number: "it is full" if number > 2 else "")
    async with running(launcher) as seen:
        await seen.until(all_linked)
        stop = asyncio.create_task(launcher.stop("r0"))
        try:
            await settle()
            assert await launcher.start() == "r0" and began == ["r0", "r1"]
            with pytest.raises(Conflict, match="it is full"):
                await launcher.start()
        finally:
            may_end.set()
        await stop
        await seen.until(lambda found: len(found) == 2 and all_linked(found))
        assert ["r1"] in [[each.name for each in found] for found in seen.every[4:]]
    assert began == ["r0", "r1", "r0"]


@in_loop
async def test_replicas_do_not_log_the_request_that_started_them() -> None:
    fields: list[dict[str, Any]] = []

    async def live(name: str, change: Change) -> str:
        fields.append(get_contextvars())
        change(link=f"{name}:1", fault="")
        return await asyncio.Future()

    launcher = StartedReplicas(1, live, lambda number: "")
    async with running(launcher) as seen:
        await seen.until(all_linked)
        with bound_contextvars(request_id="a"):
            await launcher.start()
            await launcher.restart("r0")
        await seen.until(all_linked)
        await settle()
    assert fields == [{}] * 3


GATEWAY = """
import asyncio, sys
from pathlib import Path
from tests.unit.test_launchers import SERVER, child, plan
from tlt_server.fleet.launchers.local import local
child.COMMAND = (sys.executable, "-c", SERVER)
def found(addresses):
    if all(each.link for each in addresses):
        print(addresses[0].link, flush=True)
asyncio.run(local(plan(Path(sys.argv[1]), 1, state_dir=Path(sys.argv[1]))).run(found))
"""


def test_replica_ends_with_a_killed_gateway(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GATEWAY, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as gateway:
        assert gateway.stdout is not None
        server = int(gateway.stdout.readline().rpartition(b":")[2])
        assert not ended(server)
        gateway.kill()
    until(lambda: ended(server))


def test_start_ends_servers_of_the_same_directory_only(tmp_path: Path) -> None:
    asked = plan(tmp_path, 1, state_dir=tmp_path)
    waits = [sys.executable, "-c", "import time; time.sleep(600)", "--state-dir"]
    same, other = (subprocess.Popen([*waits, f"{asked.directory('r0')}{end}"]) for end in ("", "0"))
    try:
        asyncio.run(run_until_linked(local_launcher(asked)))
        assert same.wait() == -9 and other.poll() is None
    finally:
        other.kill()
        other.wait()


async def run_until_linked(launcher: Launcher) -> None:
    async with running(launcher) as seen:
        await seen.until(all_linked)


def test_server_that_cannot_be_ended_refuses_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "END_S", 0.0)
    monkeypatch.setattr(child, "servers_of", lambda directory: [2**22 + 1])
    with pytest.raises(StartupError, match="process 4194305 serves from .* and does not end; end"):
        child.end_servers(tmp_path)


# addresses


def static_launcher(tmp_path: Path, addresses: str, **given: Any) -> Static:
    return Static(plan(tmp_path, 0, addresses=addresses, **given))


@in_loop
async def test_static_launcher_reports_its_addresses_and_starts_nothing(tmp_path: Path) -> None:
    launcher = static_launcher(tmp_path, "10.0.0.5:8002, host-1.example:8002,[fd00::1]:9")
    names = ["10.0.0.5:8002", "host-1.example:8002", "[fd00::1]:9"]
    async with running(launcher) as seen:
        await seen.until(all_linked)
        assert seen.addresses == [ReplicaAddress(name, name) for name in names]
    orders: list[Awaitable[Any]] = [launcher.start(), launcher.stop("a"), launcher.restart("a")]
    for order in orders:
        with pytest.raises(Conflict, match="the launcher static starts and ends no server"):
            await order
    with pytest.raises(Conflict, match="drain a replica before its server ends"):
        launcher.check()


@pytest.mark.parametrize(
    ("addresses", "says"),
    [
        ("a:1,b:2,A:1", "names A:1 twice"),
        (",", "names 0 replicas"),
        ("a", "names 'a'; an address is HOST:PORT"),
        ("a:0", "names 'a:0'"),
        ("a:65536", "names 'a:65536'"),
        ("a b:1", "names 'a b:1'"),
        ("http://a:1", "names 'http://a:1'"),
        ("dns:tlt-pods", "names 'tlt-pods'"),
        ("file:/nowhere/at-all", "cannot read --addresses /nowhere/at-all: FileNotFoundError"),
        ("127.0.0.1:8000", "names 127.0.0.1:8000, which is the gateway's own address"),
        ("localhost:9000", "names localhost:9000, which is the gateway's own address"),
    ],
)
def test_unusable_addresses_are_refused_before_traffic(
    addresses: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=says):
        static_launcher(tmp_path, addresses, port=8000, grpc_port=9000)


def test_gateway_on_all_addresses_refuses_its_loopback_address(tmp_path: Path) -> None:
    given = {"port": 8000, "host": "0.0.0.0", "api_key_variable": "KEYS"}
    with pytest.raises(StartupError, match="own address"):
        static_launcher(tmp_path, "localhost:8000", **given)
    assert static_launcher(tmp_path, "10.0.0.7:8000", **given)


@in_loop
async def test_file_of_addresses_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "LOOK_S", 0.01)
    file = tmp_path / "addresses"
    file.write_text("# two\na:1\n\nb:2\n")
    async with running(static_launcher(tmp_path, f"file:{file}")) as seen:
        await seen.until(lambda found: [*found] == ["a:1", "b:2"])
        file.write_text("a:1\nb:\n")  # unusable, so the content before stays
        file.write_text("b:2\nc:3\n")
        await seen.until(lambda found: [*found] == ["b:2", "c:3"])


@in_loop
async def test_dns_name_is_resolved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "LOOK_S", 0.0)
    answers: list[list[str] | None] = [None, ["10.0.0.9", "10.0.0.8"], None, ["fd00::1"]]

    async def resolve(host: str, port: int, type: int) -> list[Any]:
        assert (host, port, type) == ("tlt-pods", 8002, socket.SOCK_STREAM)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            raise OSError(socket.EAI_NONAME, "no address")
        return [(0, 0, 0, "", (ip, port)) for ip in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    async with running(static_launcher(tmp_path, "dns:tlt-pods:8002")) as seen:
        await seen.until(lambda found: "[fd00::1]:8002" in found)
    assert [[each.link for each in found] for found in seen.every] == [
        [],
        ["10.0.0.8:8002", "10.0.0.9:8002"],
        ["[fd00::1]:8002"],
    ]


# ray, without a cluster: tests/e2e/test_ray.py has one


def node(address: str = "10.0.0.1", labels: Any = None, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "Labels": labels or {}, "Resources": resources}


NODES = [node(CPU=8, GPU=4), node(CPU=64, GPU=8, labels={"kind": "h200"}), node(CPU=16)]


@pytest.mark.parametrize(
    ("given", "labels", "bundle", "fit"),
    [
        ({}, {}, {"CPU": 4, "GPU": 1}, 2 + 8),
        ({"tensor_parallel": 2}, {}, {"CPU": 5, "GPU": 2}, 1 + 4),
        ({"tensor_parallel": 8}, {}, {"CPU": 11, "GPU": 8}, 1),
        ({}, {"kind": "h200"}, {"CPU": 4, "GPU": 1}, 8),
        ({}, {"kind": "in(h200,h100)"}, {"CPU": 4, "GPU": 1}, 10),
        ({"tensor_parallel": 8}, {"kind": "b200"}, {"CPU": 11, "GPU": 8}, 0),
        ({"device": "cpu"}, {}, {"CPU": 4}, 2 + 16 + 4),
    ],
)
def test_ray_replicas_fit_on_single_nodes(
    given: dict[str, Any], labels: dict[str, str], bundle: Any, fit: int, tmp_path: Path
) -> None:
    assert ray.bundle_of(plan(tmp_path, 2, **given), NODES) == bundle
    assert ray.room(NODES, bundle, labels) == fit


def test_cluster_without_gpus_gets_replicas_on_the_cpu(tmp_path: Path) -> None:
    assert ray.bundle_of(plan(tmp_path, 2)._replace(replica_cpus=2), [node(CPU=8)]) == {"CPU": 2}


def test_open_cluster_without_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("", "disabled"):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        ray.check_token([node("127.0.0.1")])
        with pytest.raises(StartupError, match="node 10.0.0.1 can be reached .* RAY_AUTH_MODE=tok"):
            ray.check_token([node("127.0.0.1"), node()])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    ray.check_token([node()])


def test_missing_ray_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartupError, match=r"pip install 'tlt-server\[fleet\]'"):
        ray.connected()


def test_actor_ends_with_a_raylet_reaped_or_not() -> None:
    """The watching process is a child of the one that is watched."""
    watch = (
        "import os; from tlt_server.fleet.launchers.ray import _end_with\n"
        "raylet = os.getppid(); print(os.getpid(), flush=True); _end_with(raylet)"
    )
    raylet = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {watch!r}]); time.sleep(600)"
    )
    for reaped in (True, False):
        process = subprocess.Popen([sys.executable, "-c", raylet], stdout=subprocess.PIPE)
        assert process.stdout is not None
        actor = int(process.stdout.readline())
        assert not ended(actor)
        process.kill()
        if reaped:
            process.wait()
        until(lambda actor=actor: ended(actor))  # type: ignore[misc]
        process.communicate()
