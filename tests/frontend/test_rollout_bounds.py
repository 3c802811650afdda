"""Rollouts are bounded: their number, their time, the bytes of their journals and the disk."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import LiveServer, live_server, server_and_client
from tests.frontend.test_rollouts import post
from tests.waiting import until
from tlt_server.config import load
from tlt_server.errors import StorageFailed
from tlt_server.frontend.rollouts.journal import Journal
from tlt_server.frontend.rollouts.rollout import KeptRollout
from tlt_server.frontend.rollouts.shelf import FORGOTTEN, Shelf
from tlt_server.metrics import Metrics


def test_kept_rollouts_are_bounded_and_fetched_ones_are_evicted(model: Path) -> None:
    with live_server(model, max_rollouts=2) as server:
        ids = [post(server, detach=True).json()["id"] for _ in range(2)]
        until(lambda: all(rollout.done_s for rollout in server.rollouts))
        full = post(server, detach=True)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert "max_rollouts" in full.json()["error"]["message"]
        assert int(full.headers["retry-after"]) > 0
        httpx.get(f"{server.url}/rollouts/{ids[1]}")
        new = post(server, detach=True).json()["id"]
        kept = [rollout["id"] for rollout in httpx.get(f"{server.url}/rollouts").json()["rollouts"]]
        assert kept == [ids[0], new]
        assert len(list((server.directory / "rollouts").glob("*.journal"))) == 2


def test_answered_idempotent_requests_never_fill_the_limit(model: Path) -> None:
    with live_server(model, max_rollouts=3) as server:
        assert [post(server, f"k{i}").status_code for i in range(12)] == [200] * 12
        assert len(list(server.rollouts)) == 3


def test_finished_rollouts_are_removed_after_their_time(model: Path) -> None:
    with live_server(model, rollout_ttl_s=3) as server:
        id = post(server, "brief", detach=True).json()["id"]
        assert (
            httpx.get(f"{server.url}/rollouts/{id}?wait_s=30", timeout=40).json()["status"]
            == "done"
        )
        until(lambda: httpx.get(f"{server.url}/rollouts/{id}").status_code == 404)
        assert not list((server.directory / "rollouts").glob("*.journal"))
        assert post(server, "brief", detach=True).json()["id"] != id


def test_journals_over_their_limit_end_a_rollout_and_free_room(model: Path) -> None:
    with live_server(model, max_rollout_mb=1, max_queue=20000, max_n=20000) as server:
        rollout = post(
            server,
            detach=True,
            requests=[{"prompt": "abc", "n": 2000}, {"id": "x", "prompt": "a"}],
            sampling={"max_tokens": 500},
        )
        reply = httpx.get(
            f"{server.url}/rollouts/{rollout.json()['id']}?wait_s=30", timeout=40
        ).json()
        errors = [result["error"] for result in reply["results"]]
        assert reply["status"] == "done"
        assert {error["code"] for error in errors} == {"storage_failed"}
        assert "max_rollout_mb" in errors[0]["message"] and errors[0]["retryable"]
        until(lambda: len(server.client) == 0 and not server.engine.running)
        assert not list((server.directory / "rollouts").glob("*.journal"))
        assert (
            httpx.get(f"{server.url}/rollouts/{rollout.json()['id']}").json()["results"]
            == reply["results"]
        )
        assert post(server, "after").status_code == 200
        refused = post(server, detach=True, requests=[{"prompt": "a" * 500, "n": 20000}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_failed")


def failing(after: int) -> Callable[[Journal, bytes], None]:
    real, left = Journal.append, [after]

    def append(journal: Journal, framed: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageFailed("no space left on device")
        real(journal, framed)

    return append


@pytest.mark.parametrize("after", [0, 1, 3])
def test_full_disk_fails_only_the_rollout_being_written(
    server: LiveServer, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "append", failing(after))
    response = post(server, "disk", sampling={"max_tokens": 400})
    monkeypatch.undo()
    if after == 0:
        assert response.status_code == 507
    else:
        assert [result["error"]["code"] for result in response.json()["results"]] == [
            "storage_failed"
        ]
        httpx.delete(f"{server.url}/rollouts/{response.headers['x-rollout-id']}").raise_for_status()
    until(lambda: len(server.client) == 0)
    assert post(server, "disk").status_code == 200
    httpx.delete(
        f"{server.url}/rollouts/{post(server, 'disk').headers['x-rollout-id']}"
    ).raise_for_status()


def test_metrics_count_kept_rollouts(model: Path) -> None:
    with server_and_client(model) as (server, client):
        client.generate([{"prompt": "a"}], detach=True).result(30)
        client.generate([{"token_ids": [HANGS]}], detach=True)
        text = client.metrics()
        assert 'tlt_rollouts{status="running"} 1.0' in text
        assert 'tlt_rollouts{status="done"} 1.0' in text
        size = sum(
            path.stat().st_size for path in (server.directory / "rollouts").glob("*.journal")
        )
        assert f"tlt_rollout_bytes {float(size)}" in text


TENANTS = "a scopes=data name=a\nb scopes=data name=b\n"


def test_rollouts_of_a_busy_key_make_room_for_a_second_key(model: Path) -> None:
    with live_server(model, max_rollouts=4, keys=TENANTS) as server:

        def detach(key: str, **item: Any) -> httpx.Response:
            return httpx.post(
                f"{server.url}/generate",
                json={"requests": [item], "sampling": {"max_tokens": 2}, "detach": True},
                headers={"authorization": f"Bearer {key}"},
            )

        def kept(key: str) -> list[str]:
            reply = httpx.get(f"{server.url}/rollouts", headers={"authorization": f"Bearer {key}"})
            return [f"{rollout['status']}" for rollout in reply.json()["rollouts"]]

        assert detach("a", token_ids=[HANGS]).status_code == 202
        for _ in range(3):
            assert detach("a", prompt="x").status_code == 202
        until(lambda: kept("a") == ["running", "done", "done", "done"])
        full = detach("a", prompt="x")
        assert full.status_code == 429 and "4 of them this key's" in full.text
        assert [detach("b", token_ids=[HANGS]).status_code for _ in range(2)] == [202, 202]
        assert kept("a") == ["running", "done"], "the oldest that were done made room"
        assert detach("b", token_ids=[HANGS]).status_code == 429, "b has its share"
        assert detach("a", token_ids=[HANGS]).status_code == 429, "and so has a"


def test_key_within_its_share_is_admitted_to_a_full_server(model: Path) -> None:
    with live_server(model, max_rollouts=2, keys=TENANTS) as server:
        body = {"requests": [{"token_ids": [HANGS]}], "detach": True}
        statuses = [
            httpx.post(
                f"{server.url}/generate", json=body, headers={"authorization": f"Bearer {key}"}
            ).status_code
            for key in "aaabb"
        ]
        assert statuses == [202, 202, 429, 202, 429]


def test_new_rollout_evicts_a_few_old_ones_at_most(model: Path) -> None:
    config = load({"model": str(model), "max_rollouts": "100"})
    shelf = Shelf(config, Metrics())
    for i in range(180):  # others' rollouts ran when these were taken
        header = SimpleNamespace(id=str(i), owner="greedy", key="")
        shelf._by_id[str(i)] = cast(
            KeptRollout,
            SimpleNamespace(
                header=header,
                done_s=1.0,
                fetched=True,
                status="done",
                task=None,
                expiry=None,
                journal=None,
                path=model / "gone",
                bytes=0,
            ),
        )
    counts = []
    while len([*shelf]) >= 100:
        shelf.check_room("other")
        counts.append(len([*shelf]))
    assert counts[0] == 180 - FORGOTTEN and counts[-1] == 99
    assert len(counts) == -(-81 // FORGOTTEN)


def test_a_failed_journal_keeps_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: int, length: int) -> None:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(os, "ftruncate", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageFailed):
        Journal(tmp_path / "a.journal")
    assert len(os.listdir("/proc/self/fd")) == before


def test_finished_rollouts_hold_no_file_open(model: Path) -> None:
    def journals() -> list[str]:
        """Return the open journals of this server; those of earlier ones may wait for a garbage
        collection.
        """
        opened = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        paths = [os.readlink(each) for each in opened if each.is_symlink()]
        kept = f"{server.directory}/rollouts/"
        return [path for path in paths if path.startswith(kept) and path.endswith(".journal")]

    with live_server(model, max_rollouts=8) as server:
        hangs = post(server, detach=True, requests=[{"token_ids": [HANGS]}]).json()["id"]
        url = f"{server.url}/rollouts"
        ids = [post(server, detach=True).json()["id"] for _ in range(3)]
        first = [httpx.get(f"{url}/{id}?wait_s=30").json()["results"] for id in ids[:2]]
        until(lambda: httpx.get(f"{url}/{ids[2]}?wait_s=1").json()["status"] == "done")
        assert len(journals()) == 1, "that of the one that runs"
        again = [httpx.get(f"{url}/{id}").json()["results"] for id in ids]
        assert again[:2] == first and again[2]
        httpx.delete(f"{url}/{hangs}")
        until(lambda: not journals())
