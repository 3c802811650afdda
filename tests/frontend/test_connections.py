"""Silent connections cost nothing but themselves: probes are answered, the engine is restarted, and
the longest silent one goes first.
"""

import itertools
import json
import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from hypothesis import given
from hypothesis import strategies as st

from tests.frontend.live_server import LiveServer, live_server, serving
from tests.frontend.test_limits import LONG, connect, head, read_all
from tests.frontend.test_supervisor import die
from tests.frontend.test_tls import Issuer
from tests.hostile.connections import silent_connections
from tests.waiting import until
from tlt_server.config import Config
from tlt_server.errors import StartupError
from tlt_server.frontend.http import connections, limits
from tlt_server.frontend.http import server as server_module
from tlt_server.frontend.http.connections import OpenConnections, Reserve, needed, raise_limit
from tlt_server.frontend.rpc import server as rpc_server

PROBE = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Line:
    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_longest_silent_connection_is_closed_for_a_new_one() -> None:
    room, lines = OpenConnections(3), [Line() for _ in range(4)]
    assert all(room.opened(line) for line in lines[:3])
    room.asks(lines[0])
    room.asks(lines[1])
    room.rests(lines[1])
    assert room.opened(lines[3]) and [line.dropped for line in lines] == [False, False, True, False]
    for line in (lines[1], lines[3]):
        room.asks(line)
    newest = Line()
    assert not room.opened(newest) and not any(line.dropped for line in (*lines[:2], lines[3]))
    room.closed(lines[0])
    assert room.opened(newest)


@given(
    st.lists(st.tuples(st.sampled_from(["opened", "asks", "rests", "closed"]), st.integers(0, 6)))
)
def test_a_port_never_has_more_connections_than_its_limit(calls: list[tuple[str, int]]) -> None:
    room, known = OpenConnections(4), dict[int, Line]()
    gone = Line()  # the last one that left or was dropped; its reply may end after that
    for call, number in calls:
        line = known.get(number)
        if line is None and call == "opened":
            new = Line()
            if room.opened(new):
                known[number] = new
        elif line is None and call == "rests":
            room.rests(gone)
        elif line is not None and call != "opened":
            getattr(room, call)(line)
            if call == "closed":
                gone = known.pop(number)
        for number in [number for number, line in known.items() if line.dropped]:
            gone = known.pop(number)
        room.check()
        assert len(room) == len(known)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextmanager
