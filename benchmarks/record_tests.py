"""`python -m benchmarks.record_tests [--gpus N] [--part NAME ...] [-n WORKERS] [-v]
[--commit NAME]`: run on a GPU what needs one, and record it.

The kernels' tests, all of which take the GPU where there is one, the other tests marked `gpu`, and
`tlt bench exact --quick` on the shipped pair. `--gpus 2`: the tests of ranks on two GPUs, and
exactness over both. The last result is benchmarks/results/test-gpu.json or test-tp2-gpu.json, red
ones included; a run that ends early leaves the parts that ended. Where a machine is lent for
minutes, parts run one at a time: those of one commit, machine and set of versions stand in one
record, which is green once all are there. Exactness is red, too, if the bits of its first run moved
and the fingerprint did not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from msgspec.structs import asdict

from benchmarks.record import RESULTS, tested
from tlt_server.bench.micro import require_gpu
from tlt_server.bench.record import entry_of, write_entry
from tlt_server.errors import StartupError
from tlt_server.wire.fingerprint import Fingerprint

BITS = (
    "tests/kernels/test_gpu_gemm.py",
    "tests/kernels/test_gpu_leaves.py",
    "tests/kernels/test_gpu_attention.py",
)
# They fill a GPU's memory, and wait no longer than a server should take.
ALONE = ("-m", "gpu", "-n", "0")
RUNS = {  # bits of kernels first: nothing counts before they are right
    "matmuls and attention": BITS,
    "other kernels": ("tests/kernels", *(f"--ignore={file}" for file in BITS)),
    "engine": ("tests/engine", "-m", "gpu"),
    "trainer": ("tests/trainer", "-m", "gpu"),
    "server": ("tests/e2e/test_on_gpu.py", *ALONE),
    "weight channels": ("tests/e2e/test_channels_on_gpu.py", *ALONE),
}
OVER_TWO = {
    "exchange": ("tests/kernels/test_gpu_rank_exchange.py", "-n", "0"),
    "engine": (
        "tests/engine/test_gpu_ranks_on_gpus.py",
        "tests/engine/test_strategies_on_gpu.py",
        *ALONE,
    ),
    "weight channels": ("tests/e2e/test_channels_on_gpu.py", *ALONE),
}
TEST_S = 400  # one test with its fixtures and cold kernels of every width
PART_S = 1800  # one part; ends a test that hangs in a call of the driver
EXACT = "exactness"
EXACT_COMMAND = ("-m", "tlt_server", "bench", "exact", "--device", "cuda", "--quick")


class Plan(NamedTuple):
    """Tests that need this many GPUs, and the record of them."""

    gpus: int
    runs: dict[str, tuple[str, ...]]  # arguments of pytest by part

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.runs, EXACT)

    @property
    def record(self) -> Path:
        return RESULTS / ("test-gpu.json" if self.gpus == 1 else f"test-tp{self.gpus}-gpu.json")

    @property
    def exact(self) -> tuple[str, ...]:
        return (*EXACT_COMMAND, "--tensor-parallel", str(self.gpus))

    @property
    def make(self) -> str:
        return "make test-gpu" if self.gpus == 1 else f"make test-gpu GPUS={self.gpus}"


PLANS = {1: Plan(1, RUNS), 2: Plan(2, OVER_TWO)}


class Golden(NamedTuple):
    """The known bits of the exactness bench, for one fingerprint and these versions."""

    gpus: int
    fingerprint: Fingerprint
    versions: dict[str, str]
    bits: str


GOLDEN = (
    Golden(
        1,
        Fingerprint(2, "bfloat16", "sm_90", "strict 1", "triton"),
        {"torch": "2.11.0", "triton": "3.6.0"},
        "f02cb6171e975c42",
    ),
    Golden(
        2,
        Fingerprint(2, "bfloat16", "sm_90", "strict 1", "triton"),
        {"torch": "2.11.0", "triton": "3.6.0"},
        "cef21f93cfd419e2",
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Return 0 if everything in the record passed, 1 if not, 2 without the GPUs or the part."""
    flags = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    help = "of the code that runs [default: what git says]"
    flags.add_argument("--commit", metavar="NAME", help=help)
    flags.add_argument(
        "--gpus", type=int, choices=PLANS, default=1, help="that a test needs [default 1]"
    )
    flags.add_argument(
        "--part",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(PLANS[1].parts)}; with --gpus 2 of {', '.join(PLANS[2].parts)} "
        "[default: all]; may be given several times, and adds to the record of the same commit "
        "and machine",
    )
    help = "of pytest, where tests need not run alone [default: none]"
    flags.add_argument("-n", metavar="WORKERS", default="0", help=help)
    flags.add_argument("-v", action="store_true", help="name every test")
    asked = flags.parse_args(arguments)
    plan = PLANS[asked.gpus]
    if unknown := set(asked.part or ()) - set(plan.parts):
        flags.error(f"no part is called {unknown.pop()!r}; name one of {', '.join(plan.parts)}")
    try:
        require_gpu(plan.gpus)
    except StartupError as error:
        print(f"benchmarks.record_tests: {error.message}", file=sys.stderr)
        return 2
    command = plan.make + (f" ARGS='-n {asked.n}'" if asked.n != "0" else "")
    entry = entry_of({}, command, on_gpu=True, commit=asked.commit)
    return record(plan, asked, entry)


