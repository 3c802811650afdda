"""Bodies of the weight routes that are refused before they reach the engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer
from tests.frontend.test_weights_routes import post
from tlt_server.wire.commands import LeaveGroup


@pytest.fixture(autouse=True)
def untouched(server: LiveServer) -> None:
    server.engine.weight_commands.clear()


def test_malformed_group_name_is_refused_with_its_pattern(server: LiveServer) -> None:
    reply = post(
        server,
        "/weight_groups",
        {"name": "a b", "master_address": "127.0.0.1", "master_port": 1, "world_size": 2},
    )
    assert (
        reply.status_code == 400
        and reply.json()["error"]["message"] == "name is 'a b'; it must match ^[A-Za-z0-9._-]+$"
    )


REFUSED: dict[str, tuple[str, ...]] = {
    "[1]": ("must be a JSON object",),
    "{": ("not JSON",),
    "{}": ("version is missing",),
    '{"version": "v"}': ("path is missing",),
    '{"version": "v", "path": ""}': ("path is ''",),
    '{"version": 3, "path": "p"}': ("version is 3", "string"),
    '{"version": "", "path": "p"}': ("version is ''",),
    '{"version": "v", "path": "p", "rol": "all"}': ("unknown field rol", "did you mean role?"),
    '{"version": "v", "path": "p", "role": "draft"}': ("role is 'draft'", "'drafter'"),
    '{"version": "v", "path": "p", "role": "all"}': ("drafter_path", "role all needs"),
    '{"version": "v", "path": "p", "drafter_path": "q"}': ("'q'", "other roles only path"),
    '{"version": "v", "path": "p", "channel": "nccl"}': ("channel is 'nccl'", "disk"),
    '{"version": "v", "path": "p", "in_flight": "stop"}': ("in_flight is 'stop'", "'drain'"),
    '{"version": "v", "path": "p", "commit": "no"}': ("commit is 'no'",),
    '{"version": "v", "path": "p", "tensors": [{"name": "w", "chksum": "x"}]}': (
        "tensors[0].chksum",
        "did you mean checksum?",
    ),
    '{"version": "v", "path": "p", "tensors": [{"dtype": "float32"}]}': (
        "tensors[0].name is missing",
    ),
    '{"version": "v", "path": "p", "tensors": 3}': ("tensors is 3",),
    '{"version": "v", "path": "p", "tensors": [{"name": "w", "shape": [-1]}]}': (
        "tensors[0].shape[0] is -1",
        "at least 0",
    ),
    '{"version": "v", "path": "p", "tensors": [{"name": "w", "shape": [281474976710657]}]}': (
        "at most 281474976710656",
    ),
    '{"version": "v", "path": "p", "tensors": [{"name": "w", "shape": [1, 1, 1, 1, 1, 1, '
    "1, 1, 1]}]}": ("tensors[0].shape", "8"),
    '{"version": "v", "path": "p", "tensors": [{"name": "' + "w" * 257 + '"}]}': (
        "tensors[0].name",
        "256",
    ),
    '{"version": "v", "path": "p", "tensors": [{"name": "w", "dtype": "' + "f" * 41 + '"}]}': (
        "tensors[0].dtype",
        "40",
    ),
    '{"version": "v", "path": "p", "tensors": [{"name": "w", "checksum": "' + "0" * 81 + '"}]}': (
        "tensors[0].checksum",
        "80",
    ),
    '{"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1, 1, 1, 1, '
    "1, 1, 1, 1, 1]]}}": ("shapes[0]", "8"),
    '{"version": "a\\nb", "path": "p"}': ("version is",),
    '{"version": "a/b", "path": "p"}': ("version is 'a/b'",),
    '{"version": "' + "v" * 300 + '", "path": "p"}': ("256",),
    '{"weight_dir": null}': ("weight_dir is null", "weight root", "update_info"),
    '{"weight_dir": null, "lora_name": null, "update_info": null}': ("weight_dir is null",),
    '{"weight_dir": ""}': ("weight_dir is ''", "weight root"),
    '{"weight_dir": null, "version": "v"}': ("path is missing",),
    '{"weight_dir": "p", "weight_version": 4}': ("version is 4",),
    '{"update_info": {"names": []}}': ("update_info", "dtype_names is missing"),
    '{"update_info": {"names": [], "dtype_names": [], "shapes": []}}': (
        "0 names",
        "one of each for every tensor",
    ),
    '{"update_info": []}': ("update_info is []",),
    '{"update_info": [{"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}, '
    '{"names": ["v"], "dtype_names": [], "shapes": []}]}': (
        "1 names, 0 dtypes and 0 shapes",
        "in the order",
    ),
    '{"version": "v", "channel": "http"}': ("tensors is missing", "channel http needs tensors"),
    '{"version": "v", "channel": "http", "path": "p", "tensors": [{"name": "w", '
    '"checksum": "x"}]}': ("path is 'p'", "leave it out"),
    '{"version": "v", "channel": "http", "tensors": [{"name": "w"}]}': ("'w' has no checksum",),
    '{"version": "v", "channel": "broadcast", "tensors": [{"name": "w"}]}': ("group is missing",),
    '{"version": "v", "channel": "broadcast", "group": "g", "tensors": [{"name": "w", '
    '"dtype": "float32"}]}': ("no dtype and shape",),
    '{"version": "v", "channel": "ipc", "tensors": [{"name": "w", "dtype": "float32", '
    '"shape": []}]}': ("path is missing", "needs path"),
    '{"version": "v", "channel": "ipc", "path": "s", "tensors": [{"name": "w", "shape": [1]}]}': (
        "'w' has no dtype and shape",
        "ipc",
    ),
    '{"version": "v", "channel": "ipc", "path": "s", "drafter_path": "d"}': ("tensors is missing",),
    '{"version": "v", "path": "p", "group": "g"}': ("group is 'g'", "channel disk does not take"),
    '{"version": "v", "path": "p", "partial": true}': (
        "partial is true",
        "channel disk does not take",
    ),
}


@pytest.mark.parametrize("body", REFUSED)
def test_a_bad_body_pushes_nothing(body: str, server: LiveServer) -> None:
    response = httpx.post(f"{server.url}/update_weights", content=body)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_request"
    for part in REFUSED[body]:
        assert part in response.json()["error"]["message"]
    assert all(isinstance(command, LeaveGroup) for command in server.engine.weight_commands), (
        "nothing but what it spoils is left"
    )


def test_a_bad_rollback_never_reaches_the_engine(server: LiveServer) -> None:
    assert (
        "did you mean to?"
        in post(server, "/weights/rollback", {"tp": "v"}).json()["error"]["message"]
    )
    assert (
        "in_flight is 'later'"
        in post(server, "/weights/rollback", {"in_flight": "later"}).json()["error"]["message"]
    )
    assert not server.engine.weight_commands


def _fields(schemas: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """Return the names of an object's fields, and of those of all its forms."""
    while "$ref" in schema:
        schema = schemas[schema["$ref"].split("/")[-1]]
    forms = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    return {*schema.get("properties", {})}.union(*(_fields(schemas, form) for form in forms))


@pytest.mark.parametrize("value", ["a" * 4000, "1" * 10_000])
def test_no_refusal_quotes_a_long_field_at_length(value: str, server: LiveServer) -> None:
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
