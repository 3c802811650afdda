"""Groups and broadcasts in the dialects: the engine commands they become, the sessions around
them, and what is refused before it reaches a session.
"""

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server, serving
from tlt_client import Client
from tlt_client.adapters.openrlhf import RolloutActor
from tlt_server.frontend.rpc.methods import OPERATIONS
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    JoinGroup,
    LeaveGroup,
    Manifest,
    PushWeights,
    TensorEntry,
)

INFO = {"names": ["w", "v"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
ENTRIES = [
    TensorEntry(name="w", dtype="bfloat16", shape=[2, 3]),
    TensorEntry(name="v", dtype="float32", shape=[]),
]
DISTRIBUTED = {"names": ["w", "v"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
ID = base64.b64encode(bytes(range(128))).decode()
WHERE = {
    "master_address": "h",
    "master_port": "29500",
    "rank_offset": 1,
    "world_size": 3,
    "backend": "gloo",
}


# For tests that leave no weight update open.
shared = serving()


server = serving(scope="function")


def post(server: LiveServer, path: str, body: Any = None, *, status: int = 200) -> Any:
    response = (
        httpx.post(f"{server.url}{path}", json=body, timeout=10)
        if body is not None
        else httpx.post(f"{server.url}{path}")
    )
    assert response.status_code == status, response.text
    return response.json()


def commands(server: LiveServer) -> list[Any]:
    """Since the last call."""
    told, server.engine.weight_commands = server.engine.weight_commands, []
    return told


def pushed(server: LiveServer) -> list[Manifest]:
    return [command.manifest for command in commands(server) if isinstance(command, PushWeights)]


def came(group: str, **fields: Any) -> Manifest:
    given: dict[str, Any] = {
        "channel": "broadcast",
        "group": group,
        "tensors": ENTRIES,
        "packed": False,
        "partial": True,
        "labelled": True,
    }
    return Manifest(**given | fields)


BROADCASTER = {"host": "h", "port": 29500, "inference_world_size": 1}
JOINS = [  # path, body, (name, rank, world size, whether torch prefixes the name)
    ("/init_weight_transfer_engine", {"init_info": WHERE}, ("weight_transfer", 1, 3, False)),
    (
        "/init_broadcaster",
        BROADCASTER | {"rank_offset": 1, "inference_world_size": 4, "backend": "gloo"},
        ("weight_transfer", 2, 5, False),
    ),
    ("/init_weights_update_group", WHERE | {"group_name": "pp_0"}, ("pp_0", 1, 3, True)),
    ("/init_weights_update_group", WHERE, ("weight_update_group", 1, 3, True)),
    ("/weight_groups", WHERE | {"name": "own"}, ("own", 1, 3, False)),
]


@pytest.mark.parametrize(("path", "body", "expected"), JOINS)
def test_every_dialect_joins_a_group(
    path: str, body: Any, expected: tuple[str, int, int, bool], shared: LiveServer
) -> None:
    post(shared, path, body)
    (told,) = commands(shared)
    assert isinstance(told, JoinGroup)
    assert (told.name, told.rank, told.world_size, told.prefixed) == expected
    assert (told.backend, told.master_address, told.master_port) == ("gloo", "h", 29500)
    post(shared, "/destroy_weights_update_group", {"group_name": expected[0]})
    (left,) = commands(shared)
    assert isinstance(left, LeaveGroup) and left.name == expected[0]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_openrlhf_actor_joins_the_group_of_its_trainer(backend: str, shared: LiveServer) -> None:
    """Over nccl a communicator as vLLM makes it, over gloo torch's group of that name."""
    asyncio.run(
        RolloutActor(shared.url).init_process_group(
            "h", 29500, 1, 2, "openrlhf", backend=backend, use_ray=False
        )
    )
    (told,) = commands(shared)
    assert isinstance(told, JoinGroup)
    assert (told.name, told.backend, told.prefixed) == ("openrlhf", backend, backend == "gloo")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"master_address": "h", "master_port": 29500, "nccl_unique_id_b64": None},
            ("h", 29500, b""),
        ),
        (
            {"master_address": None, "master_port": None, "nccl_unique_id_b64": ID},
            ("", 0, bytes(range(128))),
        ),
    ],
)
def test_nccl_group_is_joined_by_store_or_by_id(
    fields: Any, expected: Any, shared: LiveServer
) -> None:
    post(
        shared,
        "/init_weight_transfer_engine",
        {"init_info": {"rank_offset": 1, "world_size": 2, "packed": True} | fields},
    )
    (told,) = commands(shared)
    assert isinstance(told, JoinGroup) and told.backend == "nccl" and not told.prefixed
    assert (told.master_address, told.master_port, told.unique_id) == expected


