"""Bodies of the weight routes that are refused before they reach the engine."""

import json
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer
from tests.frontend.test_weights_routes import post
from tlt_server.wire.commands import LeaveGroup


@pytest.fixture(autouse=True)
def untouched(server: LiveServer) -> None:
    server.engine.weight_commands.clear()


def tensor(**fields: Any) -> dict[str, Any]:
    """Return a push of one tensor with these fields."""
    return {"version": "v", "path": "p", "tensors": [{"name": "w", **fields}]}


PUSH = {"version": "v", "path": "p"}
INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
SHORT_INFO = {"names": ["v"], "dtype_names": [], "shapes": []}
TYPED = [{"name": "w", "dtype": "float32", "shape": []}]
REFUSED: list[tuple[Any, tuple[str, ...]]] = [
    (b"{", ("not JSON",)),
    ([1], ("must be a JSON object",)),
    ({}, ("version is missing",)),
    ({"version": "v"}, ("path is missing",)),
    (PUSH | {"path": ""}, ("path is ''",)),
    (PUSH | {"version": 3}, ("version is 3", "string")),
    (PUSH | {"version": ""}, ("version is ''",)),
    (PUSH | {"version": "a\nb"}, ("version is",)),
    (PUSH | {"version": "a/b"}, ("version is 'a/b'",)),
    (PUSH | {"version": "v" * 300}, ("256",)),
    (PUSH | {"rol": "all"}, ("unknown field rol", "did you mean role?")),
    (PUSH | {"role": "draft"}, ("role is 'draft'", "'drafter'")),
    (PUSH | {"role": "all"}, ("drafter_path", "role all needs")),
    (PUSH | {"drafter_path": "q"}, ("'q'", "other roles only path")),
    (PUSH | {"channel": "nccl"}, ("channel is 'nccl'", "disk")),
    (PUSH | {"in_flight": "stop"}, ("in_flight is 'stop'", "'drain'")),
    (PUSH | {"commit": "no"}, ("commit is 'no'",)),
    (PUSH | {"tensors": 3}, ("tensors is 3",)),
    (PUSH | {"tensors": [{"dtype": "float32"}]}, ("tensors[0].name is missing",)),
    (tensor(chksum="x"), ("tensors[0].chksum", "did you mean checksum?")),
    (tensor(shape=[-1]), ("tensors[0].shape[0] is -1", "at least 0")),
    (tensor(shape=[2**48 + 1]), ("at most 281474976710656",)),
    (tensor(shape=[1] * 9), ("tensors[0].shape", "8")),
    (tensor(name="w" * 257), ("tensors[0].name", "256")),
    (tensor(dtype="f" * 41), ("tensors[0].dtype", "40")),
    (tensor(checksum="0" * 81), ("tensors[0].checksum", "80")),
    ({"weight_dir": None}, ("weight_dir is null", "weight root", "update_info")),
    ({"weight_dir": None, "lora_name": None, "update_info": None}, ("weight_dir is null",)),
    ({"weight_dir": ""}, ("weight_dir is ''", "weight root")),
    ({"weight_dir": None, "version": "v"}, ("path is missing",)),
    ({"weight_dir": "p", "weight_version": 4}, ("version is 4",)),
    ({"update_info": []}, ("update_info is []",)),
    ({"update_info": {"names": []}}, ("update_info", "dtype_names is missing")),
    ({"update_info": SHORT_INFO | {"names": []}}, ("0 names", "one of each for every tensor")),
    ({"update_info": [INFO, SHORT_INFO]}, ("1 names, 0 dtypes and 0 shapes", "in the order")),
    ({"update_info": INFO | {"shapes": [[1] * 9]}}, ("shapes[0]", "8")),
    ({"version": "v", "channel": "http"}, ("tensors is missing", "channel http needs tensors")),
    (tensor(checksum="x") | {"channel": "http"}, ("path is 'p'", "leave it out")),
    ({"version": "v", "channel": "http", "tensors": [{"name": "w"}]}, ("'w' has no checksum",)),
    ({"version": "v", "channel": "broadcast", "tensors": TYPED}, ("group is missing",)),
    (
        {"version": "v", "channel": "broadcast", "group": "g", "tensors": [{"name": "w"}]},
        ("no dtype and shape",),
    ),
    ({"version": "v", "channel": "ipc", "tensors": TYPED}, ("path is missing", "needs path")),
    (tensor(shape=[1]) | {"channel": "ipc"}, ("'w' has no dtype and shape", "ipc")),
    (PUSH | {"channel": "ipc", "drafter_path": "d"}, ("tensors is missing",)),
    (PUSH | {"group": "g"}, ("group is 'g'", "channel disk does not take")),
    (PUSH | {"partial": True}, ("partial is true", "channel disk does not take")),
]


@pytest.mark.parametrize(("body", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_invalid_push_body_never_reaches_the_engine(
    body: Any, says: tuple[str, ...], server: LiveServer
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{server.url}/update_weights", content=content)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_request"
    for part in says:
        assert part in response.json()["error"]["message"]
    assert all(isinstance(command, LeaveGroup) for command in server.engine.weight_commands), (
        "nothing but what it spoils is left"
    )


def test_invalid_rollback_or_group_never_reaches_the_engine(server: LiveServer) -> None:
    group = {"name": "a b", "master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
    for path, body, says in (
        ("/weights/rollback", {"tp": "v"}, "did you mean to?"),
        ("/weights/rollback", {"in_flight": "later"}, "in_flight is 'later'"),
        ("/weight_groups", group, "name is 'a b'; it must match ^[A-Za-z0-9._-]+$"),
    ):
        assert says in post(server, path, body).json()["error"]["message"]
    assert not server.engine.weight_commands


def test_pickled_tensors_are_refused(server: LiveServer) -> None:
    refused = post(server, "/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]})
    assert refused.status_code == 415 and "update_weights_from_disk" in refused.json()["message"]
    assert not server.engine.weight_commands


def _fields(schemas: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """Return the names of an object's fields, and of those of all its forms."""
    while "$ref" in schema:
        schema = schemas[schema["$ref"].split("/")[-1]]
    forms = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    return {*schema.get("properties", {})}.union(*(_fields(schemas, form) for form in forms))


@pytest.mark.parametrize("value", ["a" * 4000, "1" * 10_000])
def test_refusals_shorten_the_long_fields_they_quote(value: str, server: LiveServer) -> None:
    refused = 0
    with httpx.Client(base_url=server.url, timeout=20) as client:
        document = client.get("/openapi.json").json()
        for path, operations in document["paths"].items():
            for method in {"post", "put"} & {*operations}:
                content = operations[method].get("requestBody", {}).get("content", {})
                body = content.get("application/json", {})
                example = body.get("example", {})
                for name in _fields(document["components"]["schemas"], body.get("schema", {})):
                    answer = client.request(method, path, json={**example, name: value})
                    assert answer.status_code != 500, (path, name)
                    assert answer.status_code < 400 or len(answer.text) < 4500, (path, name)
                    refused += answer.status_code >= 400
    assert refused > 100
