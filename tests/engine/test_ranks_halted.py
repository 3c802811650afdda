"""Sleeps over two ranks when one of them fails: nothing has changed, or the engine's epoch ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.halting import done, send
from tests.engine.pushing import Pushable
from tests.engine.ranks_of_tests import run_rank_of_tests
from tests.engine.test_engine import requests
from tests.engine.test_ranks import root, settings
from tests.engine.two_ranks import ranks_of, two_ranks
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import EngineFailed
from tlt_server.wire.commands import Sleep, WakeUp

__all__ = ["root", "settings"]  # fixtures


@pytest.fixture(scope="module")
def short(settings: EngineSettings) -> Iterator[Pushable]:
    with pytest.MonkeyPatch.context() as patch:
        run_rank_of_tests(patch, "short_rank")
        with two_ranks(settings) as engine:
            yield engine


def test_all_ranks_sleep_on_if_one_has_no_room(short: Pushable) -> None:
    done(short, Sleep("s", ("kv_cache",)))
    report = send(short, WakeUp("w", ("kv_cache",)))
    assert report is not None and report.error is not None
    assert report.error[0] == "unavailable" and "sleeps on" in report.error[1]
    done(short, WakeUp("again", ("kv_cache",)))
    short.submit(*requests(2))
    short.finish()


def test_rank_lost_while_staging_ends_the_epoch(
    short: Pushable, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*told: object) -> None:
        raise EngineFailed("rank 1 did not answer in 120 s")

    monkeypatch.setattr(ranks_of(short), "hand_over", lost)
    with pytest.raises(EngineFailed, match="did not answer"):
        short.push(root / "new", "lost")
    short.engine.pushes.transaction.close()


def test_rank_death_in_a_sleep_ends_the_epoch(short: Pushable) -> None:
    done(short, Sleep("s2", ("kv_cache",)))
    [process] = ranks_of(short)._processes
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    with pytest.raises(EngineFailed, match="rank 1 .* ended"):
        short.engine.halt.apply(WakeUp("dead", ("kv_cache",)))
