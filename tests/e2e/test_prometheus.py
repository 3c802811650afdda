"""The compose file's own server command, under load, scraped by a real Prometheus with the shipped
configuration: every panel has data, but those about the drafter's training, which that server has
off; `tests/frontend/test_board.py` shows that a trainer fills these.
"""

from __future__ import annotations

import math
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.frontend.board import BOARD, DOCKER, RULES, board_expressions, plain, titles_in
from tests.processes import completed
from tests.tools import require
from tlt_client import Client, ServerError
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import PAIR, TARGET

pytestmark = pytest.mark.long

KEY = "key-of-the-test"
SCRAPES = 4  # after which rates have values
PATIENCE_S = 180
SHOWN = {
    place: expression
    for place, expression in board_expressions().items()
    if place.rpartition(" ")[0] not in titles_in("Drafter training")
}


def command(place: Path) -> list[str]:
    """Runs as in compose.yaml, with this machine's paths and a free loopback port."""
    (place / "api_key").write_text(KEY + "\n")
    given = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["server"]["command"]
    assert given[0] == "serve"
    moved = {
        "/opt/tlt/pair": PAIR,
        "/run/secrets/": f"{place}/",
        "/weights": place / "weights",
        "/var/lib/tlt/state": place / "state",
        "--host=0.0.0.0": "--host=127.0.0.1",
        "--port=8000": "--port=0",
    }
    flags = given[1:]
    for inside, here in moved.items():
        assert any(inside in flag for flag in flags), inside
        flags = [flag.replace(inside, str(here)) for flag in flags]
    return flags


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def complaints(exposition: str) -> str:
    """Return what promtool says against the names, types and help texts of these metrics."""
    checked = completed(["promtool", "check", "metrics"], input=exposition)
    said = checked.stdout + checked.stderr
    assert bool(said.strip()) == (checked.returncode != 0), (checked.returncode, said)
    return said


class Prometheus:
    def __init__(self, target: str, place: Path) -> None:
        self._target = target
        config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DOCKER / name) for name in config["rule_files"]]
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": [target]}]
        job["authorization"]["credentials_file"] = str(place / "api_key")
        self._file = place / "prometheus.yml"
        self._file.write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{free_port()}"
        self.load_again: Callable[[], None] = lambda: None
        self._log = (place / "prometheus.log").open("w")
        self._command = [
            "prometheus",
            f"--config.file={self._file}",
            f"--storage.tsdb.path={place / 'tsdb'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]

    def __enter__(self) -> Prometheus:
        checked = completed(["promtool", "check", "config", str(self._file)])
        assert checked.returncode == 0, checked.stdout + checked.stderr
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def scraped(self) -> str:
        """Return the server's exposition, as a scrape gets it."""
        headers = {"authorization": f"Bearer {KEY}"}
        reply = httpx.get(f"http://{self._target}/metrics", headers=headers, timeout=60)
        return reply.raise_for_status().text

    def query(self, expression: str) -> list[dict[str, Any]]:
        try:
            reply = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=60)
        except httpx.TransportError:
            return []  # not up yet
        if reply.status_code == 503:
            return []  # up, and still reading its files: a text instead of JSON
        answer = reply.json()
        assert answer["status"] in ("success", "error") and "parse" not in answer.get(
            "error", ""
        ), answer
        return list(answer["data"]["result"]) if answer["status"] == "success" else []

    def shows(self, expression: str) -> bool:
        return any(not math.isnan(float(series["value"][1])) for series in self.query(expression))


def load(client: Client, root: Path) -> None:
    """A round of all that the board shows: sampling under several strategies, a push that fails,
    one that succeeds, a refusal.
    """
    question = [{"role": "user", "content": "Use 3,7,11 to make 300."}]
    for policy in ("beg", "off"):
        client.set_strategy(policy)
        client.generate([{"messages": question, "n": 6}], sampling={"max_tokens": 60})
    client.set_strategy("fixed", "eagle:3x2x6")
    client.generate([{"messages": question, "n": 4}], sampling={"max_tokens": 60})
    for directory in ("none", "step-1"):
        try:
            client.update_weights(root / directory, directory)
        except ServerError as error:
            assert directory == "none", error
    with pytest.raises(ServerError):
        client.generate([{"prompt": "a", "n": 0}])


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    require("prometheus")
    require("promtool")
    place = tmp_path_factory.mktemp("watched")
    perturbed_copy(TARGET, place / "weights" / "step-1")
    with ServerProcess(*command(place)) as server:
        for path, key, status in (
            ("/livez", "", 200),
            ("/metrics", "", 401),
            ("/metrics", KEY, 200),
        ):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert httpx.get(server.url + path, headers=headers, timeout=60).status_code == status
        with (
            Prometheus(server.url.removeprefix("http://"), place) as prometheus,
            Client(server.url, api_key=KEY, timeout_s=60) as client,
        ):
            give_up = time.monotonic() + PATIENCE_S
            while not prometheus.shows(f"count_over_time(up[1m]) >= {SCRAPES} and up == 1"):
                assert time.monotonic() < give_up, (place / "prometheus.log").read_text()
                load(client, place / "weights")
            prometheus.load_again = lambda: load(client, place / "weights")
            yield prometheus


@pytest.mark.parametrize("place", SHOWN)
def test_every_panel_shows_data(place: str, watched: Prometheus) -> None:
    expression = plain(SHOWN[place], interval="1m")
    give_up = time.monotonic() + PATIENCE_S
    while not watched.shows(
        expression if not place.startswith("annotation") else expression.replace("> 0", ">= 0")
    ):
        assert time.monotonic() < give_up, f"no data: {expression}"
        watched.load_again()  # rates look back a minute
        time.sleep(0.5)


def test_board_variable_lists_the_servers(watched: Prometheus) -> None:
    assert (
        BOARD["templating"]["list"][0]["query"]["query"] == "label_values(tlt_build_info, instance)"
    )
    assert watched.shows("tlt_build_info")


def test_alerts_load_and_healthy_server_raises_no_critical_one(watched: Prometheus) -> None:
    (group,) = httpx.get(f"{watched.url}/api/v1/rules", timeout=60).json()["data"]["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in RULES]
    assert all(rule["health"] in ("ok", "unknown") for rule in group["rules"]), group["rules"]
    assert not watched.query('ALERTS{severity="critical"}')


def test_metric_names_follow_prometheus_conventions(watched: Prometheus) -> None:
    exposition = watched.scraped()
    assert "tlt_pages " in exposition and "tlt_engine_figure{" in exposition
    assert complaints(exposition) == ""


def test_promtool_rejects_an_unconventional_metric_name() -> None:
    require("promtool")
    sound = "# HELP tlt_pages KV pages in all.\n# TYPE tlt_pages gauge\ntlt_pages 1\n"
    assert complaints(sound) == ""
    assert "_total" in complaints(sound.replace("tlt_pages", "tlt_pages_total"))
    assert "help" in complaints("# TYPE tlt_pages gauge\ntlt_pages 1\n")