def limited(free: int) -> Iterator[None]:
    """Lower this process's limit so that it may open this many more descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = (number for number in itertools.count() if not is_open(number))
    limit = next(itertools.islice(unused, free, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


server = serving(
    grpc_port=0, probe_port=0, max_connections=40, header_timeout_s=3.0, max_restarts=100
)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_silent_connections_stop_no_probe_and_no_restart(server: LiveServer) -> None:
    ports = [port_of(address) for address in (server.url, server.grpc_address, server.probe_url)]
    found = silent_connections("127.0.0.1", ports, count=300, meanwhile=lambda: die(server))
    assert found["probes_asked"] > 10 and found["probes_answered"] == found["probes_asked"]
    assert found["opened"] == dict.fromkeys(ports, 300)
    most = (connections.max_open(40), 4 * 40, connections.PROBES)
    assert all(found["open_at_end"][port] <= bound for port, bound in zip(ports, most, strict=True))
    with grpc.insecure_channel(server.grpc_address) as channel:
        request = health_pb2.HealthCheckRequest()
        until(lambda: _serves(channel, request))


def _serves(channel: grpc.Channel, request: Any) -> bool:
    try:
        return bool(HealthStub(channel).Check(request, timeout=5).status == 1)
    except grpc.RpcError:
        return False


def test_a_silent_connection_does_not_count_against_requests(server: LiveServer) -> None:
    body = json.dumps(LONG).encode()
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(server))
        asking = [stack.enter_context(connect(server)) for _ in range(40)]
        for connection in asking:
            connection.sendall(head(content_length=len(body)) + body)
        until(lambda: len(server.client) == 40)
        assert httpx.get(f"{server.url}/server_info").status_code == 503
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
    until(lambda: len(server.client) == 0)


def test_idle_timeout_exceeds_those_of_common_clients(server: LiveServer) -> None:
    with connect(server) as line:
        for rest_s in (5.5, 0.0):  # uvicorn's own limit, and httpx's, are 5 s
            line.sendall(PROBE)
            assert line.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(rest_s)


def test_probe_port_answers_only_probes(server: LiveServer) -> None:
    for path in ("/livez", "/readyz", "/startupz", "/health", "/metrics"):
        assert httpx.get(f"{server.probe_url}{path}").status_code == 200
    for method, path in (("GET", "/server_info"), ("POST", "/generate"), ("GET", "/none")):
        reply = httpx.request(method, f"{server.probe_url}{path}", json={})
        assert reply.status_code == 404 and "probe_port" in reply.json()["error"]["message"]


def test_connection_without_tls_handshake_is_counted_and_cut(model: Path, tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "issuer")
    chain, key = issuer.issue("server")
    tls = {"tls_cert": chain, "tls_key": key}
    with (
        live_server(model, max_connections=8, header_timeout_s=3600.0, **tls) as server,
        ExitStack() as stack,
    ):
        address = ("127.0.0.1", port_of(server.url))
        for _ in range(200):
            stack.enter_context(socket.create_connection(address))
        trust = ssl.create_default_context(cafile=str(issuer.ca))
        assert httpx.get(f"{server.url}/livez", verify=trust, timeout=60).status_code == 200
    with live_server(model, header_timeout_s=0.1, **tls) as server:
        # The loop itself cuts a handshake after 60 s.
        with socket.create_connection(("127.0.0.1", port_of(server.url)), timeout=50) as silent:
            assert read_all(silent) == b""


def test_accepting_resumes_after_descriptors_ran_out(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PAUSE_S", 0.02)
    with ExitStack() as stack:
        mine = [stack.enter_context(socket.socket()) for _ in range(60)]
        with limited(20):
            for connection in mine:
                connection.connect(("127.0.0.1", port_of(server.url)))
            mine[-1].settimeout(30)
            mine[-1].sendall(PROBE)
            assert mine[-1].recv(100).startswith(b"HTTP/1.1 200")


def test_failed_engine_launch_counts_as_an_engine_death(model: Path) -> None:
    with live_server(model, max_restarts=1, restart_window_s=60.0) as server:
        refusals = iter([OSError(24, "Too many open files")] * 3)

        async def launch(directory: Path) -> Any:
            for refusal in refusals:
                raise refusal
            return await LiveServer._launch(server, directory)

        supervisor = server.supervisor
        server.call(lambda: setattr(supervisor, "_launch", launch))
        server.call(lambda: setattr(server.engine, "dies", True))
        until(lambda: "the engine is back" in server.said.getvalue())
        assert server.said.getvalue().count("did not launch the engine: Too many open files") == 3
        assert (
            'tlt_engine_restarts_total{reason="not_launched"} 3.0'
            in httpx.get(f"{server.url}/metrics").text
        )


def test_reserved_descriptors_allow_an_engine_launch() -> None:
    reserve = Reserve(8)
    with limited(0):
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        with reserve.released():
            taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
            for descriptor in taken[:4]:
                os.close(descriptor)
        with pytest.raises(OSError, match="Too many open files"), reserve.released():
            raise AssertionError("the reserve was not whole")
        for descriptor in taken[4:]:
            os.close(descriptor)
        with reserve.released():
            pass
    reserve.close()


def test_descriptor_limit_is_raised_or_the_start_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(model=model, grpc_port=0)
    assert needed(config) == 2 * 1024 + 64 + 4 * 1024 + 256 + 64 + 448
    assert needed(Config(model=model, grpc_port=0, link_port=0)) == needed(config) + 64
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(connections.resource, "setrlimit", lambda which, to: set_to.append(to))
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: (256, needed(config)))
    raise_limit(config)
    assert set_to == [(needed(config), needed(config))]
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: (256, 4096))
    with pytest.raises(
        StartupError, match=r"may open 4096 .* 1024 .* may need 6976; raise .* lower"
    ):
        raise_limit(config)


def test_grpc_bounds_connections_and_ends_idle_ones(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        live_server(model, grpc_port=0, max_connections=3, header_timeout_s=3600.0) as server,
        ExitStack() as stack,
    ):
        address = ("127.0.0.1", port_of(server.grpc_address))
        silent = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(20)]
        first = [connection.recv(1000) for connection in silent]  # settings, or the end at once
        assert sum(bool(received) for received in first) == 12
    with live_server(model, grpc_port=0, header_timeout_s=0.1) as server:
        # The library itself ends a handshake after 120 s.
        address = ("127.0.0.1", port_of(server.grpc_address))
        with socket.create_connection(address, timeout=100) as connection:
            read_all(connection)
    monkeypatch.setattr(rpc_server, "IDLE_S", 0.5)
    with live_server(model, grpc_port=0) as server:
        with grpc.insecure_channel(server.grpc_address) as channel:
            request = health_pb2.HealthCheckRequest()
            until(lambda: _serves(channel, request))
            states: list[grpc.ChannelConnectivity] = []
            channel.subscribe(states.append)
            until(lambda: grpc.ChannelConnectivity.IDLE in states, within_s=120)


def test_connections_being_discarded_make_room_for_probes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DISCARD_S", 60.0)
    stalled = PROBE.replace(b"\r\n\r\n", b"\r\ncontent-length: 9\r\n\r\n")
    with live_server(model, max_connections=1) as server, ExitStack() as stack:
        for _ in range(connections.max_open(1)):
            connection = stack.enter_context(connect(server))
            connection.sendall(stalled)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        assert httpx.get(f"{server.url}/livez", timeout=10).status_code == 200
