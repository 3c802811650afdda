"""One hostile key at full rate, and the small requests of another key meanwhile."""

import http.client
import itertools
import threading
import time
from collections import Counter
from typing import Any

import msgspec

from tests.hostile.victim import SMALL, TIMEOUT_S, Victim, headers, percentile_ms, small_request

PAUSE_S = 0.02  # between two small requests
LINES = 2  # connections of the hostile key for each kind of request
WARM = 10  # small requests before anything is measured


def attacks(mib: float) -> dict[str, tuple[str, bytes]]:
    """Return what the hostile key sends, by name: a path and a body."""
    size = int(mib * 2**20)
    many = {
        "requests": [{"prompt": f"{i}+{i}=", "n": 8} for i in range(8)],
        "sampling": {"max_tokens": 512, "ignore_eos": True},
        "timeout_s": 10,
    }
    long = {"requests": [{"token_ids": [5] * 3000, "n": 4}], "sampling": {"max_tokens": 1}}
    wrong = b'{"requests":[{"prompt":"a","sampling":{"stop":[' + b"1," * (size // 2) + b"1]}}]}"
    return {
        "many long outputs": ("/generate", msgspec.json.encode(many)),
        "long prompts": ("/generate", msgspec.json.encode(long)),
        "wrong bodies": ("/generate", wrong),
        "texts to tokenise": ("/tokenize", msgspec.json.encode({"prompt": "2+2=" * (size // 4)})),
    }


def neighbours(victim: Victim, *, seconds: float, mib: float = 1.0) -> dict[str, Any]:
    """Return the latencies of small requests, idle, under each attack and under all together."""
    for seed in range(WARM):
        victim.post("/generate", small_request(seed), SMALL[0])
    idle = _small(victim, seconds)
    each = attacks(mib)
    cases = {name: {name: attack} for name, attack in each.items()} | {"all": each}
    found = {name: _under(victim, case, seconds) for name, case in cases.items()}
    figures = {
        name: {
            "p50_ms": percentile_ms(busy, 50),
            "p99_ms": percentile_ms(busy),
            "ratio": round(percentile_ms(busy) / percentile_ms(idle), 2),
            "requests": len(busy),
            "failed": sum(took_s == float("inf") for took_s in busy),
            "attacks": dict(sent),
        }
        for name, (busy, sent) in found.items()
    }
    return {
        "idle_p50_ms": percentile_ms(idle, 50),
        "idle_p99_ms": percentile_ms(idle),
        "ratio": figures["all"]["ratio"],
        "cases": figures,
    }


def _under(
    victim: Victim, case: dict[str, tuple[str, bytes]], seconds: float
) -> tuple[list[float], Counter[str]]:
    """Return the seconds of small requests, and how often each attack had which status."""
    over, sent = threading.Event(), Counter[str]()
    threads = [
        threading.Thread(target=_attack, args=(victim, name, path, body, over, sent), daemon=True)
        for name, (path, body) in case.items()
        for _ in range(LINES)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    busy = _small(victim, seconds)
    over.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return busy, sent


def _small(victim: Victim, seconds: float) -> list[float]:
    """Send small requests one after the other; one that is refused took for ever."""
    line = http.client.HTTPConnection(victim.host, victim.port, timeout=TIMEOUT_S)
    found, end_s = list[float](), time.perf_counter() + seconds
    for seed in itertools.count():
        started_s = time.perf_counter()
        if started_s > end_s:
            break
        line.request("POST", "/generate", small_request(seed), headers(SMALL[0]))
        reply = line.getresponse()
        reply.read()
        took_s = time.perf_counter() - started_s
        found.append(took_s if reply.status == 200 else float("inf"))
        time.sleep(PAUSE_S)
    line.close()
    return found


def _attack(
    victim: Victim, name: str, path: str, body: bytes, over: threading.Event, sent: Counter[str]
) -> None:
    while not over.is_set():
        status, _ = victim.post(path, body)
        sent[f"{name}: {status}"] += 1
        if status == 429:
            time.sleep(0.05)
