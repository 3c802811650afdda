"""Rollouts that outlive an engine or a server: the next one resumes them from the journal, also
after a jump of the wall clock.
"""

import asyncio
import os
import time
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import live_server, server_and_client
from tests.frontend.test_rollouts import FIELDS, ITEMS, await_waiter
from tests.frontend.test_supervisor import OFTEN, die
from tests.frontend.tiny_model import write_model
from tests.waiting import meanwhile, until
from tlt_client import Reply
from tlt_client.wire import Choice
from tlt_server.build import Footing, _serve
from tlt_server.errors import StartupError
from tlt_server.frontend.rollouts import journal
from tlt_server.frontend.rollouts.journal import past
from tlt_server.wire.events import WeightState

# Engines that are still under way when a server stops.
SLOW, STEADY = ({"step_s": step_s, "per_step": 1} for step_s in (0.2, 0.05))
PAIRS = {"step_s": 0.01, "per_step": 2}


def choices(reply: Reply) -> dict[str, list[Choice]]:
    return {result.id: list(result.choices) for result in reply.results}


def test_next_engine_continues_only_opted_in_rollouts(model: Path) -> None:
    with server_and_client(model, engine=STEADY, **OFTEN) as (server, client):
        rollout = client.generate(
            [{**item, "seed": 9} for item in ITEMS], sampling=FIELDS, detach=True
        )
        plain = meanwhile(lambda: client.generate([{"token_ids": [HANGS]}]))
        for least in (3, 20):
            until(lambda least=least: rollout.fetch().progress.tokens > least)  # type: ignore[misc]
            die(server, least)
        [failed] = plain.result(30).results
        assert failed.error is not None and failed.error.code == "engine_failed"
        reply = rollout.result(30)
        assert all(request.generated for request in server.engine.submitted)
    with server_and_client(model, engine={"per_step": 1}) as (undisturbed, client):
        expected = client.generate([{**item, "seed": 9} for item in ITEMS], sampling=FIELDS)
    assert reply == expected  # also the figures: one token a step here


def test_the_next_server_continues_written_rollouts(model: Path, tmp_path: Path) -> None:
    """The first one stops in the middle, with some tokens, a stop string half seen, and one item
    done.
    """
    items = [
        {"id": "c", "prompt": "ab", "sampling": {"max_tokens": 3}},
        *({**item, "seed": 9} for item in ITEMS),
    ]
    with server_and_client(model) as (undisturbed, client):
        expected = client.generate(items, sampling=FIELDS)
    with server_and_client(model, engine=SLOW, state_dir=tmp_path) as (first, client):
        rollout = client.generate(items, sampling=FIELDS, detach=True, idempotency_key="k")
        until(lambda: rollout.fetch().progress.tokens >= 13)
        waiting = meanwhile(
            lambda: httpx.get(
                f"{first.url}/rollouts/{rollout.id}", params={"wait_s": 60}, timeout=70
            )
        )
        await_waiter(first, rollout.id)
    told = waiting.result(30)
    assert told.status_code == 503 and "state_dir" in told.json()["error"]["message"]
    with server_and_client(model, engine=PAIRS, state_dir=tmp_path) as (second, client):
        again = client.generate(items, sampling=FIELDS, detach=True, idempotency_key="k")
        assert again.id == rollout.id
        reply = client.rollout(rollout.id).result(30)
        assert {request.id for request in second.engine.submitted}
        assert all(request.generated for request in second.engine.submitted)
        for name, found in choices(reply).items():
            for mine, theirs in zip(found, choices(expected)[name], strict=True):
                assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
                assert (mine.logprobs, mine.top_logprobs) == (theirs.logprobs, theirs.top_logprobs)
                assert (mine.prompt_logprobs, mine.seed) == (theirs.prompt_logprobs, theirs.seed)
                assert mine.finish_reason == theirs.finish_reason
                assert mine.stop_reason == theirs.stop_reason
                assert mine.sd.steps > theirs.sd.steps, "figures cover both parts"
        assert (
            f"tlt_resumed_sequences_total {float(len(second.engine.submitted))}" in client.metrics()
        )
    with server_and_client(model, state_dir=tmp_path) as (third, client):
        assert client.rollout(rollout.id).result(30) == reply and not third.engine.submitted
        client.rollout(rollout.id).delete()
        assert not list((tmp_path / "rollouts").glob("*.journal"))


