"""Names in paths, however they are spelled: none reaches a thing of another name."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_adapters import load
from tests.frontend.test_auth import documented
from tlt_client.arguments import is_adapter, is_version
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    LeaveGroup,
    PushWeights,
    UnloadAdapter,
)

ROUTES = [(method, path) for method, path in documented() if "{" in path]
SPELLED = (  # with the name of a thing that there is
    *(
        "{}%2F",
        "%2F{}",
        "{}%2f",
        "{}%2Fcommit",
        "{}%2Fcancel",
        "..%2Fadapters%2F{}",
        "{}%2F..%2F{}",
    ),
    *("{}%00", "{}%0A", "{}%20", "{}%5C", "{}%25", "{}%252F", "{}%3Fa", "{}%23", "{}%E2%80%AE"),
    *("{}%FF", "{}%", "{}%zz", "{}//", ".", "..", "%2E%2E", "%2F", "x" * 5000),
)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    places = {name: tmp_path_factory.mktemp(name) for name in ("state_dir", "weight_root")}
    channels = "disk,http,broadcast"
    with live_server(
        model, served_model_name="tiny", max_loras=2, weight_channels=channels, **places
    ) as running:
        yield running


@pytest.fixture(scope="module")
def names(server: LiveServer) -> dict[str, str]:
    """Return by the beginning of a path the name of a thing that there is."""
    load(server, "x")
    response = httpx.post(f"{server.url}/v1/responses", json={"input": "a"}).json()["id"]
    asked = {"requests": [{"prompt": "a"}], "detach": True}
    rollout = httpx.post(f"{server.url}/generate", json=asked).json()["id"]
    return {"v1/responses": response, "rollouts": rollout, "v1/models": "tiny", "adapters": "x"}


def valid(path: str, name: str) -> bool:
    """Return True if there may be a thing of this name."""
    if path.startswith("/adapters"):
        return is_adapter(name)
    return is_version(name) if path.startswith("/weights") else path.startswith("/weight_groups")


def ask(connection: http.client.HTTPConnection, method: str, target: str) -> tuple[int, str]:
    """Send a target as it is spelled; libraries would tidy it."""
    connection.putrequest(method, target)
    connection.putheader("content-length", "0")
    connection.endheaders()
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_spelling_of_a_name_reaches_a_different_object(
    method: str, path: str, server: LiveServer, names: dict[str, str]
) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    known = next((names[begin] for begin in names if path.startswith(f"/{begin}")), "x")
    begin, _, end = path.partition("{")
    end = end.partition("}")[2].replace("{part}", "model.safetensors")
    for spelled in SPELLED:
        name = spelled.replace("{}", known)
        status, text = ask(connection, method, begin + name + end)
        if status in (200, 507) and valid(path, unquote(name)) and unquote(name) != known:
            continue  # another name, which the engine here has as well
        assert 400 <= status < 500, (name, status, text)
        error = json.loads(text)["error"]
        assert error["message"] and error["code"] not in ("internal", None), (name, text)
    for begin, kept in names.items():
        if begin != "adapters":
            assert httpx.get(f"{server.url}/{begin}/{kept}").status_code == 200, begin
    for command in server.engine.weight_commands:
        match command:
            case CommitWeights() | AbortWeights():
                assert command.version != "x"
            case LeaveGroup():
                assert command.name != "x"
            case UnloadAdapter():
                assert command.name != "x"
            case _:
                assert isinstance(command, PushWeights)


def test_name_with_a_slash_may_be_percent_encoded(model: Path) -> None:
    with live_server(model, served_model_name="org/tiny") as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        for name in ("org/tiny", "org%2Ftiny", "org%2ftiny", "org/tiny/"):
            status, text = ask(connection, "GET", f"/v1/models/{name}")
            assert status == 200 and json.loads(text)["id"] == "org/tiny", name
        for name in ("org%252Ftiny", "org%2Ftiny%2F", "org%2Ftiny%0A", "org", "tiny"):
            assert ask(connection, "GET", f"/v1/models/{name}")[0] == 404, name


def test_path_with_an_encoded_suffix_is_not_found(server: LiveServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    for path in ("/version%0A", "/version%2F", "/v1%2Fmodels", "/v1/models%0A"):
        status, text = ask(connection, "GET", path)
        assert status == 404 and "there is no " in text, path
    assert ask(connection, "GET", "/version/")[0] == ask(connection, "GET", "/version")[0] == 200
