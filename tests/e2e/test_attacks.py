"""Requests of one key that fail within the engine, and aborts of odd names, while others' requests
run: these get the tokens of a quiet server, from the same engine.
"""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.conftest import PAIR
from tests.processes import engine
from tlt_client import Client, ServerError
from tlt_server.demo.server import ServerProcess

PLAIN = [{"prompt": f"Compute {i}*4+5.", "seed": i} for i in range(4)]
SAMPLING = {"max_tokens": 24, "temperature": 0.7}
STRUCTURES = (  # each compiles, and cannot go on somewhere
    "(a?){{{0}}}a{{{0}}}",
    "((a|b)?){{{0}}}b{{{0}}}",
    "[0-9]?([a-z]?){{{0}}}x{{{0}}}",
)


def attacks(first: int) -> Iterator[dict[str, Any]]:
    """Yield bodies that differ in the numbers of their structures and in their prompts."""
    for i in itertools.count(first):
        regex = STRUCTURES[i % len(STRUCTURES)].format(5000 - i % 1500)
        yield {
            "requests": [{"prompt": f"{i}+1=", "n": 8, "id": f"bad-{i}"}],
            "sampling": {"max_tokens": 20, "structured_outputs": {"regex": regex}},
        }


@contextmanager
def attacked(url: str, key: str, first: int, seen: Counter[str]) -> Iterator[None]:
    """Send one attack after another, and abort each by its name twice while it runs."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    stop = threading.Event()

    def abort(name: str) -> None:
        while not stop.is_set():
            names = [name, "unknown", name, name]
            ended = httpx.post(
                f"{url}/abort_requests", json={"request_ids": names}, headers=headers, timeout=60
            )
            seen[f"aborts: {ended.status_code}"] += 1
            assert ended.json()["aborted"] <= 8, "more than there are"
            if stop.wait(0.2):
                return

    def attack() -> None:
        for body in attacks(first):
            if stop.is_set():
                return
            reply = httpx.post(f"{url}/generate", json=body, headers=headers, timeout=60)
            for item in reply.json().get("results", [{"error": reply.json().get("error")}]):
                error = item.get("error")
                seen[f"attacks: {error['code'] if error else 'ended'}"] += 1

    threads = [
        threading.Thread(target=attack),
        *(threading.Thread(target=abort, args=(f"bad-{first + i}",)) for i in range(2)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def answers(client: Client, seconds: float) -> tuple[list[Any], list[float]]:
    """Return what requests gave, one after another, and the milliseconds that each took."""
    found, taken, end = [], list[float](), time.monotonic() + seconds
    while not found or time.monotonic() < end:
        began = time.monotonic()
        reply = client.generate(PLAIN, sampling=SAMPLING)
        taken.append(1e3 * (time.monotonic() - began))
        found.append([(r.choices[0].token_ids, r.choices[0].logprobs) for r in reply.results])
    return found, taken


def contained(url: str, headers: dict[str, str] | None = None) -> float:
    lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
    (line,) = [x for x in lines if x.startswith("tlt_contained_faults_total")]
    return float(line.split()[1])


def test_bad_structures_and_aborts_leave_other_requests_alone(
    server: ServerProcess, client: Client
) -> None:
    client.set_strategy("fixed", strategy="history:4x2x8")
    before, seen = engine(server.process.pid), Counter[str]()
    [quiet], _ = answers(client, 0)
    with attacked(server.url, "", 0, seen):
        found, _ = answers(client, 1.5)
    assert all(one == quiet for one in found) and engine(server.process.pid) == before
    assert sum(count for name, count in seen.items() if name.startswith("attacks")) > 2, seen
    assert not {name for name in seen if "engine" in name or ": 5" in name}, seen
    assert contained(server.url) == 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_failing_requests_of_one_key_slow_no_other_key(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "keys").write_text("a scopes=data name=a\nb scopes=data,operate name=b\n")
    flags = (*PAIR, "--api-key-file", str(tmp_path / "keys"), "--policy", "fixed")
    seen = Counter[str]()
    with (
        ServerProcess(*flags, "--sd-strategy", "eagle:4x2x8") as server,
        Client(server.url, api_key="b", timeout_s=120) as good,
    ):
        before = engine(server.process.pid)
        quiet, idle_ms = answers(good, 60)
        with attacked(server.url, "a", 0, seen), attacked(server.url, "a", 10**6, seen):
            found, attacked_ms = answers(good, 600)
        assert all(one == quiet[0] for one in found) and engine(server.process.pid) == before
        assert contained(server.url, {"authorization": "Bearer b"}) == 0
        with pytest.raises(ServerError), Client(server.url, api_key="a", timeout_s=60) as bad:
            bad.abort(all=True)
    assert sum(count for name, count in seen.items() if name.startswith("attacks")) > 100, seen
    assert not {name for name in seen if "engine" in name or ": 5" in name}, seen
    for what, taken in (("idle", idle_ms), ("attacked", attacked_ms)):
        for part in (50, 99):
            seen[f"failing structures, {what}: p{part} [ms]"] = int(np.percentile(taken, part))
    record_property("counted", json.dumps(seen))
