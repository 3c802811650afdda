"""`python -m benchmarks.record_tests [--part NAME ...] [--commit NAME] [pytest arguments]`: run on a GPU what needs one, record the rest.

The kernels' tests, all of which take the GPU where there is one, the other tests marked `gpu`, and `tlt bench exact --quick` on the
shipped pair. The last result is benchmarks/results/test-gpu.json, red ones included; what ends early leaves what it has come to. Where a
machine is lent for minutes, parts run one at a time: those of one commit, machine and set of versions stand in one record, which is green
once all are there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.graph_time import require_gpu
from tlt_server.bench.record import entry_of, write_entry

RECORD = Path(__file__).with_name("results") / "test-gpu.json"
BITS = ("tests/kernels/test_gpu_gemm.py", "tests/kernels/test_gpu_attention.py")
ALONE = ("-m", "gpu", "-n", "0")  # they fill a GPU's memory, and wait no longer than a server should take
RUNS = {  # bits of kernels first: nothing counts before they are right
    "products and attention": BITS,
    "other kernels": ("tests/kernels", *(f"--ignore={file}" for file in BITS)),
    "engine": ("tests/engine", "-m", "gpu"),
    "server": ("tests/e2e/test_on_gpu.py", *ALONE),
    "weight channels": ("tests/e2e/test_channels_on_gpu.py", *ALONE),
}
LIMIT = ("--timeout", "240")  # seconds of one test, its fixtures included
EXACT = "exactness"
EXACT_COMMAND = ("-m", "tlt_server", "bench", "exact", "--device", "cuda", "--quick")
SAME = ("commit", "machine", "versions")


def main(arguments: Sequence[str]) -> int:
    """0 if everything passed, 1 if not; exits with 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", metavar="NAME", help="of the code that runs [default: what git says]")
    parser.add_argument("--part", action="append", choices=[*RUNS, EXACT], metavar="NAME", help=f"one of {', '.join([*RUNS, EXACT])} "
                        "[default: all]; may be given several times, and adds to the record of the same commit and machine")
    asked, for_pytest = parser.parse_known_args(arguments)
    require_gpu("benchmarks.record_tests")
    command = "make test-gpu" + (f" ARGS={shlex.quote(shlex.join(for_pytest))}" if for_pytest else "")
    entry = entry_of({}, command, on_gpu=True, commit=asked.commit)
    tests, exact = begun(entry) if asked.part else ({}, {})
    for part in asked.part or [*RUNS, EXACT]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            if part == EXACT:
                subprocess.run([sys.executable, *EXACT_COMMAND, "--json", str(report)])
                exact = json.loads(report.read_text())["figures"] if report.exists() else {}
            else:
                subprocess.run([sys.executable, "-m", "pytest", *for_pytest, *LIMIT, *RUNS[part], f"--junitxml={report}"])
                tests[part] = counts(report)
        found = figures(tests, exact)
        write_entry(RECORD, entry | {"figures": found})
    print(f"{RECORD.name}: {'green' if found['green'] else 'red'}")
    return int(not found["green"])


def begun(entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tests and exactness of the record, if it is of the same code on the same machine."""
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    same = before and all(before[name] == entry[name] for name in SAME)
    return (before["figures"]["tests"], before["figures"]["exact"]) if same else ({}, {})


def figures(tests: dict[str, dict[str, Any]], exact: dict[str, Any]) -> dict[str, Any]:
    """Green: every part ran, none of its tests failed, not one bit differed."""
    passed = tests.keys() == RUNS.keys() and all(came["passed"] and not came["failed"] for came in tests.values())
    same = bool(exact) and not (exact["differing_tokens"] or exact["differing_logprob_bits"])
    return {"bench": "test-gpu", "green": passed and same, "tests": {name: tests[name] for name in RUNS if name in tests}, "exact": exact}


def counts(report: Path) -> dict[str, Any]:
    """Of a JUnit report, with the names of what failed; a run that ended before it wrote one has no counts and one failure."""
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0, "seconds": 0.0, "red": ["the run, which left no report"]}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    ran, failed, errors, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped"))
    red = {case.get("name", "") for suite in suites for case in suite.iter("testcase") if {"failure", "error"} & {at.tag for at in case}}
    return {"passed": ran - failed - errors - skipped, "failed": failed + errors, "skipped": skipped,
            "seconds": round(sum(float(suite.get("time", 0)) for suite in suites), 1), **({"red": sorted(red)} if red else {})}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
