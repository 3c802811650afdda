"""Metrics of requests and replies, by HTTP and gRPC, and of the loop that answers."""

from __future__ import annotations

import itertools

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
