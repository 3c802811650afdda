"""Weight routes: bodies that become commands, reports that become replies, refusals that name
value, choice and remedy.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.frontend.fake_engine import DIES
from tests.frontend.live_server import LiveServer, live_server, serving
from tests.waiting import until
from tlt_client import Client, ServerError
from tlt_client.arguments import VERSION_MUST
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    Manifest,
    PushWeights,
    RollbackWeights,
    TensorEntry,
)
from tlt_server.wire.events import WeightState

server = serving(scope="function")


def post(server: LiveServer, path: str, body: object = None) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", content=json.dumps(body) if body is not None else b"")


def metric(client: Client, line: str) -> bool:
    return line in client.metrics().splitlines()


def test_manifest_reaches_the_engine_and_the_reply_its_outcome(
    client: Client, server: LiveServer
) -> None:
    tensors = [{"name": "w", "dtype": "float32", "shape": [2], "checksum": "x"}]
    reply = client.update_weights("step-1", "v1", in_flight="drain", tensors=tensors)
    assert (reply["state"], reply["version"], reply["weight_version"]) == ("committed", "v1", "v1")
    assert reply["pause_ms"] == 1.0
    assert reply["phases_s"] == {"read": 0.2, "commit": 0.001} and reply["checksums"]
    command = server.engine.weight_commands[0]
    assert isinstance(command, PushWeights)
    assert command.manifest == Manifest(
        version="v1",
        path="step-1",
        in_flight="drain",
        tensors=[TensorEntry(name="w", dtype="float32", shape=[2], checksum="x")],
    )
    assert client.weights() == {
        "target": "v1",
        "quantization": "none",
        "drafter_quantization": "none",
        "drafter": "",
        "previous": {"target": "v0"},
        "open": {},
        "spooled": False,
        "quarantined": {},
        "groups": [],
        "adapters": {},
        "sockets": "",
        "uploads": [],
        "update": None,
    }
    assert httpx.get(f"{server.url}/weight_info").json() == {
        "weight_version": "v1",
        "drafter_version": "",
    }
    assert client.server_info()["engine"]["weight_version"] == "v1"
    assert metric(client, 'tlt_weight_version_info{version="v1"} 1.0')
    assert not metric(client, 'tlt_weight_version_info{version="v0"} 1.0')
    assert metric(client, 'tlt_weight_pushes_total{result="committed",role="target"} 1.0')
    assert metric(client, 'tlt_weight_push_seconds_count{phase="read"} 1.0')
    assert "tlt_weight_age_seconds" in client.metrics()


def test_trainers_with_a_shared_disk_push_by_directory(server: LiveServer) -> None:
    for body, version in (
        ({"weight_dir": "run/step_3", "lora_name": None}, "named"),
        ({"weight_dir": "run/step_4", "weight_version": "4"}, "4"),
        ({"weight_dir": None, "path": "run/step_5", "version": "5"}, "5"),
        ({"weight_dir": "run/step_6", "update_info": None}, "named"),
    ):
        assert post(server, "/update_weights", body).json()["version"] == version
    assert [(m.path, m.version, m.role) for m in server.engine.manifests] == [
        ("run/step_3", "", "target"),
        ("run/step_4", "4", "target"),
        ("run/step_5", "5", "target"),
        ("run/step_6", "", "target"),
    ]


def test_weights_are_staged_committed_aborted_and_rolled_back(
    client: Client, server: LiveServer
) -> None:
    assert client.update_weights("p", "step 7", commit=False)["state"] == "staged"
    assert client.weights()["target"] == "v0"
    assert client.commit_weights("step 7")["state"] == "committed"
    assert client.abort_weights("step 7")["state"] == "aborted"
    assert client.roll_back_weights(to="v0", in_flight="recompute")["weight_version"] == "v0"
    assert post(server, "/weights/rollback").json()["state"] == "rolled_back"
    assert client.roll_back_weights(to="v0", role="drafter")["state"] == "rolled_back"
    assert post(server, "/weights/rollback", {"role": "all"}).status_code == 400
    rolled = [c.role for c in server.engine.weight_commands if isinstance(c, RollbackWeights)]
    assert rolled == [None, None, "drafter"]
    commands = [
        (type(c), getattr(c, "version", getattr(c, "to", "")))
        for c in server.engine.weight_commands
        if isinstance(c, CommitWeights | AbortWeights | RollbackWeights)
    ]
    assert commands == [
        (CommitWeights, "step 7"),
        (AbortWeights, "step 7"),
        (RollbackWeights, "v0"),
        (RollbackWeights, ""),
        (RollbackWeights, "v0"),
    ]


def test_versions_with_url_characters_are_taken(client: Client, server: LiveServer) -> None:
    versions = ["a?b#c", "100%", "ü"]
    for version in versions:
        client.commit_weights(version)
    commits = [c for c in server.engine.weight_commands if isinstance(c, CommitWeights)]
    assert [commit.version for commit in commits] == versions


def test_invalid_version_names_are_refused_by_rule(server: LiveServer) -> None:
    for path, field in (
        ("/update_weights", "version"),
        ("/update_weight_version", "new_version"),
        ("/update_weights_from_disk", "weight_version"),
    ):
        for version in ("run/7", "a\n", ".."):
            reply = post(server, path, {field: version, "path": "p", "model_path": "p"})
            assert reply.status_code == 400, (path, version)
            words = f"{field} is {version!r}; it must {VERSION_MUST}"
            assert json.dumps(words)[1:-1] in reply.text, (path, version)


def test_engine_refusals_keep_their_http_status(client: Client, server: LiveServer) -> None:
    statuses = {"forbidden": 403, "weights_refused": 422, "conflict": 409, "push_failed": 500}
    for code, status in statuses.items():
        response = post(server, "/update_weights", {"version": "v", "path": code})
        assert response.status_code == status, code
        assert response.json()["error"]["message"].endswith(f"{code}: out of luck")
        assert response.json()["error"]["retryable"] == (code == "push_failed")
        assert metric(client, f'tlt_weight_pushes_total{{result="{code}",role="target"}} 1.0')


def test_weight_checker_sums_remembers_and_compares(client: Client, server: LiveServer) -> None:
    def check(**body: object) -> object:
        return post(server, "/weight_checker", body).json()

    def refused(**body: object) -> str:
        reply = post(server, "/weight_checker", body)
        assert reply.status_code == 400
        return str(reply.json()["error"]["message"])

    assert client.weight_checksums() == {"w": "sha256:v0"}
    assert "snapshot first" in refused(action="compare")
    assert check(action="snapshot") == {"checksums": {"w": "sha256:v0"}}
    assert check(action="compare") == {"match": True, "mismatches": []}
    client.update_weights("p", "v1")
    assert check(action="compare") == {"match": False, "mismatches": ["w"]}
    given = {"w": "sha256:v1", "x": "y"}
    assert check(action="compare", baseline=given) == {"match": False, "mismatches": ["x"]}
    assert post(server, "/weight_checker").json() == {"checksums": {"w": "sha256:v1"}}
    assert check(action="snapshot") == {"checksums": {"w": "sha256:v1"}}
    assert "'sum'" in refused(action="sum")
    # An empty baseline is compared with nothing, not with the snapshot.
    assert "nothing to compare with" in refused(action="compare", baseline={})


def test_checker_reset_marks_all_weights_until_the_next_push(
    client: Client, server: LiveServer
) -> None:
    """A push that was lost is found, as where a reset writes over the weights."""
    before = client.remember_weight_checksums()
    for path, action in (("/weight_checker", "reset"), ("/weights_checker", "reset_tensors")):
        assert "checksums" not in post(server, path, {"action": action}).json()
        assert client.compare_weights(before) == client.compare_weights() == ["w"]
        assert client.weight_checksums() == {"w": "reset"}
        with pytest.raises(ServerError):
            client.update_weights("conflict", "v0")
        assert client.compare_weights(before) == ["w"], "it did not arrive"
        client.update_weights("p", "v0")
        assert client.compare_weights(before) == [] and client.weight_checksums() == before


def test_borrowed_checker_route_also_says_success(client: Client, server: LiveServer) -> None:
    def check(body: dict[str, object], status: int = 200) -> dict[str, object]:
        found = post(server, "/weights_checker", body)
        assert found.status_code == status, found.text
        reply: dict[str, object] = found.json()
        assert reply.pop("message") and reply.pop("success") is (status == 200)
        return reply

    same = {"match": True, "mismatches": []}
    assert check({"action": "compare"}, 400) == {}, "there is nothing to compare with"
    assert check({"action": "snapshot"}) == check({}) == {"checksums": {"w": "sha256:v0"}}
    assert check({"action": "compare"}) == same
    client.update_weights("p", "v1")
    differs = {"match": False, "mismatches": ["w"]}
    assert post(server, "/weight_checker", {"action": "compare"}).json() == differs, "one snapshot"
    assert check({"action": "compare"}, 409) == differs
    assert check({"action": "compare", "baseline": {"w": "sha256:v1"}}) == same


def test_engine_death_during_a_push_is_a_typed_error(client: Client, server: LiveServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(post, server, "/update_weights", {"version": "v", "path": "hangs"})
        until(lambda: bool(server.engine.weight_commands))
        client.generate([{"token_ids": [DIES]}])
        answer = pushed.result(30)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_failed" and answer.json()["error"]["retryable"]
    until(lambda: post(server, "/update_weights", {"version": "v", "path": "p"}).status_code == 200)


def test_only_replies_in_borrowed_forms_show_version_labels(model: Path) -> None:
    name = "1~0123456789ab"
    with live_server(model, engine={"weights": WeightState(target=name)}) as server:
        for path in ("/weight_info", "/get_weight_version", "/model_info", "/server_info"):
            assert httpx.get(server.url + path, timeout=10).json()["weight_version"] == "1", path
        asked = {"input_ids": [65], "sampling_params": {"max_new_tokens": 1}}
        meta = post(server, "/generate", asked).json()["meta_info"]
        assert meta["weight_version"] == "1" and meta["weight_versions"][0]["version"] == name
        assert httpx.get(server.url + "/weights", timeout=10).json()["target"] == name
        disk = {"model_path": "p", "weight_version": name}
        ended = post(server, "/update_weights_from_disk", disk).json()
        assert ended["message"] == "committed: version 1" and ended["new_version"] == "1"
        post(server, "/update_weights", {"weight_dir": "p", "weight_version": "2"})
        post(server, "/update_weights", {"path": "p", "version": "3"})
        pushed = [(each.version, each.labelled) for each in server.engine.manifests]
        assert pushed == [(name, True), ("2", True), ("3", False)]
