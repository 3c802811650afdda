"""The server under attack: its keys, its processes and its own figures."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tlt_server.bench.goodput import percentile
from tlt_server.demo.server import ServerProcess

SMALL = tuple(f"small-{i}" for i in range(9))
KEYS = "".join(f"{name} scopes=data name={name}\n" for name in ("hostile", *SMALL)) + (
    "root scopes=data,push-weights,operate name=root\n"
)
TIMEOUT_S = 120.0
EVERY_S = 0.005  # between two looks at memory, or two probes
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Victim:
    """A running server with `KEYS`."""

    def __init__(self, server: ServerProcess) -> None:
        address = urlsplit(server.url)
        self.url, self.pid = server.url, server.process.pid
        self.host, self.port = address.hostname or "127.0.0.1", address.port or 80
        self.grpc_port = int(server.grpc_address.rpartition(":")[2] or 0)

    def post(self, path: str, body: bytes, key: str = "hostile") -> tuple[int, bytes]:
        """Return status and body; 0 if the server closed the connection instead."""
        line = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            line.request("POST", path, body, headers(key))
            reply = line.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()
        finally:
            line.close()

    def metric(self, name: str) -> float:
        return self.metrics()[name]

    def metrics(self) -> dict[str, float]:
        """Return every sample by its name, and those of buckets by name and upper end."""
        line = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        line.request("GET", "/metrics", headers=headers("root"))
        text = line.getresponse().read().decode()
        line.close()
        return {
            f"{sample.name} {sample.labels.get('le', '')}".strip(): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def await_idle(self) -> None:
        """Wait until nothing is open that an earlier scenario has left."""
        give_up_s = time.monotonic() + TIMEOUT_S
        while self.metric("tlt_open_sequences") and time.monotonic() < give_up_s:
            time.sleep(0.2)

    def processes(self) -> tuple[list[int], list[int]]:
        """Return the pids of all that answers, and those of engines."""
        answering, engines = [self.pid], list[int]()
        for pid in _children(self.pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            (engines if b"tlt_server.engine" in command else answering).append(pid)
        return answering, engines

    def resident_mib(self) -> float:
        """Return the memory of all that answers, the engine not included."""
        return sum(_field(pid, "VmRSS:") for pid in self.processes()[0]) / 1024

    def cpu_s(self) -> float:
        """Return the processor time of all that answers, the engine not included."""
        ticks = 0
        for pid in self.processes()[0]:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks * TICK_S


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


def small_request(seed: int) -> bytes:
    return msgspec.json.encode(
        {"requests": [{"prompt": "2+2=", "seed": seed}], "sampling": {"max_tokens": 4}}
    )


def percentile_ms(seconds: list[float], part: float = 99) -> float:
    return round(percentile(seconds, part) * 1e3, 1)


class Meanwhile(AbstractContextManager["Meanwhile"]):
    """A thread that calls a function again and again and keeps what it returns."""

    def __init__(self, look: Callable[[], Any], every_s: float = EVERY_S) -> None:
        self._look, self._every_s, self._over = look, every_s, threading.Event()
        self.seen: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Meanwhile:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self.seen.append(self._look())
            self._over.wait(self._every_s)


def probe(victim: Victim) -> Callable[[], float]:
    """Return a function that asks `/livez` on a connection of its own and returns the seconds."""
    line = http.client.HTTPConnection(victim.host, victim.port, timeout=TIMEOUT_S)

    def ask() -> float:
        started_s = time.perf_counter()
        try:
            line.request("GET", "/livez")
            line.getresponse().read()
        except (OSError, http.client.HTTPException):
            line.close()  # the next request opens it again
        return time.perf_counter() - started_s

    return ask


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _field(pid: int, name: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    return int((status.partition(name)[2].split() or ["0"])[0])
