"""`python -m tests.hostile`: attack a server as hostile clients, and measure what others feel.

The scenarios run one after the other against one server. To renew the record, name it by
`--json benchmarks/results/hostile-cpu.json`.
"""

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from tests.hostile.bodies import BODIES, bodies
from tests.hostile.connections import silent_connections
from tests.hostile.neighbours import neighbours
from tests.hostile.parsing import parsing
from tests.hostile.streams import streams
from tests.hostile.table import SCENARIOS, rows
from tests.hostile.tenants import TenantSize, tenants
from tests.hostile.victim import KEYS, SMALL, Victim, headers
from tlt_client import Client
from tlt_server.bench.flags import PAIR, add_flags
from tlt_server.bench.record import finish, progress_bar, wide_console
from tlt_server.bench.settings import served
from tlt_server.errors import StartupError

PROGRAM = "python -m tests.hostile"
RESTART_S = 120.0


class Size(NamedTuple):
    bodies_mib: float
    neighbours_s: float
    stream: tuple[int, int]  # choices, tokens of each
    tenants: TenantSize
    connections: int
    items: int


FULL = Size(15.5, 10.0, (16, 3000), TenantSize(20, 30, 10), 3000, 4000)
QUICK = Size(1.0, 3.0, (4, 200), TenantSize(4, 6, 5), 200, 400)


def main(arguments: Sequence[str]) -> int:
    """Print a table and one line of JSON. Return 1 when, in the full run, a bound is missed."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, allow_abbrev=False)
    add_flags(parser, PAIR)
    parser.add_argument(
        "--only", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="scenarios [default all]"
    )
    try:
        return attack(parser.parse_args(arguments))
    except StartupError as error:
        print(f"{PROGRAM}: {error.message}", file=sys.stderr)
        return 2


def attack(args: argparse.Namespace) -> int:
    from tlt_server.demo.workload import DRAFTER, TARGET

    model, size = args.model or TARGET, QUICK if args.quick else FULL
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    console, figures = wide_console(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as directory:
        keys = Path(directory, "keys")
        keys.touch(0o600)
        keys.write_text(KEYS)
        flags = [
            *("--model", str(model), "--drafter", str(args.drafter or DRAFTER)),
            *("--api-key-file", str(keys), "--grpc-port", "0", "--log-level", "error"),
            *(["--threads", str(args.threads)] if args.threads else []),
        ]
        with served(console, flags) as (server, _), progress_bar(console) as bar:
            victim = Victim(server)
            task = bar.add_task("bodies", total=len(BODIES) + 5)

            def said(name: str) -> None:
                bar.update(task, advance=1, description=name)

            for name, measure in _scenarios(victim, Path(model), size, args.seed, said).items():
                if name not in args.only:
                    continue
                bar.update(task, description=name)
                victim.await_idle()
                figures[name] = measure()
                if name != "bodies":
                    said(name)
    return _report(console, figures, args)


def _scenarios(
    victim: Victim, model: Path, size: Size, seed: int, said: Callable[[str], None]
) -> dict[str, Callable[[], dict[str, Any]]]:
    served = Path(model).name
    choices, tokens = size.stream
    return {
        "bodies": lambda: bodies(victim, mib=size.bodies_mib, done=said),
        "parsing": lambda: parsing(victim, items=size.items),
        "neighbours": lambda: neighbours(victim, seconds=size.neighbours_s),
        "streams": lambda: streams(
            victim.host,
            victim.port,
            served,
            choices=choices,
            tokens=tokens,
            headers=headers("hostile"),
            small_headers=headers(SMALL[0]),
        ),
        "tenants": lambda: tenants(victim, model, size.tenants, seed),
        "connections": lambda: _connections(victim, size.connections),
    }


def _connections(victim: Victim, count: int) -> dict[str, Any]:
    """Hold silent connections on both ports, and kill the engine meanwhile."""
    restarted = False

    def kill() -> None:
        nonlocal restarted
        [engine] = victim.processes()[1]
        os.kill(engine, signal.SIGKILL)
        give_up_s = time.monotonic() + RESTART_S
        with Client(victim.url, api_key=SMALL[0], timeout_s=10) as client:
            while time.monotonic() < give_up_s and not restarted:
                time.sleep(0.2)
                restarted = victim.processes()[1] not in ([], [engine]) and client.is_ready()

    found = silent_connections(
        victim.host, [victim.port, victim.grpc_port], count=count, meanwhile=kill
    )
    return found | {
        "answered": found["probes_answered"] / max(1, found["probes_asked"]),
        "restarted": int(restarted),
    }


def _report(console: Any, figures: dict[str, Any], args: argparse.Namespace) -> int:
    table = Table(title="Hostile clients: what one key can do to others")
    for heading in ("what", "figure", "must", "stretch", "kept"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    missed = []
    for row in rows(figures):
        if row.scenario not in figures:
            continue
        value = float(figures[row.scenario][row.figure])
        kept, stretched = row.keeps(value, row.must), row.keeps(value, row.stretch)
        missed += [] if kept else [row.what]
        table.add_row(
            row.what,
            f"{value:g} {row.unit}".strip(),
            "-" if row.must == float("inf") else f"{row.must:g}",
            "-" if row.stretch is None else f"{row.stretch:g}",
            "stretch" if stretched else "yes" if kept else "NO",
        )
    console.print(table)
    summary = {"bench": "hostile", "quick": bool(args.quick), **figures, "missed": missed}
    finish(args, summary, on_gpu=False, program=PROGRAM)
    return 1 if missed and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