def record(plan: Plan, asked: argparse.Namespace, entry: dict[str, Any]) -> int:
    """Run the parts, and write the record after each of them."""
    mine, exact, parts = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    how = ("--timeout", str(TEST_S), "-n", asked.n, *(["-vv"] if asked.v else []))
    for part in asked.part or plan.parts:
        if part == EXACT:
            mine[part], exact = exactness(plan, entry["versions"])
        else:
            status, suites = tested(*how, *plan.runs[part], timeout_s=PART_S)
            mine[part] = counts(suites, status)
        # Read again: other GPUs may have added parts.
        others, exact_before = recorded(plan, entry) if asked.part else ({}, {})
        parts = others | mine
        found = figures(plan, parts, exact if EXACT in mine else exact_before)
        write_entry(plan.record, entry | {"figures": found})
    print(f"{plan.record.name}: {'green' if found['green'] else 'red'}")
    return int(any(came["failed"] or not came["passed"] for came in parts.values()))


def exactness(plan: Plan, versions: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the counts of this part, and the figures of its bench."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        status = run(*plan.exact, "--json", str(report))
        exact = json.loads(report.read_text())["figures"] if report.exists() else {}
    red = ["tlt bench exact"] if status else moved(plan.gpus, exact, versions)
    came = {
        "passed": int(not red),
        "failed": len(red),
        "skipped": 0,
        "seconds": round(time.monotonic() - started, 1),
        **({"red": red} if red else {}),
    }
    return came, exact


def run(*command: str) -> int:
    """Return the command's exit status; not 0 for a run that was ended early."""
    try:
        return subprocess.run([sys.executable, *command], timeout=PART_S).returncode
    except subprocess.TimeoutExpired:
        return -1


def moved(gpus: int, exact: dict[str, Any], versions: dict[str, str]) -> list[str]:
    """Return a message if the bits of a run differ from those known for its fingerprint; empty if
    they agree or none are known.
    """
    return [
        f"the bits of the shipped pair moved from {golden.bits} to {exact['bits']}: raise the "
        "version in kernels/tlt_kernels/versions.py, or, if the pair or the requests changed, "
        "write them into GOLDEN of benchmarks/record_tests.py"
        for golden in GOLDEN
        if golden.gpus == gpus
        and asdict(golden.fingerprint) == exact.get("fingerprint")
        and golden.versions.items() <= versions.items()
        and golden.bits != exact["bits"]
    ]


def recorded(plan: Plan, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return parts and exactness of the record, if it is of the same committed code and machine."""
    before = json.loads(plan.record.read_text()) if plan.record.exists() else {}
    same = (
        before
        and code_and_machine(before) == code_and_machine(entry)
        and entry["commit"] != "unknown"
        and entry["commit"][-1] != "+"
    )
    return (before["figures"]["parts"], before["figures"]["exact"]) if same else ({}, {})


def code_and_machine(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that two records must share; parts that run at the same time share the
    cores.
    """
    return entry["commit"], re.sub(r"\d+ cores", "cores", entry["machine"]), entry["versions"]


def figures(plan: Plan, parts: dict[str, dict[str, Any]], exact: dict[str, Any]) -> dict[str, Any]:
    """Return the record's figures; green if every part ran without a failure."""
    green = parts.keys() == {*plan.parts} and all(
        came["passed"] and not came["failed"] for came in parts.values()
    )
    return {
        "bench": "test-gpu",
        "green": green,
        "parts": {name: parts[name] for name in plan.parts if name in parts},
        "exact": exact,
    }


def counts(suites: Sequence[ElementTree.Element], status: int) -> dict[str, Any]:
    """Count tests by result, and name the red ones, from a report and an exit status."""
    ill = {"failure", "error"}
    cases = [case for suite in suites for case in suite.iter("testcase")]
    ends = [{at.tag for at in case} for case in cases]
    red = sorted(
        {
            f"{case.get('classname')}::{case.get('name')}"
            for case, end in zip(cases, ends, strict=True)
            if end & ill
        }
    )
    if status and not red:
        red = [f"the run, which ended with status {status}"]
    skipped = sum("skipped" in end for end in ends)
    seconds = sum(float(suite.get("time", 0)) for suite in suites)
    return {
        "passed": sum(not end & {*ill, "skipped"} for end in ends),
        "failed": len(red),
        "skipped": skipped,
        "seconds": round(seconds, 1),
        **({"red": red} if red else {}),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
