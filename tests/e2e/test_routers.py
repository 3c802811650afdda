"""The field's own routers in front of two servers that no gateway holds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.gloo_trainer import free_port
from tests.e2e.test_lifecycle import FAST_START, QUESTION
from tests.waiting import until
from tlt_client import Client
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

pytestmark = pytest.mark.long

Answer = tuple[str, str]  # text, finish reason
SAMPLING = {"model": TARGET.name, "max_tokens": 24, "seed": 5, "temperature": 1.0}
# One router passes no seed on in this form.
SGLANG = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
BODIES = {
    "/v1/chat/completions": {"messages": QUESTION, **SAMPLING},
    "/v1/completions": {"prompt": "12*3=", **SAMPLING},
    "/generate": {"text": "12*3=", "sampling_params": SGLANG},
}


ROUTERS = {
    "sglang-router": ("sglang_router", "launch"),
    "vllm-router": ("vllm_router",),
    "smg": ("smg", "launch"),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        flags = (*FAST_START, "--threads", "1")
        yield [stack.enter_context(ServerProcess(*flags)) for _ in range(2)]


@pytest.fixture(scope="module", params=ROUTERS)
def router(request: pytest.FixtureRequest, servers: list[ServerProcess]) -> Iterator[str]:
    """Start a router that sends requests to both servers in turns; yield its address."""
    module, *verb = ROUTERS[request.param]
    if find_spec(module) is None:
        pytest.skip("make test-long installs it")
    ports, urls = (str(free_port()), str(free_port())), [server.url for server in servers]
    place = ("--host", "127.0.0.1", "--port", ports[0], "--prometheus-port", ports[1])
    command = [str(Path(sys.executable).with_name(request.param)), *verb, *place]
    process = subprocess.Popen([*command, "--policy", "round_robin", "--worker-urls", *urls])
    url = f"http://127.0.0.1:{ports[0]}"

    def both_healthy() -> bool:
        assert process.poll() is None
        try:
            workers = httpx.get(f"{url}/workers", timeout=60).json()["workers"]
        except httpx.TransportError:
            return False
        return [each["is_healthy"] for each in workers] == [True, True]

    until(both_healthy)
    yield url
    process.terminate()
    process.wait(60)


def answer(url: str, path: str, stream: bool) -> Answer:
    response = httpx.post(f"{url}{path}", json=BODIES[path] | {"stream": stream}, timeout=60)
    assert response.status_code == 200, response.text
    if not stream:
        return said([response.json()])
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]" and len(lines) > 2
    return said([json.loads(line) for line in lines])


def said(parts: list[dict[str, Any]]) -> Answer:
    """Return the text of a reply or a stream, and its finish reason."""
    if "meta_info" in parts[0]:  # each part has the whole text
        return parts[-1]["text"], parts[-1]["meta_info"]["finish_reason"]["type"]
    choices = [choice for part in parts for choice in part["choices"]]
    texts = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    text = "".join(each.get("content") or each.get("text") or "" for each in texts)
    return text, choices[-1]["finish_reason"]


@pytest.mark.parametrize("path", BODIES)
def test_routers_reach_both_servers_with_the_answers_of_one(
    path: str, router: str, servers: list[ServerProcess]
) -> None:
    def passes() -> list[int]:
        found = []
        for server in servers:
            with Client(server.url, timeout_s=60) as client:
                found.append(look(client).passes)
        return found

    expected, before = answer(servers[0].url, path, stream=False), passes()
    assert len(expected[0]) > 10
    for stream in (False, True):
        for _ in range(2):
            assert answer(router, path, stream) == expected
    assert all(now > then for now, then in zip(passes(), before, strict=True))
