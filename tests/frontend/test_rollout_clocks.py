"""Deadlines and times to live of rollouts over a wall clock that jumped between two servers."""

from __future__ import annotations

import time
import zlib
from pathlib import Path

import msgspec
import pytest

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import live_server
from tests.unit.test_journal import FRAMES, HEADER
from tests.waiting import until
from tlt_client import Client
from tlt_server.frontend.rollouts import journal
from tlt_server.frontend.rollouts.journal import Past, RolloutEnd, frame, past

DAY_S = 86400.0


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S], ids=["forward", "back"])
def test_a_jump_of_the_wall_clock_ends_and_keeps_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    with live_server(model, state_dir=tmp_path) as first, Client(first.url) as client:
        done = client.generate([{"prompt": "ab"}], sampling={"max_tokens": 2}, detach=True)
        done.result(20)
        runs = client.generate([{"token_ids": [HANGS]}], timeout_s=100, detach=True)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    with live_server(model, state_dir=tmp_path) as second, Client(second.url) as client:
        until(lambda: len(second.engine.running) == 1)
        kept = {each.header.id: each for each in second.rollouts}
        assert kept.keys() == {done.id, runs.id}
        assert 80 < kept[runs.id].deadline_s - time.monotonic() <= 100
        expiry = kept[done.id].expiry
        assert expiry is not None
        left_s = second.call(lambda: expiry.when() - second._loop.time())
        assert 0 <= second.config.rollout_ttl_s - left_s < 20


def test_after_a_reboot_the_wall_clock_counts_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    at = journal.now()
    assert journal.elapsed_s(at._replace(boot_s=at.boot_s - 5, wall_s=0)) == pytest.approx(5, abs=1)
    for boot in ("another", ""):
        other = at._replace(boot=boot, boot_s=1e12)
        assert journal.elapsed_s(other._replace(wall_s=at.wall_s - 7)) == pytest.approx(7, abs=1)
        assert journal.elapsed_s(other._replace(wall_s=at.wall_s + DAY_S)) == 0


def test_the_end_of_a_journal_from_before_is_found() -> None:
    """Ends had two fields less."""
    payload = msgspec.msgpack.encode({"type": "end", "at_s": 3.5, "tokens": 3})
    length = len(payload).to_bytes(4, "little")
    before = length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little") + payload
    for end in (before, frame(RolloutEnd(3.5, 3))):
        whole = FRAMES[0] + end
        assert past(whole, outputs=False) == Past(HEADER, [], RolloutEnd(3.5, 3), len(whole))
