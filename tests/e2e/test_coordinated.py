"""The coordinator over real servers: the idle one is given what the other recorded, and its new
drafter reaches both, bit for bit.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.conftest import PAIR
from tests.e2e.test_lifecycle import QUESTION, until
from tlt_client import Client
from tlt_client.channels.http import HttpSender
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER
from tlt_server.drafter.coordinate import Coordinator
from tlt_server.drafter.peers import Peers

OPTIONS = argparse.Namespace(min_idle=1, quiet_s=1.0, interval_s=1.0, gather_mb=8, hold_s=60.0)


def test_servers_share_samples_and_a_drafter(tmp_path: Path) -> None:
    lines: list[str] = []
    now_s = 0.0
    with ExitStack() as stack:
        clients = {}
        for name in ("a", "b"):
            flags = ["--state-dir", str(tmp_path / name), "--weight-channels", "http"]
            flags += ["--drafter-training", "idle", "--drafter-feature-mb", "16"]
            url = stack.enter_context(ServerProcess(*PAIR, *flags)).url
            clients[url] = stack.enter_context(Client(url, timeout_s=60))
        first, second = clients.values()
        item = {"messages": QUESTION, "seed": 5, "n": 3, "sampling": {"max_tokens": 12}}
        second.generate([item])
        until(lambda: second.drafter()["buffer"]["sequences"] == 3)
        until(lambda: first.drafter()["trainer"]["process"] == "running")
        coordinator = Coordinator(
            Peers(clients, lines.append), OPTIONS, lambda: now_s, said=lines.append
        )
        coordinator.step()
        now_s = 2.0
        coordinator.step()
        assert any("trains, with 3 sequences of others" in line for line in lines), lines
        until(lambda: first.drafter()["buffer"]["sequences"] == 3)
        assert second.drafter()["trainer"]["state"] == "paused"
        HttpSender(first).push_directory(DRAFTER, "drafter-initial-1-0123abcd", role="drafter")
        coordinator.step()
        assert second.weights()["drafter"] == "drafter-initial-1-0123abcd", lines
        assert first.weight_checksums() == second.weight_checksums()
        coordinator.end()
        assert second.drafter()["trainer"]["state"] != "paused"
