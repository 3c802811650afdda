"""A server's end, and its requests': clients that leave, an engine that dies, SIGTERM, model
directories that cannot be used.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import PAIR
from tests.mostly_long import mostly_long
from tests.waiting import until
from tlt_client import Client
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET
from tlt_server.errors import StartupError

QUESTION = [{"role": "user", "content": "Use 3,7,11 to make 300."}]
LONG = {"max_tokens": 3000, "ignore_eos": True}
FAST_START = ("--model", str(TARGET), "--drafter", "none", "--kv-memory-mb", "64")


def gauge(client: Client, name: str) -> float:
    return next(
        s.value
        for family in text_string_to_metric_families(client.metrics())
        for s in family.samples
        if s.name == name
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_departed_client_frees_its_pages_at_once(
    client: Client, server: ServerProcess, stream: bool
) -> None:
    client.set_strategy("beg")
    until(lambda: look(client).open == 0)
    free = gauge(client, "tlt_pages_free")
    body = {"requests": [{"messages": QUESTION, "n": 4}], "sampling": LONG, "stream": stream}
    with httpx.Client(timeout=httpx.Timeout(60, read=60 if stream else 1.5)) as leaving:
        if stream:
            with leaving.stream("POST", f"{server.url}/generate", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                assert gauge(client, "tlt_pages_free") < free and look(client).open == 4
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(f"{server.url}/generate", json=body)
    passes = look(client).passes
    until(
        lambda: (
            look(client).open == look(client).running == 0
            and gauge(client, "tlt_pages_free") == free
        )
    )
    assert look(client).passes - passes < 300  # some thousand were left


def _without_config(model: Path) -> None:
    (model / "config.json").unlink()


def _truncated(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no config": (_without_config, ("there is no", "config.json", "model must name a directory")),
    "truncated": (_truncated, ("model.safetensors", "truncated or damaged", "download it again")),
}


def starting_fails(*flags: str) -> str:
    with pytest.raises(StartupError, match="status 2") as caught, ServerProcess(*flags):
        pass
    return caught.value.message


@pytest.mark.parametrize("name", mostly_long(BROKEN, "no config"))
def test_a_broken_model_directory_is_named_at_start(name: str, tmp_path: Path) -> None:
    spoil, parts = BROKEN[name]
    model = Path(shutil.copytree(TARGET, tmp_path / "model"))
    spoil(model)
    message = starting_fails("--model", str(model), *FAST_START[2:])
    assert str(model) in message
    for part in parts:
        assert part in message


def test_the_fixture_serves_the_shipped_pair(client: Client) -> None:
    engine = client.server_info()["engine"]
    assert engine["drafter"] == "eagle+history" and PAIR[1] == str(TARGET)
