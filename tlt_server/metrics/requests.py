"""Metrics that the frontend counts: requests and replies, by HTTP and gRPC, the loop that answers
them, sequences, rollouts, and the file system that holds the state directory.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import NamedTuple

from tlt_server.errors import codes
from tlt_server.metrics.kinds import LATENCY_S, Kinds

HELD_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
AUTH_REASONS = ("no_key", "unknown_key", "scope", "foreign_name", "foreign_page")
FILES = ("api_keys", "certificates")


class ExchangeMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self.http = kinds.counter(
            "tlt_http_requests", "HTTP requests answered.", "method", "route", "status"
        )
        self.http_s = kinds.histogram(
            "tlt_http_request_seconds",
            "From a request's headers to the end of its reply.",
            LATENCY_S,
            "route",
        )
        self.grpc_calls = kinds.counter(
            "tlt_grpc_calls",
            "gRPC calls ended; each is a request of its route, too.",
            "method",
            "code",
        )
        self.rejected = kinds.counter(
            "tlt_requests_rejected",
            "HTTP requests refused, by error code; probes and scrapes do not count.",
            "reason",
        )
        self.auth_refusals = kinds.counter(
            "tlt_auth_refusals",
            "Requests without the key or scope that they need, by reason.",
            "reason",
        )
        self._file_reads = kinds.counter(
            "tlt_file_reads",
            "Files of keys and certificates read at start and after a change, by result.",
            "file",
            "result",
        )
        self.ready = kinds.gauge(
            "tlt_ready", "1 when a request sent now would be taken, as /readyz says."
        )
        self.loop_held_s = kinds.histogram(
            "tlt_loop_held_seconds",
            "Time for which the event loop answered nothing, sampled every 5 ms.",
            HELD_S,
        )
        self.loop_held_longest_s = kinds.gauge(
            "tlt_loop_held_longest_seconds", "The longest of these times since the server started."
        )
        for code in codes():  # from 0 on, so that the first one counts in an `increase`
            self.rejected.labels(code)
        for reason in AUTH_REASONS:
            self.auth_refusals.labels(reason)
        for file, result in itertools.product(FILES, ("read", "refused")):
            self._file_reads.labels(file, result)

    def file_read(self, file: str, result: str) -> None:
        self._file_reads.labels(file, result).inc()


TOKEN_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5)


class SequenceMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self.ended = kinds.counter(
            "tlt_sequences", "Sequences ended, by finish reason or error code.", "result"
        )
        self.open = kinds.gauge("tlt_open_sequences", "Sequences accepted and not ended.")
        self.open_tokens = kinds.gauge(
            "tlt_open_tokens", "Prompt plus max_tokens of sequences accepted and not ended."
        )
        self.forecast_pages = kinds.gauge(
            "tlt_forecast_pages", "KV pages that these sequences are expected to need in all."
        )
        self.forecast_wait_s = kinds.gauge(
            "tlt_forecast_wait_seconds",
            "Until a sequence accepted now would begin; 0 = at once, or not known.",
        )
        self.generated = kinds.counter("tlt_generated_tokens", "Tokens given to requests.")
        self.stale = kinds.counter(
            "tlt_stale_tokens",
            "Tokens of ended sequences made by another weight version than the one live at the "
            "end.",
        )
        self.prompt = kinds.counter(
            "tlt_prompt_tokens", "Prompt tokens of requests accepted, each choice counted."
        )
        self.cached = kinds.counter(
            "tlt_cached_tokens", "Prompt tokens served by the prefix index."
        )
        self.queued_s = kinds.histogram(
            "tlt_queue_seconds",
            "From a sequence's arrival at the engine until it was started.",
            LATENCY_S,
        )
        self.first_token_s = kinds.histogram(
            "tlt_time_to_first_token_seconds",
            "From acceptance to the first token of a sequence.",
            LATENCY_S,
        )
        self.inter_token_s = kinds.histogram(
            "tlt_inter_token_seconds",
            "Between two outputs of a sequence, per token of the second; one observation per "
            "output.",
            TOKEN_S,
        )
        self.end_to_end_s = kinds.histogram(
            "tlt_end_to_end_seconds", "From acceptance to the end of a sequence.", LATENCY_S
        )


class RolloutMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self.kept = kinds.gauge("tlt_rollouts", "Rollouts kept, by status.", "status")
        self.bytes = kinds.gauge("tlt_rollout_bytes", "Size of all rollouts' journals.")
        self.resumed = kinds.counter(
            "tlt_resumed_sequences", "Sequences of rollouts given to another engine to go on with."
        )
        for status in ("running", "done"):
            self.kept.labels(status)


class DiskMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self._free = kinds.gauge(
            "tlt_disk_free_bytes", "Free on the file system that holds the state directory."
        )
        self._total = kinds.gauge(
            "tlt_disk_total_bytes", "Size of the file system that holds the state directory."
        )

    def watch(self, directory: Path) -> None:
        """Report the file system of `directory`, which need not exist yet, from now on."""
        self._free.set_function(lambda: disk(directory).free)
        self._total.set_function(lambda: disk(directory).total)


class Disk(NamedTuple):
    total: int  # bytes
    free: int


def disk(directory: Path) -> Disk:
    """Return the size of the file system of `directory`, which need not exist yet."""
    usage = shutil.disk_usage(
        next(path for path in (directory, *directory.absolute().parents) if path.exists())
    )
    return Disk(usage.total, usage.free)
