"""A legal stream in SGLang's form that costs as much as one request can: n choices of thousands of
tokens, each with its log-prob and 20 alternatives. The client reads as fast as it can, while
probes and another user's one-token requests are timed.
"""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tlt_server.bench.goodput import percentile

ALTERNATIVES = 20
IDLE_S = 2.0
PAUSE_S = 0.01  # between two timed requests
TIMEOUT_S = 600.0
INDEX = b'"index":'

Ask = Callable[[http.client.HTTPConnection], None]


def streams(
    host: str,
    port: int,
    model: str,
    *,
    choices: int = 16,
    tokens: int = 3000,
    incremental: bool = False,
    headers: dict[str, str] | None = None,
    small_headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Stream once and return the figures: bytes sent against the tokens' own size (what the
    reply without a stream takes), and milliseconds of others' requests: idle, while the same
    tokens are generated without stream and log-probs (`plain`), and while they are streamed
    (`busy`). `small_headers` are those of the others' small requests, such as another key.
    """
    sent = {**(headers or {}), "content-type": "application/json"}
    small = json.dumps({"model": model, "prompt": "2+2=", "max_tokens": 1})
    asks: dict[str, Ask] = {
        "probe": lambda line: line.request("GET", "/livez"),
        "small": lambda line: line.request(
            "POST", "/v1/completions", small, sent | (small_headers or {})
        ),
    }
    params = {"n": choices, "max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": 7}
    plain = {"text": "2+2=", "sampling_params": params}
    asked = plain | {"return_logprob": True, "top_logprobs_num": ALTERNATIVES}
    streamed = json.dumps(asked | {"stream": True, "incremental_streaming_output": incremental})

    figures: dict[str, Any] = {"choices": choices, "tokens": tokens}
    others = _Others(host, port, asks)
    with others.timed() as idle:
        time.sleep(IDLE_S)
    with others.timed() as alone:
        _whole(host, port, json.dumps(plain), sent)
    with others.timed() as busy:
        figures |= _stream(host, port, streamed, sent)
    if incremental:
        figures["own_bytes"] = _whole(host, port, json.dumps(asked), sent)
    figures["ratio"] = round(figures["sent_bytes"] / figures["own_bytes"], 2)
    return figures | _shown("idle", idle) | _shown("plain", alone) | _shown("busy", busy)


class _Others:
    """Other users, whose requests are timed one after the other, each kind in a thread."""

    def __init__(self, host: str, port: int, asks: dict[str, Ask]) -> None:
        self._host, self._port, self._asks = host, port, asks

    @contextmanager
    def timed(self) -> Iterator[dict[str, list[float]]]:
        """Return the seconds of each kind, which are complete when the block has ended."""
        over, found = threading.Event(), {kind: list[float]() for kind in self._asks}
        threads = [
            threading.Thread(target=self._time, args=(ask, found[kind], over))
            for kind, ask in self._asks.items()
        ]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _time(self, ask: Ask, found: list[float], over: threading.Event) -> None:
        line = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        while not over.is_set():
            started_s = time.perf_counter()
            ask(line)
            line.getresponse().read()
            found.append(time.perf_counter() - started_s)
            time.sleep(PAUSE_S)
        line.close()


def _stream(host: str, port: int, body: str, headers: dict[str, str]) -> dict[str, Any]:
    """Read a stream to its end. The tokens' own size is that of the last chunk of each choice."""
    line = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    started_s = time.perf_counter()
    line.request("POST", "/generate", body, headers)
    reply = line.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"the stream was refused: {reply.status} {reply.read(500)!r}")
    sent = chunks = 0
    last: dict[bytes, int] = {}
    size, tail = 0, b""  # the chunk that is being read
    while data := reply.read1(2**20):
        sent += len(data)
        *ends, rest = data.split(b"\n\n")
        for end in ends:
            tail = (tail + end)[-64:]
            chunks += 1
            last[tail[tail.rfind(INDEX) :]] = size + len(end)
            size, tail = 0, b""
        size, tail = size + len(rest), (tail + rest)[-64:]
    line.close()
    return {
        "sent_bytes": sent,
        "own_bytes": sum(last.values()),
        "chunks": chunks,
        "stream_s": round(time.perf_counter() - started_s, 2),
    }


def _whole(host: str, port: int, body: str, headers: dict[str, str]) -> int:
    line = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    line.request("POST", "/generate", body, headers)
    size = len(line.getresponse().read())
    line.close()
    return size


def _shown(when: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for kind, found in seconds.items():
        figures[f"{kind}_p50_ms_{when}"] = round(percentile(found, 50) * 1000, 1)
        figures[f"{kind}_p99_ms_{when}"] = round(percentile(found, 99) * 1000, 1)
    return figures
