"""Pushes through a gateway: live at all replicas or at none, and a replica that lags is named."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.frontend.live_gateway import LiveGateway, live_gateway
from tests.waiting import until
from tlt_client import Client
from tlt_server.errors import EngineFailed
from tlt_server.frontend.link.fleet_file import FleetFile
from tlt_server.wire.commands import CommitWeights, JoinGroup, Manifest, PushWeights


@pytest.fixture
def server(model: Path) -> Iterator[LiveGateway]:
    with live_gateway(model) as server:
        yield server


@pytest.fixture
def client(server: LiveGateway) -> Iterator[Client]:
    with Client(server.url, timeout_s=60) as client:
        yield client


def versions(server: LiveGateway) -> list[str]:
    return [replica.engine.weights.target for replica in server.replicas]


def test_push_is_live_at_all_replicas(server: LiveGateway, client: Client) -> None:
    reply = client.update_weights("step-1", "v1")
    assert (reply["state"], reply["weight_version"], reply["lagging"]) == ("committed", "v1", {})
    assert versions(server) == ["v1"] * 3 and client.weights()["target"] == "v1"
    pushes = [
        each
        for each in server.replicas[0].engine.weight_commands  # shared by all replicas
        if isinstance(each, PushWeights | CommitWeights)
    ]
    assert [type(each) for each in pushes] == [PushWeights] * 3 + [CommitWeights] * 3
    assert not any(each.manifest.commit for each in pushes if isinstance(each, PushWeights))
    [result] = client.generate([{"prompt": "a"}], sampling={"max_tokens": 3}).results
    assert [span.version for span in result.choices[0].weight_versions] == ["v1"]


def test_replica_that_fails_at_the_commit_is_named_and_comes_back(
    server: LiveGateway, client: Client
) -> None:
    assert client.update_weights("step-1", "v1", commit=False)["state"] == "staged"
    slow = server.replicas[1].engine
    slow.fails = "push_failed"
    reply = client.commit_weights("v1")
    assert (reply["state"], reply["version"]) == ("committed", "v1")
    assert reply["lagging"] == {"r1": "push_failed: out of luck"}
    assert versions(server) == ["v1", "v0", "v1"]
    slow.fails = ""
    until(lambda: versions(server) == ["v1"] * 3)

    def states() -> list[str]:
        assert server.client.fleet is not None
        return [each.state for each in server.client.fleet.status()]

    until(lambda: states() == ["ready"] * 3)


def test_gateway_ends_once_a_later_one_has_its_file(server: LiveGateway) -> None:
    FleetFile(server.directory)  # as a gateway on a volume without locks does
    assert server.client.fleet is not None
    fan_out, push = server.client.fleet._fleet.fan_out, PushWeights("p", Manifest(version="v1"))
    with pytest.raises(EngineFailed, match="so a later one has the fleet; ask that one"):
        server.run(fan_out.weights(push))
    until(lambda: "so a later one has the fleet" in server.said.getvalue())
    assert versions(server) == ["v0"] * 3


def test_replicas_join_a_trainers_group_one_after_the_other(server: LiveGateway) -> None:
    size = httpx.get(f"{server.url}/get_world_size").json()["world_size"]
    assert size == 3
    info = {
        "master_address": "127.0.0.1",
        "master_port": 29500,
        "rank_offset": 1,
        "world_size": size + 1,
        "backend": "gloo",
    }
    path = f"{server.url}/init_weight_transfer_engine"
    assert httpx.post(path, json={"init_info": info}, timeout=60).status_code == 200
    ranks = [
        each.rank
        for each in server.replicas[0].engine.weight_commands  # shared by all replicas
        if isinstance(each, JoinGroup)
    ]
    assert sorted(ranks) == [1, 2, 3]
    short = httpx.post(path, json={"init_info": info | {"world_size": 2}}, timeout=60)
    assert short.status_code == 400 and "3 replicas take the ranks" in short.text