BY_ID = {"world_size": 2, "nccl_unique_id_b64": ID}
NO_INFO: list[tuple[dict[str, Any], str]] = [
    (WHERE | {"nccl_unique_id_b64": ID}, "give one of both"),
    ({"world_size": 2}, "give one of both"),
    (BY_ID | {"nccl_unique_id_b64": ID[:-4]}, "128 bytes of ncclGetUniqueId"),
    (BY_ID | {"nccl_unique_id_b64": "-_" + ID[2:]}, "in ordinary base64"),
    (BY_ID | {"backend": "gloo"}, "for backend nccl"),
    (BY_ID | {"nccl_unique_id_b64": ID * 2}, "at most 256 characters"),
    (WHERE | {"master_port": 0}, "from 1 to 65535"),
    (WHERE | {"rank_offset": 3}, "ranks are below the world size"),
    (WHERE | {"rank_offset": 0}, "rank 0 is the trainer's"),
]
NO_GROUP: list[tuple[str, Any, str]] = [
    *(("/init_weight_transfer_engine", {"init_info": info}, said) for info, said in NO_INFO),
    ("/init_weight_transfer_engine", {}, "init_info is missing"),
    ("/init_broadcaster", BROADCASTER, "backend is absent, which means nccl"),
    ("/init_broadcaster", BROADCASTER | {"backend": None}, "weight_broadcast type filesystem"),
    ("/init_broadcaster", BROADCASTER | {"backend": "nccl"}, "backend is 'nccl'"),
    ("/init_weights_update_group", WHERE | {"master_port": "x1"}, "'x1'"),
    ("/weight_groups", WHERE | {"name": "own", "master_port": 70000}, "70000"),
]


@pytest.mark.parametrize(("path", "body", "said"), NO_GROUP)
def test_an_impossible_group_is_refused_at_once(
    path: str, body: Any, said: str, shared: LiveServer
) -> None:
    reply = post(shared, path, body, status=400)
    assert said in (reply.get("message") or reply["error"]["message"]) and commands(shared) == []


def test_broadcast_manifest_follows_how_its_group_was_made(server: LiveServer) -> None:
    post(server, "/update_weights", {"update_info": INFO})
    post(
        server,
        "/init_weight_transfer_engine",
        {"init_info": WHERE | {"packed": True, "packed_buffer_size_bytes": 77}},
    )
    post(
        server,
        "/update_weights",
        {"update_info": [INFO, INFO | {"packed": False}], "weight_version": "7"},
    )
    post(
        server,
        "/collective_rpc",
        {
            "method": "update_weights_nccl",
            "kwargs": {"update_info": INFO | {"packed_buffer_size_bytes": 9}},
        },
    )
    assert pushed(server) == [
        came("weight_transfer"),
        came("weight_transfer", version="7", packed=True, bucket_bytes=77),
        came("weight_transfer", version="7", bucket_bytes=77),
        came("weight_transfer", packed=True, bucket_bytes=9),
    ]
    post(
        server,
        "/update_weights_from_distributed",
        DISTRIBUTED | {"group_name": "g", "weight_version": "8", "abort_all_requests": True},
    )
    post(
        server,
        "/update_weights_from_distributed",
        DISTRIBUTED | {"load_format": "flattened_bucket", "flush_cache": True},
    )
    assert pushed(server) == [
        came("g", version="8", in_flight="abort"),
        came("weight_update_group", packed=True, bucket_bytes=2**40),
    ]