def test_tokens_keep_their_version_over_a_restart(model: Path, tmp_path: Path) -> None:
    with server_and_client(model, engine=SLOW, state_dir=tmp_path) as (first, client):
        rollout = client.generate([{"prompt": "abc"}], sampling={"max_tokens": 30}, detach=True)
        until(lambda: rollout.fetch().progress.tokens > 3)
    [path] = (tmp_path / "rollouts").glob("*.journal")
    said = past(path.read_bytes())
    assert said is not None
    cut = sum(len(output.token_ids) for output in said.outputs)
    with server_and_client(
        model, engine={"weights": WeightState(target="v7")}, state_dir=tmp_path
    ) as (second, client):
        [choice] = client.rollout(rollout.id).result(30).results[0].choices
        assert [(span.version, span.start, span.end) for span in choice.weight_versions] == [
            ("v0", 0, cut),
            ("v7", cut, 30),
        ]


def test_torn_journal_is_cut_and_headerless_one_is_removed(model: Path, tmp_path: Path) -> None:
    with server_and_client(model, engine=SLOW, state_dir=tmp_path) as (first, client):
        rollout = client.generate(
            [{"prompt": "abc", "n": 2}], sampling={"max_tokens": 20}, detach=True
        )
        until(lambda: rollout.fetch().progress.tokens > 8)
    path = tmp_path / "rollouts" / f"{rollout.id}.journal"
    os.truncate(path, path.stat().st_size - 5)
    (tmp_path / "rollouts" / "r-1.journal").write_bytes(path.read_bytes()[:20])
    with server_and_client(model, state_dir=tmp_path) as (second, client):
        assert [summary.id for summary in client.rollouts()] == [rollout.id]
        assert [
            choice.text for choice in client.rollout(rollout.id).result(30).results[0].choices
        ] == ["abcabcabcabcabcabcab"] * 2


def test_rollout_deadline_counts_time_without_a_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_and_client(model, state_dir=tmp_path) as (first, client):
        rollout = client.generate([{"token_ids": [HANGS]}], timeout_s=100, detach=True)
    now = journal.now
    monkeypatch.setattr(journal, "now", lambda: now()._replace(boot_s=now().boot_s + 100))
    with server_and_client(model, state_dir=tmp_path) as (second, client):
        [result] = client.rollout(rollout.id).result(30).results
        assert result.error is not None and result.error.code == "deadline_exceeded"


def test_state_directory_in_use_is_left_alone(model: Path, tmp_path: Path) -> None:
    def started(*given: Any) -> Footing:
        raise AssertionError("engines or a fleet were started")

    with live_server(model, state_dir=tmp_path, weight_channels="http") as first:
        (tmp_path / "uploads" / "part").touch()
        with pytest.raises(StartupError, match="in use by another server"):
            asyncio.run(_serve(first.config.model_copy(update={"port": 0}), started))
        assert (tmp_path / "uploads" / "part").exists()


def test_rollout_of_a_different_model_is_not_continued(model: Path, tmp_path: Path) -> None:
    with server_and_client(model, state_dir=tmp_path / "state") as (first, client):
        rollout = client.generate([{"token_ids": [HANGS]}], detach=True)
    other = tmp_path / "other"
    other.mkdir()
    with server_and_client(write_model(other), state_dir=tmp_path / "state") as (second, client):
        [result] = client.rollout(rollout.id).result(30).results
        assert result.error is not None and result.error.code == "conflict"
        assert str(model) in result.error.message
        assert not second.engine.submitted
    assert (tmp_path / "state" / "rollouts" / f"{rollout.id}.journal").stat().st_size > 0


def test_resumed_rollouts_ignore_bounds_but_copies_are_dropped(model: Path, tmp_path: Path) -> None:
    with server_and_client(model, engine=SLOW, state_dir=tmp_path) as (first, client):
        rollouts = [
            client.generate([{"prompt": "abc", "n": 4}], sampling={"max_tokens": 20}, detach=True)
            for _ in range(2)
        ]
        until(lambda: all(rollout.fetch().progress.tokens > 8 for rollout in rollouts))
    path = tmp_path / "rollouts" / f"{rollouts[0].id}.journal"
    path.with_name("copy.journal").write_bytes(path.read_bytes())
    with server_and_client(model, state_dir=tmp_path, max_queue=1) as (second, client):
        for rollout in rollouts:
            assert [
                choice.text for choice in client.rollout(rollout.id).result(30).results[0].choices
            ] == ["abcabcabcabcabcabcab"] * 4
        assert len(client.rollouts()) == 2 and path.with_name("copy.journal.damaged").exists()


