"""`python -m benchmarks.record NAME [--commit NAME] [--json FILE] ...`: measurements that start
servers or tests of their own, into benchmarks/results.

    faults -- FLAGS OF tlt serve   kill and stop ranks of a server's engine
    starts -- FLAGS OF tlt serve   the time until a server is ready: with a cold cache, a warm one,
                                   and one that was copied, as to another machine (`imported`)
    long, soak [-n WORKERS] [TEST ...]   the tests so marked, red ones included
    schemas [COUNT]                a small model's answers to generated JSON schemas, all valid

`faults`: one stream runs at each fault, which is noticed when that stream ends with its error. The
server is back when it has answered the same request, with the tokens that the stream began with.
`starts`: each start has the phases that the server names, and the rest, which is imports and
processes. Python's bytecode should be there, as after an install: compiling it takes 6 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

from tests.processes import engine, ranks
from tlt_client import Client, TltClientError
from tlt_client.wire import ItemResult, Token
from tlt_server.bench.flags import JSON, Flag, add_flags, flag
from tlt_server.bench.micro import require_gpu
from tlt_server.bench.record import entry_of, without_folder, write_entry
from tlt_server.bench.settings import shape_of
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET
from tlt_server.errors import StartupError

RESULTS = Path(__file__).with_name("results")
PROGRAM = "python -m benchmarks.record"
BEFORE, LONG = 64, 4000  # tokens: before a fault, asked for
PROMPT = list(range(1, 17))
BACK_S = 300.0  # for the next engine to be ready
LOOK_S = 0.02
PHASE = re.compile(r"  (\S.{0,27}?)\s+(\d+\.\d\d) s")
CACHE = "TRITON_CACHE_DIR"
SCHEMAS = "tests/engine/test_structured_outputs.py::test_outputs_of_generated_schemas_are_valid"


def tested(
    *arguments: str, timeout_s: float | None = None, **environment: str
) -> tuple[int, list[ElementTree.Element]]:
    """Run pytest. Return its exit status, -1 if it was ended early, and the suites of its report:
    none if it ended before it wrote one.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # The form with properties of tests.
        form = (f"--junitxml={report}", "-o", "junit_family=xunit1")
        command = [sys.executable, "-m", "pytest", *arguments, *form]
        try:
            status = subprocess.run(
                command, timeout=timeout_s, env={**os.environ, **environment}
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
        return status, suites(report)


def suites(report: Path) -> list[ElementTree.Element]:
    try:
        return [*ElementTree.parse(report).getroot().iter("testsuite")]
    except (OSError, ElementTree.ParseError):
        return []


class Unexpected(Exception):
    """Something other than one typed error followed by the same tokens."""


class Fault(NamedTuple):
    what: str
    rank: int
    signal: int


FAULTS = (
    Fault("killed", 1, signal.SIGKILL),
    Fault("killed", 0, signal.SIGKILL),
    Fault("stopped", 1, signal.SIGSTOP),
    Fault("stopped", 0, signal.SIGSTOP),
)


def faults(asked: argparse.Namespace) -> int:
    """Start one server and inject each fault in turn."""
    served, rows = served_by(asked.flags), []
    with (
        ServerProcess(*asked.flags, "--max-restarts", str(len(FAULTS))) as server,
        Client(server.url, timeout_s=BACK_S) as client,
    ):
        width = served.tensor_parallel
        for number, fault in enumerate(each for each in FAULTS if each.rank < width):
            # A prompt that runs at two faults is refused as their cause, so each has its own.
            request = {"id": "one", "token_ids": [*PROMPT, 1 + number], "seed": 0}
            rows.append(happen(fault, request, server, client))
            print(rows[-1], flush=True)
    write_rows(asked, rows, on_gpu=served.device != "cpu" and torch.cuda.is_available())
    return 0


def happen(
    fault: Fault, request: dict[str, Any], server: ServerProcess, client: Client
) -> dict[str, Any]:
    """Return seconds from the signal until the stream's error, and until a new answer."""
    first = engine(server.process.pid)
    victim = [first, *ranks(first)][fault.rank]
    sampling = {"max_tokens": LONG, "ignore_eos": True}
    tokens: list[int] = []
    signalled_s = 0.0
    for event in client.stream([request], sampling=sampling):
        if isinstance(event, Token):
            tokens += event.token_ids
            if len(tokens) >= BEFORE and not signalled_s:
                os.kill(victim, fault.signal)
                signalled_s = time.monotonic()
        elif isinstance(event, ItemResult) and (
            not event.error or event.error.code != "engine_failed"
        ):
            raise Unexpected(f"the stream of {fault.what} rank {fault.rank} ended with {event}")
    if not signalled_s:
        raise Unexpected(f"the stream ended after {len(tokens)} tokens, before any fault")
    noticed_s = time.monotonic() - signalled_s
    again = _answer(client, request, signalled_s + BACK_S)
    if again != tokens[:BEFORE]:
        raise Unexpected(f"the tokens differ after {fault.what} rank {fault.rank}")
    back_s = time.monotonic() - signalled_s
    return {
        "fault": fault.what,
        "rank": fault.rank,
        "noticed_s": round(noticed_s, 3),
        "back_s": round(back_s, 2),
    }


def _answer(client: Client, request: dict[str, Any], until_s: float) -> list[int]:
    said: object = "nothing"
    while time.monotonic() < until_s:
        try:
            [result] = client.generate(
                [request], sampling={"max_tokens": BEFORE, "ignore_eos": True}
            ).results
            if result.choices:
                return result.choices[0].token_ids
            said = result.error
        except TltClientError as error:
            said = error
        time.sleep(LOOK_S)
    raise Unexpected(f"the server did not answer again in {BACK_S:g} s; it said: {said}")


def starts(asked: argparse.Namespace) -> int:
    """Start one server after the other in an environment that begins empty."""
    require_gpu()
    with tempfile.TemporaryDirectory() as folder:
        first, copied = Path(folder) / "first", Path(folder) / "copied"
        first.mkdir()
        rows = [start(name, first, asked.flags) for name in ("cold", "warm")]
        shutil.copytree(first, copied)
        shutil.rmtree(first)
        copied.rename(first)  # Triton's cache has absolute paths in it
        rows += [start(name, first, asked.flags) for name in ("imported", "imported, again")]
    write_rows(asked, rows, on_gpu=True)
    return 0


def start(name: str, directory: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Start a server once; return seconds until it was ready, whole and by phase."""
    phases: dict[str, float] = {}

    def read(line: str) -> None:
        if found := PHASE.match(line):
            phases[found[1]] = float(found[2])

    os.environ[CACHE] = str(directory / "triton")
    began = time.perf_counter()
    with ServerProcess(*flags, "--state-dir", str(directory / "state"), on_line=read):
        ready_s = time.perf_counter() - began
    row = {"start": name, "ready_s": round(ready_s, 2), "phases_s": phases}
    print(row | {"other_s": ready_s - sum(phases.values())}, flush=True)
    return row


def served_by(flags: Sequence[str]) -> argparse.Namespace:
    """Return the engine flags among those of `tlt serve`, for the figures."""
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--model", type=Path, default=TARGET)
    named.add_argument("--tensor-parallel", type=int, default=1)
    named.add_argument("--device", default="auto")
    return named.parse_known_args(flags)[0]


def write_rows(
    asked: argparse.Namespace, rows: Sequence[Mapping[str, Any]], *, on_gpu: bool
) -> None:
    """Write the rows that a server with these flags gave."""
    served = served_by(asked.flags)
    figures = {
        "bench": asked.name,
        "shape": shape_of(served.model),
        "tensor_parallel": served.tensor_parallel,
        "rows": rows,
    }
    command = f"{PROGRAM} {asked.name} -- {' '.join(map(without_folder, asked.flags))}"
    write_entry(asked.json, entry_of(figures, command, on_gpu=on_gpu, commit=asked.commit))


def marked(asked: argparse.Namespace) -> int:
    """Return the exit status of pytest."""
    name: str = asked.name
    if asked.tests and asked.json == RESULTS / RECORDS[name].file:
        raise StartupError(
            f"{asked.json.name} is the record of all tests marked {name}; name another by --json"
        )
    command = f"{PROGRAM} {name} -n {asked.n} {' '.join(asked.tests)}".strip()
    entry = entry_of({}, command, on_gpu=False, commit=asked.commit)
    status, found = tested("-m", MARKS[name], "-n", asked.n, "--durations=0", *asked.tests)
    if found:
        write_entry(asked.json, entry | {"figures": counts(name, found)})
        print(f"{asked.json.name}: {'green' if status == 0 else 'red'}")
    return status


def counts(name: str, suites: Iterable[ElementTree.Element]) -> dict[str, Any]:
    """Return the tests by file, and the sum of what the storms counted."""
    files: dict[str, Counter[str]] = {}
    counted: Counter[str] = Counter()
    for case in (case for suite in suites for case in suite.iter("testcase")):
        came = files.setdefault(case.get("classname", "").replace(".", "/") + ".py", Counter())
        bad = case.find("failure") is not None or case.find("error") is not None
        came["failed" if bad else "skipped" if case.find("skipped") is not None else "passed"] += 1
        came["seconds"] += round(float(case.get("time", 0)))
        for value in case.iter("property"):
            if value.get("name") == "counted":
                counted.update(json.loads(value.get("value", "{}")))
    return {
        "bench": name,
        "green": bool(files) and not any(came["failed"] for came in files.values()),
        "files": {name: dict(sorted(came.items())) for name, came in sorted(files.items())},
        "storms": dict(sorted(counted.items())),
    }


def schemas(asked: argparse.Namespace) -> int:
    """Return the exit status of pytest; only a green run is recorded. The test is otherwise content
    with a few schemas.
    """
    entry = entry_of({}, f"{PROGRAM} schemas {asked.count}", on_gpu=False, commit=asked.commit)
    status, suites = tested("-n", "0", SCHEMAS, TLT_SCHEMAS=str(asked.count))
    if status == 0:
        [counted] = [value for suite in suites for value in suite.iter("property")]
        figures = {"bench": "schemas", **json.loads(counted.get("value", "{}"))}
        write_entry(asked.json, entry | {"figures": figures})
    return status


class Record(NamedTuple):
    run: Callable[[argparse.Namespace], int]
    file: str  # default of --json
    flags: tuple[Flag, ...]


SERVED = (Flag("flags", {"nargs": "*", "metavar": "FLAG", "help": "of tlt serve, after --"}),)
MARKS = {"long": "long and not gpu and not soak", "soak": "soak"}
WORKERS_AND_TESTS = (
    flag("-n WORKERS", "of pytest", "2"),
    Flag(
        "tests", {"nargs": "*", "metavar": "TEST", "help": "files, or tests of them [default: all]"}
    ),
)
COUNT = Flag("count", {"nargs": "?", "metavar": "COUNT", "type": int, "default": 1000})
RECORDS = {
    "faults": Record(faults, "faults-tp2-gpu.json", SERVED),
    "starts": Record(starts, "starts-gpu.json", SERVED),
    "long": Record(marked, "test-long.json", WORKERS_AND_TESTS),
    "soak": Record(marked, "soak.json", WORKERS_AND_TESTS),
    "schemas": Record(schemas, "schemas-cpu.json", (COUNT,)),
}


def main(arguments: Sequence[str]) -> int:
    """Return 0; 1 where something was red or a client was told anything else than it should be, 2
    where nothing could be measured.
    """
    outer = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = outer.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, record in RECORDS.items():
        own = names.add_parser(name, allow_abbrev=False)
        add_flags(own, (*JSON, *record.flags))
        own.set_defaults(json=RESULTS / record.file)
    asked = outer.parse_args(arguments)
    try:
        return RECORDS[asked.name].run(asked)
    except (StartupError, Unexpected) as error:
        print(f"{PROGRAM} {asked.name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, StartupError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
