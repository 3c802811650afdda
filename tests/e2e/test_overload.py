"""A real server asked for three times what it can do, in the short form of the bench, and for work
that it has no time for.

Rates are not compared here: a busy machine changes them while they are measured. `tlt bench
overload` does that.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.conftest import PAIR
from tests.e2e.test_bench import bench
from tests.e2e.test_lifecycle import LONG, QUESTION, gauge
from tests.waiting import until
from tlt_client import Client
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess


@pytest.mark.long
def test_overload_ends_every_request_once(tmp_path: Path) -> None:
    said = bench("overload", tmp_path / "overload.json")
    assert said["exactly_one_end"]
    assert said["sent"] == sum(said["ended"].values()) + sum(said["refused"].values())
    assert (said["open_sequences"], said["pages_held"], said["untyped_sheds"]) == (0, 0, 0)
    peak, over = said["peak"], said["3x"]
    assert set(over["ends"]) <= {"completed", "late", "overloaded", "queue_full"}
    assert set(peak["ends"]) == {"completed"}
    assert over["ends"]["overloaded"] > 0 and over["ends"]["completed"] > 0 and peak["goodput"] > 0
    assert over["frontend_mib"][-1] - peak["frontend_mib"][0] < 64
    assert over["engine_mib"][-1] - over["engine_mib"][0] < 64


@pytest.mark.long
def test_deadlines_end_waiting_and_decoding_requests() -> None:
    with ServerProcess(
        *PAIR[:2], "--drafter", "none", "--kv-memory-mb", "64", "--max-running", "2"
    ) as server:
        with Client(server.url, timeout_s=60) as client:
            free = gauge(client, "tlt_pages_free")
            started = time.monotonic()
            items = [{"messages": QUESTION, "n": 4}]
            [result] = client.generate(items, sampling=LONG, timeout_s=1.0).results
            assert result.error is not None and result.error.code == "deadline_exceeded"
            assert 1.0 <= time.monotonic() - started < 8.0  # the frontend answers by its own clock
            until(
                lambda: (
                    look(client).open == look(client).running == 0
                    and gauge(client, "tlt_pages_free") == free
                )
            )
            items = [{"id": str(i), "messages": QUESTION} for i in range(4)]
            results = client.generate(
                items, sampling=LONG, timeout_s=5.0, queue_timeout_s=2.5
            ).results
            assert (
                sorted(r.error.code for r in results if r.error is not None)
                == ["deadline_exceeded"] * 2 + ["queue_timeout"] * 2
            )
            until(
                lambda: (
                    look(client).open == look(client).running == 0
                    and gauge(client, "tlt_pages_free") == free
                )
            )