@pytest.mark.parametrize(
    ("path", "body", "group"),
    [
        ("/update_weights", {"update_info": INFO | {"shapes": []}}, "weight_transfer"),
        ("/update_weights", {"update_info": [INFO, INFO | {"names": ["w"]}]}, "weight_transfer"),
        ("/update_weights", {"update_info": 7}, "weight_transfer"),
        ("/update_weights", {"weight_dir": None}, "weight_transfer"),
        (
            "/collective_rpc",
            {
                "method": "update_weights_nccl",
                "kwargs": {"update_info": INFO | {"dtype_names": ["a"]}},
            },
            "weight_transfer",
        ),
        ("/update_weights_from_distributed", DISTRIBUTED | {"dtypes": [], "group_name": "g"}, "g"),
        ("/update_weights_from_distributed", {"names": 7}, "weight_update_group"),
        (
            "/update_weights",
            {"version": "7", "channel": "broadcast", "group": "own", "tensors": [{"name": "w"}]},
            "own",
        ),
        (
            "/update_weights",
            {"version": "7", "channel": "broadcast", "group": "own", "tensors": []},
            "own",
        ),
        ("/update_weights", {"version": "7", "path": 7}, ""),
        ("/update_weights", {"version": "7", "channel": "broadcast", "group": 7}, ""),
    ],
)
def test_refused_body_makes_its_broadcast_group_leave(
    path: str, body: Any, group: str, shared: LiveServer
) -> None:
    post(shared, path, body, status=400)
    assert [(told.name, told.out_of_step) for told in commands(shared)] == (
        [(group, True)] if group else []
    )


def test_the_role_of_a_push_follows_its_tensors(server: LiveServer) -> None:
    def role(names: list[str], **fields: Any) -> str:
        post(server, "/update_weights_from_distributed", DISTRIBUTED | {"names": names} | fields)
        return pushed(server)[0].role

    assert role(["w", "v"]) == "target" and role(["draft.w", "draft.v"]) == "drafter"
    assert role(["w", "draft.v"]) == "all"
    assert role(["w", "v"], selector="draft") == "drafter"
    assert role(["w", "v"], selector="all") == "target"
    post(server, "/start_draft_weight_update")
    assert role(["w", "v"]) == "drafter" and role(["w", "v"], selector="target") == "target"


def test_update_session_holds_pushes_of_every_channel(server: LiveServer) -> None:
    post(server, "/begin_weight_update")
    assert post(server, "/update_weights", {"update_info": INFO})["state"] == "staged"
    assert (
        post(server, "/update_weights", {"version": "v", "path": "p", "role": "drafter"})["state"]
        == "staged"
    )
    first, second = pushed(server)
    id = first.session
    assert id and first == came("weight_transfer", commit=False, session=id)
    assert second == Manifest(version="v", path="p", role="drafter", commit=False, session=id)
    assert post(server, "/end_weight_update")["success"]
    assert [type(command) for command in commands(server)] == [CommitWeights]
    post(server, "/update_weights", {"version": "w", "path": "p"})
    assert pushed(server) == [Manifest(version="w", path="p")]
    post(server, "/begin_weight_update")
    post(server, "/update_weights", {"update_info": INFO})
    assert pushed(server)[0].session not in ("", id), "each session has an id of its own"


def test_refused_update_end_leaves_the_session_open(server: LiveServer) -> None:
    post(server, "/start_weight_update")
    post(server, "/update_weights", {"update_info": INFO})
    server.engine.fails = "conflict"
    post(server, "/finish_weight_update", status=409)
    server.engine.fails = ""
    assert post(server, "/finish_weight_update", {"weight_version": "7"})["version"] == "7"
    post(server, "/start_weight_update")
    post(server, "/update_weights", {"update_info": INFO})
    commands(server)
    post(server, "/start_weight_update")
    assert [type(command) for command in commands(server)] == [AbortWeights], (
        "what an earlier one left is dropped"
    )


