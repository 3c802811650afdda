"""A gateway over real servers that others started: one is given what both recorded, trains, adopts
its drafter, and the other one gets it, bit for bit.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_spot_training import FLAGS, JUDGED, TRAINED, items, status, weakened
from tests.e2e.test_training_modes import FORCED
from tests.waiting import until
from tlt_client import Client
from tlt_client.wire import Choice
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET


def said(client: Client) -> list[tuple[list[int], list[float]]]:
    choices: list[Choice] = [result.choices[0] for result in client.generate(items()).results]
    return [(choice.token_ids, choice.logprobs) for choice in choices]


@pytest.mark.long
def test_fleet_shares_the_drafter_that_one_replica_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model", str(TARGET), "--drafter", str(weakened(tmp_path / "weak")), *FLAGS]
    flags += ["--policy", "fixed", "--sd-strategy", "eagle:4x1x5"]
    with ExitStack() as stack:

        def started(*given: str, verb: Sequence[str] = ("serve",)) -> tuple[Client, ServerProcess]:
            server = stack.enter_context(ServerProcess(*given, verb=verb))
            return stack.enter_context(Client(server.url, timeout_s=120)), server

        replicas, links = list[Client](), list[str]()
        with monkeypatch.context() as forced:
            forced.setattr("tlt_server.demo.server.COMMAND", FORCED)
            for name in "ab":
                place = ("--link-port", "0", "--state-dir", str(tmp_path / name))
                client, server = started(*flags, *place)
                replicas.append(client)
                lines = "\n".join(server.lines)
                links += re.findall(r"listening on (\S+) for a gateway", lines)
        for client in replicas:
            until(lambda client=client: status(client)["process"] == "running")  # type: ignore[misc]
        where = ["--launcher", "static", "--addresses", ",".join(links)]
        where += ["--state-dir", str(tmp_path / "gateway")]
        gateway, _ = started(*where, "--", *flags, verb=("fleet", "serve"))
        until(lambda: [each.state for each in gateway.fleet().replicas] == ["ready", "ready"])
        expected = said(gateway)
        recorded = [client.drafter()["buffer"]["sequences"] for client in replicas]
        until(lambda: sum(client.drafter()["buffer"]["sequences"] for client in replicas) >= 46)

        def versions() -> set[str]:
            return {client.weights()["drafter"] for client in replicas}

        until(lambda: len(versions()) == 1 and versions() != {"initial"}, within_s=600)
        places = [each.url for each in gateway.fleet().replicas]
        asked = [httpx.get(f"{url}/weights/files?role=drafter", timeout=60) for url in places]
        [one, two] = [(reply.json()["version"], reply.json()["digest"]) for reply in asked]
        assert one == two and one[1] and gateway.weights()["drafter"] in versions()
        trained, other = sorted(replicas, key=lambda client: -status(client)["adopted"])
        assert status(trained)["adopted"] and not status(other)["adopted"]
        assert status(other)["state"] == "paused" and status(other)["pause_left_s"]
        assert trained.drafter()["buffer"]["sequences"] == TRAINED + JUDGED, recorded
        assert said(gateway) == expected
