"""Many clients at once, polite and rude: every request ends in exactly one way, and nothing
remains open.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.frontend.fake_engine import FAILS, HANGS
from tests.frontend.live_server import LiveServer, live_server
from tlt_client import Client, ConnectionFailed, ServerError
from tlt_client.wire import Done, ItemResult, Token

CODES = {"engine_failed", "deadline_exceeded"}


def one_client(server: LiveServer, seed: int) -> str:
    """One request of a random kind; how it went."""
    rng = random.Random(seed)
    kind = rng.choice(["batch", "stream", "leave stream", "leave batch", "refused"])
    items = [
        {
            "id": str(i),
            "token_ids": [rng.choice([65, 66, 67])] * 3
            + ([rng.choice([FAILS, HANGS])] if rng.random() < 0.15 else []),
            "n": rng.randint(1, 4),
            "sampling": {"max_tokens": rng.randint(1, 120), "stop": rng.choice([[], ["AAAAAAAA"]])},
        }
        for i in range(rng.randint(1, 5))
    ]
    with Client(server.url, timeout_s=0.05 if kind == "leave batch" else 20) as client:
        try:
            if kind == "stream" or kind == "leave stream":
                ended: Counter[str] = Counter()
                for event in client.stream(items, timeout_s=0.7):
                    if isinstance(event, ItemResult):
                        ended[event.id] += 1
                        assert event.choices or (
                            event.error is not None and event.error.code in CODES
                        )
                    if kind == "leave stream" and (isinstance(event, Token) or rng.random() < 0.3):
                        return kind
                    if isinstance(event, Done):
                        assert ended == Counter({item["id"]: 1 for item in items})
            elif kind == "refused":
                client.generate([*items, {"prompt": "a", "n": -1}])
            else:
                results = client.generate(items, timeout_s=0.7).results
                assert [result.id for result in results] == [item["id"] for item in items]
                assert all(bool(result.choices) != (result.error is not None) for result in results)
        except ServerError as error:
            expected = (
                {"invalid_request", "queue_full"} if kind == "refused" else {"queue_full"}
            )  # a full queue says so first
            assert error.code in expected, error
    return kind


def test_a_storm_leaves_nothing_behind(model: Path) -> None:
    with live_server(model, engine={"step_s": 0.002}, max_queue=100) as server:

        def run(seed: int) -> str:
            try:
                return one_client(server, seed)
            except ConnectionFailed:  # the way in which "leave batch" leaves
                return "left"

        with ThreadPoolExecutor(16) as pool:
            kinds = Counter(pool.map(run, range(80)))
        assert len(kinds) >= 4
        end = time.monotonic() + 30
        while len(server.client) or server.engine.running:
            assert time.monotonic() < end, (len(server.client), server.engine.running)
            time.sleep(0.01)
        assert "tlt_open_sequences 0.0" in httpx.get(f"{server.url}/metrics").text
        with Client(server.url) as client:
            assert (
                client.generate([{"prompt": "a", "n": 100}], sampling={"max_tokens": 1})
                .results[0]
                .choices
            )
