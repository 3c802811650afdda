"""Bodies of the largest size, wrong and right, one at a time: for how long each holds the server's
event loop, what memory it takes, and how long probes wait meanwhile.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.hostile.victim import Meanwhile, Victim, percentile_ms, probe

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
SETTLE_S = 0.3


class Body(NamedTuple):
    """A body that is `head`, then as many `member`s as there is room for, then `tail`."""

    name: str
    path: str
    head: bytes
    member: bytes
    tail: bytes
    key: str = "hostile"

    def of(self, size: int) -> bytes:
        count = max(1, (size - len(self.head) - len(self.tail)) // (len(self.member) + 1))
        return self.head + b",".join([self.member] * count) + self.tail


ONE = b'{"requests":[{"prompt":"a",'
BODIES = (
    Body("wrong stop strings", "/generate", ONE + b'"sampling":{"stop":[', b"1", b"]}}]}"),
    Body("wrong items", "/generate", b'{"requests":[', b"1", b"]}"),
    Body("items", "/generate", b'{"requests":[', b'{"prompt":"a"}', b"]}"),
    Body("token ids", "/generate", b'{"requests":[{"token_ids":[', b"1", b"]}]}"),
    Body("wrong token ids", "/generate", b'{"requests":[{"token_ids":[', b'""', b"]}]}"),
    Body("biases", "/generate", ONE + b'"sampling":{"logit_bias":{', b'"1":1', b"}}}]}"),
    Body("unknown fields", "/generate", b'{"x":[', b'{"y":{}}', b"]}"),
    Body("a long text", "/generate", b'{"requests":[{"prompt":"a', b"a", b'"}]}'),
    Body("SGLang's texts", "/generate", b'{"text":[', b'"a"', b"]}"),
    Body("prompts", "/v1/completions", b'{"prompt":[', b'"a"', b"]}"),
    Body(
        "wrong parts of a message",
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":[',
        b'{"type":"image"}',
        b"]}]}",
    ),
    Body(
        "messages",
        "/v1/chat/completions",
        b'{"messages":[',
        b'{"role":"user","content":"a"}',
        b"]}",
    ),
    Body("depth", "/v1/chat/completions", b'{"tools":[' + b"[" * 2**20, b"1", b"]}"),
    Body("ids to read", "/detokenize", b'{"tokens":[', b"1", b"]}"),
    Body("a text to tokenise", "/tokenize", b'{"prompt":"a', b"a", b'"}'),
    Body("ids for vLLM", "/inference/v1/generate", b'{"token_ids":[', b"1", b"]}"),
    Body("wrong names to abort", "/abort_requests", b'{"request_ids":[', b"1", b"]}"),
    Body(
        "wrong names of tensors",
        "/update_weights_from_distributed",
        b'{"names":[',
        b"1",
        b"]}",
        "root",
    ),
)


def bodies(
    victim: Victim, *, mib: float, done: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Send every body of this size and return the figures of each and the worst of all. A hold is
    given as the upper end of its bucket of `tlt_loop_held_seconds`.
    """
    size = int(mib * 2**20)
    cases = {}
    for body in BODIES:
        cases[body.name] = _sent(victim, body, body.of(size))
        done(body.name)
    return {
        "mib": mib,
        "longest_hold_ms": min(
            round(victim.metric("tlt_loop_held_longest_seconds") * 1e3, 1),  # also since the start
            max(case["held_up_to_ms"] for case in cases.values()),
        ),
        "memory_over_baseline_mib": max(case["memory_mib"] for case in cases.values()),
        "memory_allowed_mib": 64 + 4 * mib,
        "probe_max_ms": max(case["probe_max_ms"] for case in cases.values()),
        "cases": cases,
    }


def _sent(victim: Victim, body: Body, content: bytes) -> dict[str, Any]:
    time.sleep(SETTLE_S)
    before, baseline = _held(victim), victim.resident_mib()
    with Meanwhile(victim.resident_mib) as memory, Meanwhile(probe(victim)) as probes:
        started_s = time.perf_counter()
        status, _ = victim.post(body.path, content, body.key)
        seconds = time.perf_counter() - started_s
    after = _held(victim)
    held = [bound for bound in BUCKETS_S if after[bound] - before[bound] < after[-1] - before[-1]]
    return {
        "status": status,
        "seconds": round(seconds, 3),
        "held_up_to_ms": round(1e3 * min((b for b in BUCKETS_S if b not in held), default=-1), 1),
        "memory_mib": round(max(memory.seen) - baseline, 1),
        "probe_p99_ms": percentile_ms(probes.seen),
        "probe_max_ms": percentile_ms(probes.seen, 100),
    }


def _held(victim: Victim) -> dict[float, float]:
    """Return the holds counted so far by upper end; -1: all of them."""
    metrics, name = victim.metrics(), "tlt_loop_held_seconds"
    found = {bound: metrics[f"{name}_bucket {float(bound)}"] for bound in BUCKETS_S}
    return found | {-1: metrics[f"{name}_count"]}
