"""A legal stream in SGLang's form that costs as much as one request can: n choices of thousands of
tokens, each with its log-prob and 20 alternatives. The client reads as fast as it can, while
probes and another user's one-token requests are timed.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from tlt_server.bench.goodput import percentile

ALTERNATIVES = 20
IDLE = 40  # requests of each kind that are timed before the stream begins
PAUSE_S = 0.01  # between two timed requests
TIMEOUT_S = 600.0
INDEX = b'"index":'


def streams(
    host: str,
    port: int,
    model: str,
    *,
    choices: int = 16,
    tokens: int = 3000,
    incremental: bool = False,
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Stream once and return the figures: bytes sent against the tokens' own size (what the
    reply without a stream takes), and milliseconds of others' requests, idle and meanwhile.
    """
    sent = {**(headers or {}), "content-type": "application/json"}
    small = json.dumps({"model": model, "prompt": "2+2=", "max_tokens": 1})
    kinds: dict[str, Callable[[http.client.HTTPConnection], None]] = {
        "probe": lambda line: line.request("GET", "/livez"),
        "small": lambda line: line.request("POST", "/v1/completions", small, sent),
    }
    idle = {
        kind: _timed(host, port, ask, lambda asked: asked == IDLE) for kind, ask in kinds.items()
    }
    over = threading.Event()
    busy: dict[str, list[float]] = {}
    watching = [
        threading.Thread(
            target=lambda kind=kind, ask=ask: busy.update(
                {kind: _timed(host, port, ask, lambda asked: over.is_set())}
            )
        )
        for kind, ask in kinds.items()
    ]
    for thread in watching:
        thread.start()
    body = {
        "text": "2+2=",
        "sampling_params": {
            "n": choices,
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "sampling_seed": 7,
        },
        "return_logprob": True,
        "top_logprobs_num": ALTERNATIVES,
        "incremental_streaming_output": incremental,
    }
    try:
        read = _stream(host, port, json.dumps(body | {"stream": True}), sent)
    finally:
        over.set()
        for thread in watching:
            thread.join()
    own = read["own_bytes"] if not incremental else _whole(host, port, json.dumps(body), sent)
    return {
        "choices": choices,
        "tokens": tokens,
        **read,
        "own_bytes": own,
        "ratio": round(read["sent_bytes"] / own, 2),
        **_figures("idle", idle),
        **_figures("busy", busy),
    }


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


def _timed(
    host: str,
    port: int,
    ask: Callable[[http.client.HTTPConnection], None],
    enough: Callable[[int], bool],
) -> list[float]:
    """Return the seconds of each request, sent one after the other on one connection."""
    line = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    found: list[float] = []
    while not enough(len(found)):
        started_s = time.perf_counter()
        ask(line)
        line.getresponse().read()
        found.append(time.perf_counter() - started_s)
        time.sleep(PAUSE_S)
    line.close()
    return found


def _figures(when: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for kind, found in seconds.items():
        figures[f"{kind}_p99_ms_{when}"] = round(percentile(found, 99) * 1000, 1)
        figures[f"{kind}_max_ms_{when}"] = round(max(found) * 1000, 1)
    return figures
