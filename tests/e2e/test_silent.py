"""Three thousand silent connections on each port of a real server, while its engine is killed."""

from __future__ import annotations

import re
import resource

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.e2e.test_crashes import kill_engine, succeeded
from tests.e2e.test_lifecycle import FAST_START
from tests.hostile.connections import silent_connections
from tests.waiting import until
from tlt_client import Client
from tlt_server.demo.server import ServerProcess

COUNT = 3000


@pytest.mark.soak
def test_three_thousand_silent_connections_on_each_port_stop_nothing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * COUNT + 200:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # the server raises its own
    with ServerProcess(*FAST_START, "--grpc-port", "0", "--probe-port", "0") as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        said = "\n".join(server.lines)
        [probe_url] = re.findall(r"listening on (\S+) for probes", said)

        def meanwhile() -> None:
            pid = kill_engine(server)
            until(lambda: succeeded(server, pid))
            until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)
            with grpc.insecure_channel(server.grpc_address) as channel:
                check = health_pb2.HealthCheckRequest()
                assert HealthStub(channel).Check(check, timeout=5).status == 1

        addresses = (server.url, server.grpc_address, probe_url)
        ports = [int(address.rpartition(":")[2]) for address in addresses]
        found = silent_connections("127.0.0.1", ports, count=COUNT, meanwhile=meanwhile)
        print(found)
        assert found["opened"] == dict.fromkeys(ports, COUNT)
        assert found["probes_asked"] > 50 and found["probes_answered"] == found["probes_asked"]
        with Client(server.url, timeout_s=60) as client:
            assert client.generate([{"prompt": "2+2="}], sampling={"max_tokens": 4}).results
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