def test_rollout_missing_only_its_end_record_is_done(model: Path, tmp_path: Path) -> None:
    with server_and_client(model, state_dir=tmp_path) as (first, client):
        rollout = client.generate([{"prompt": "abc"}], sampling={"max_tokens": 5}, detach=True)
        reply = rollout.result(30)
    path = tmp_path / "rollouts" / f"{rollout.id}.journal"
    os.truncate(path, path.stat().st_size - 1)
    with server_and_client(model, state_dir=tmp_path) as (second, client):
        assert client.rollout(rollout.id).result(30).results == reply.results
        assert not second.engine.submitted


def test_deadline_ends_a_rollout_without_a_fitting_engine(model: Path, tmp_path: Path) -> None:
    with server_and_client(model, engine=STEADY, state_dir=tmp_path) as (first, client):
        client.update_weights("p", "v1")
        rollout = client.generate(
            [{"prompt": "abc"}], sampling={"max_tokens": 200}, timeout_s=3, detach=True
        )
        until(lambda: rollout.fetch().progress.tokens > 3)
    with server_and_client(
        model, engine={"lost": {"target": "v1 is gone"}}, state_dir=tmp_path
    ) as (second, client):
        [result] = client.rollout(rollout.id).result(30).results
        assert result.error is not None and result.error.code == "deadline_exceeded"
        assert not second.engine.submitted


def test_rollout_of_other_numerics_waits_for_a_fitting_server(model: Path, tmp_path: Path) -> None:
    with server_and_client(model, engine=STEADY, state_dir=tmp_path) as (first, client):
        rollout = client.generate([{"prompt": "a"}], sampling={"max_tokens": 90}, detach=True)
        until(lambda: rollout.fetch().progress.tokens > 3)
    with server_and_client(model, engine={"leaves": 2}, state_dir=tmp_path) as (second, client):
        [result] = client.rollout(rollout.id).result(30).results
        assert result.error is not None and result.error.code == "conflict"
        assert "leaves is 2 here and 1 there" in result.error.message
        assert not second.engine.submitted
    with server_and_client(model, state_dir=tmp_path) as (third, client):
        [result] = client.rollout(rollout.id).result(30).results
        assert result.choices[0].text == "a" * 90
        [resumed] = third.engine.submitted
        assert len(resumed.generated) > 3


def test_fetching_outputs_of_an_unknown_format_is_a_typed_error(
    model: Path, tmp_path: Path
) -> None:
    with server_and_client(model, state_dir=tmp_path) as (server, client):
        rollout = client.generate([{"prompt": "ab"}], sampling={"max_tokens": 4}, detach=True)
        assert rollout.result(30).results
        path = tmp_path / "rollouts" / f"{rollout.id}.journal"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:4], "little")
        path.write_bytes(data[:end] + framed(b"\x81\xa4type\xa5grown") + data[end:])
    with server_and_client(model, state_dir=tmp_path) as (server, client):
        assert [one.status for one in client.rollouts()] == ["done"]
        refused = httpx.get(f"{server.url}/rollouts/{rollout.id}")
        assert refused.status_code == 507 and "another version" in refused.text


def framed(payload: bytes) -> bytes:
    length = len(payload).to_bytes(4, "little")
    return length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little") + payload


DAY_S = 86400.0


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S], ids=["forward", "back"])
def test_wall_clock_jump_neither_ends_nor_prolongs_rollouts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    with server_and_client(model, state_dir=tmp_path) as (first, client):
        done = client.generate([{"prompt": "ab"}], sampling={"max_tokens": 2}, detach=True)
        done.result(20)
        runs = client.generate([{"token_ids": [HANGS]}], timeout_s=100, detach=True)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    with server_and_client(model, state_dir=tmp_path) as (second, client):
        until(lambda: len(second.engine.running) == 1)
        kept = {each.header.id: each for each in second.rollouts}
        assert kept.keys() == {done.id, runs.id}
        assert 80 < kept[runs.id].deadline_s - time.monotonic() <= 100
        expiry = kept[done.id].expiry
        assert expiry is not None
        left_s = second.call(lambda: expiry.when() - second._loop.time())
        assert 0 <= second.config.rollout_ttl_s - left_s < 20