def test_update_session_without_staging_commits_at_once(model: Path) -> None:
    with live_server(model, weight_staging="none") as server:
        post(server, "/start_weight_update")
        assert (
            post(server, "/update_weights", {"update_info": INFO, "weight_version": "7"})["state"]
            == "committed"
        )
        assert post(server, "/finish_weight_update")["state"] == "unchanged"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (
            "/update_weights",
            {"update_info": INFO | {"dtype_names": ["float32"]}, "weight_version": "8"},
            400,
        ),
        ("/update_weights", {"path": "p"}, 400),
        ("/update_weights", ["no object"], 400),
        (
            "/collective_rpc",
            {"method": "update_weights_nccl", "kwargs": {"update_info": INFO | {"shapes": []}}},
            400,
        ),
        ("/update_weights_from_distributed", DISTRIBUTED | {"names": ["w"]}, 400),
        ("/update_weights_from_disk", {"model_path": ""}, 400),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, 415),
    ],
)
def test_update_end_after_a_refused_call_commits_no_push(
    path: str, body: Any, status: int, shared: LiveServer
) -> None:
    post(shared, "/start_weight_update")
    post(shared, "/update_weights", {"version": "7", "path": "p"})
    post(shared, path, body, status=status)
    commands(shared)
    post(shared, "/finish_weight_update", {"weight_version": "8"}, status=409)
    assert commands(shared) == []
    post(shared, "/update_weights", {"path": "good", "version": "8"})
    post(shared, "/finish_weight_update")
    assert isinstance(commands(shared)[-1], CommitWeights), "the update goes on"


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [({"authorization": "Bearer wrong"}, b"{}", 401), ({}, bytes(2**20 + 1), 413)],
)
def test_end_of_a_session_without_an_admitted_push_is_refused(
    headers: dict[str, str], body: bytes, status: int, model: Path
) -> None:
    with live_server(model, keys="secret-key-0123456789\n", max_body_mb=1) as server:
        with httpx.Client(
            base_url=server.url, headers={"authorization": "Bearer secret-key-0123456789"}
        ) as client:
            assert client.post("/start_weight_update").status_code == 200
            assert (
                client.post("/update_weights", headers=headers, content=body).status_code == status
            )
            refused = client.post("/finish_weight_update", json={"weight_version": "8"})
            assert refused.status_code == 409
            assert "nothing was pushed in this weight update" in refused.text
            assert commands(server) == []
            assert client.post("/finish_weight_update").json()["state"] == "unchanged"


def test_a_push_without_a_version_can_be_aborted(server: LiveServer) -> None:
    assert post(server, "/weights/abort")["state"] == "aborted"
    Client(server.url).abort_weights()
    assert [(command.version, command.session) for command in commands(server)] == [("", "")] * 2
    arrived, _ = OPERATIONS["AbortWeights"].arrived({})
    assert arrived.path == "/weights/abort", "over gRPC: an empty version"


def test_repeated_update_end_refuses_a_different_name(server: LiveServer) -> None:
    post(server, "/start_weight_update")
    post(server, "/update_weights", {"path": "good", "version": "8"})
    ended = post(server, "/finish_weight_update", {"weight_version": "2"})
    commands(server)
    for again in ({"weight_version": "2"}, None):
        assert post(server, "/finish_weight_update", again) == ended
    refused = post(server, "/finish_weight_update", {"weight_version": "1"}, status=409)
    assert "its version is '2', not '1'" in str(refused) and commands(server) == []
    post(server, "/update_weight_version", {"new_version": "1"})
    assert post(server, "/finish_weight_update", {"weight_version": "2"}) == ended, (
        "sent again late"
    )
