"""Orders to a fleet, over HTTP, gRPC and both clients, and the refusal of a server without one; and
the sessions by which a fleet places requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import msgspec
import pytest

from tests.frontend.live_server import LiveServer, serving
from tlt_client import AsyncClient, Client
from tlt_client.errors import Conflict, InvalidRequest, NotFound
from tlt_client.rpc import RolloutServiceStub, error_of
from tlt_client.rpc.rollout_pb2 import DrainReplicaRequest, GetFleetRequest, ScaleFleetRequest
from tlt_client.wire import FleetStatus, ReplicaStatus
from tlt_server.__main__ import main
from tlt_server.errors import Conflict as Refused

LAST = "the last replica that is ready is not drained; scale the fleet up first"


class FakeFleet:
    """Two replicas, of which the second has not joined."""

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.replicas = {
            "b": ReplicaStatus(name="b", state="joining", address="10.0.0.2:8001"),
            "a": ReplicaStatus(
                name="a",
                state="ready",
                address="10.0.0.1:8001",
                url="https://10.0.0.1:8000",
                versions={"target": "v7"},
                running=3,
                waiting=1,
                expected_wait_s=0.5,
                moves=2,
                fault="the stream broke",
            ),
        }

    def status(self) -> list[ReplicaStatus]:
        return [*self.replicas.values()]

    def _note(self, name: str, order: str, **change: Any) -> None:
        self.orders.append((name, order))
        self.replicas[name] = msgspec.structs.replace(self.replicas[name], **change)

    async def drain(self, name: str) -> None:
        if self.replicas[name].state != "ready":
            raise Refused(LAST)
        self._note(name, "drain", state="draining")

    def resume(self, name: str) -> None:
        self._note(name, "resume", state="ready")

    async def restart(self, name: str) -> None:
        self._note(name, "restart", state="joining", url="")

    async def scale(self, replicas: int) -> None:
        self.orders.append(replicas)


server = serving(grpc_port=0)
ORDERS: list[Callable[[Any], Any]] = [
    lambda client: client.fleet(),
    lambda client: client.scale_fleet(3),
    lambda client: client.drain_replica("a"),
    lambda client: client.resume_replica("a"),
    lambda client: client.restart_replica("a"),
]


@pytest.fixture
def fleet(server: LiveServer) -> Iterator[FakeFleet]:
    server.client.fleet = fleet = FakeFleet()
    yield fleet
    server.client.fleet = None


def test_both_clients_give_orders_to_a_fleet(server: LiveServer, fleet: FakeFleet) -> None:
    async def asked(order: Callable[[Any], Any]) -> Any:
        async with AsyncClient(server.url) as client:
            return await order(client)

    sync, said = [], []
    with Client(server.url) as client:
        for order in ORDERS:
            sync.append(order(client))
        orders = fleet.orders
        server.client.fleet = again = FakeFleet()
        said = [asyncio.run(asked(order)) for order in ORDERS]
    assert sync == said and orders == again.orders
    assert orders == [3, ("a", "drain"), ("a", "resume"), ("a", "restart")]
    whole, _, *each = sync
    assert isinstance(whole, FleetStatus) and [r.name for r in whole.replicas] == ["a", "b"]
    assert whole.replicas[0] == FakeFleet().replicas["a"]
    assert [replica.state for replica in each] == ["draining", "ready", "joining"]


def test_refused_orders_name_value_and_reason(server: LiveServer, fleet: FakeFleet) -> None:
    with Client(server.url) as client:
        with pytest.raises(NotFound, match="no replica 'c'; GET /fleet lists them"):
            client.drain_replica("c")
        with pytest.raises(Conflict, match=LAST):
            client.drain_replica("b")
        for replicas in (0, 1025):
            with pytest.raises(InvalidRequest, match=f"replicas is {replicas}; it must be"):
                client.scale_fleet(replicas)
    assert fleet.orders == []


def test_orders_over_grpc_are_those_of_http(server: LiveServer, fleet: FakeFleet) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = RolloutServiceStub(channel)
        first = stub.GetFleet(GetFleetRequest()).replicas[0]
        assert (first.name, first.state, dict(first.versions)) == ("a", "ready", {"target": "v7"})
        assert stub.DrainReplica(DrainReplicaRequest(name="a")).state == "draining"
        stub.ScaleFleet(ScaleFleetRequest(replicas=2))
        server.client.fleet = None
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetFleet(GetFleetRequest())
    assert isinstance(error_of(caught.value), Conflict)
    assert fleet.orders == [("a", "drain"), 2]


def test_prometheus_discovers_the_replicas_that_have_joined(
    server: LiveServer, fleet: FakeFleet
) -> None:
    reply = httpx.get(f"{server.url}/fleet/targets")
    assert reply.headers["content-type"] == "application/json"
    labels = {"replica": "a", "__scheme__": "https"}
    assert reply.json() == [{"targets": ["10.0.0.1:8000"], "labels": labels}]


@pytest.mark.parametrize("order", ORDERS)
def test_server_without_a_fleet_names_the_gateway_command(
    server: LiveServer, order: Callable[[Any], Any]
) -> None:
    with Client(server.url) as client, pytest.raises(Conflict, match="`tlt fleet serve`"):
        order(client)


def test_command_shows_the_fleet_and_gives_orders(
    server: LiveServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    def tlt(*words: str) -> str:
        status = main(["fleet", *words, "--url", server.url])
        said = capsys.readouterr()
        assert (status, bool(said.err)) in ((0, False), (1, True))
        return said.out or said.err

    shown = [" ".join(line.split()) for line in tlt("status").splitlines()]
    assert shown[0] == (
        "a ready 10.0.0.1:8001 3 running 1 waiting 2 moves target 'v7' | the stream broke"
    )
    assert shown[1].startswith("b joining") and shown[2] == "1 of 2 replicas are ready"
    assert tlt("drain", "a") == "a is draining\n"
    assert LAST in tlt("drain", "a")
    assert tlt("resume", "a") == "a is ready\n"
    assert tlt("restart", "a").startswith("a is ")
    assert "of 2 replicas" in tlt("scale", "3")
    assert "no replica 'c'" in tlt("drain", "c")
    assert fleet.orders == [("a", "drain"), ("a", "resume"), ("a", "restart"), 3]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"requests": [{"prompt": "a"}], "sampling": {"max_tokens": 1}}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [65], "sampling_params": {"max_tokens": 1}}),
    ],
)
def test_session_header_groups_the_turns_of_every_dialect(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    def group(session: str = "", **fields: Any) -> str:
        headers = {"x-session-id": session} if session else {}
        httpx.post(f"{server.url}{path}", json=body | fields, headers=headers).raise_for_status()
        return str(server.engine.submitted[-1].group_id)

    assert group("episode-7") == group("episode-7") == "episode-7"
    assert group("not well formed") not in ("not well formed", group())
    if "requests" not in body and "token_ids" not in body:
        assert group("episode-7", session_id="of the body") == "of the body"


def test_end_of_a_session_is_accepted_in_any_form(server: LiveServer) -> None:
    for body in ({"session_id": "episode-7"}, {"session": 3}, {}):
        assert httpx.post(f"{server.url}/finish_session", json=body).status_code == 200
    assert httpx.post(f"{server.url}/finish_session").status_code == 200
