"""`python -m benchmarks.record_tests [--commit NAME] [pytest arguments]`: run on a GPU what needs one, and record what came of it.

The kernels' tests, all of which take the GPU where there is one, the other tests marked `gpu`, and `tlt bench exact --quick` on the
shipped pair.
The last result is benchmarks/results/test-gpu.json, red ones included.
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
ON_GPU = ("test_on_gpu.py", "test_channels_on_gpu.py")
RUNS = {  # bits of kernels first: nothing counts before they are right
    "products and attention": BITS,
    "other kernels": ("tests/kernels", *(f"--ignore={file}" for file in BITS)),
    "engine and server": ("tests/engine", *(f"tests/e2e/{file}" for file in ON_GPU), "-m", "gpu"),
}
EXACT = ("-m", "tlt_server", "bench", "exact", "--device", "cuda", "--quick")


def main(arguments: Sequence[str]) -> int:
    """0 if everything passed, 1 if not; exits with 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", metavar="NAME", help="of the code that runs [default: what git says]")
    asked, for_pytest = parser.parse_known_args(arguments)
    require_gpu("benchmarks.record_tests")
    command = "make test-gpu" + (f" ARGS={shlex.quote(shlex.join(for_pytest))}" if for_pytest else "")

    def record(came: dict[str, Any]) -> None:
        write_entry(RECORD, entry_of(came, command, on_gpu=True, commit=asked.commit))

    with tempfile.TemporaryDirectory() as folder:
        red, tests = False, {}
        for name, selection in RUNS.items():
            report = Path(folder) / f"{name}.xml"
            red |= bool(subprocess.run([sys.executable, "-m", "pytest", *selection, f"--junitxml={report}", *for_pytest]).returncode)
            tests[name] = counts(report)
            record(figures(tests, {}, red=True))  # until the rest has been looked at
        file = Path(folder) / "exact.json"
        red |= bool(subprocess.run([sys.executable, *EXACT, "--json", str(file)]).returncode)
        exact = json.loads(file.read_text())["figures"] if file.exists() else {}
    record(figures(tests, exact, red=red))
    print(f"{RECORD.name}: {'red' if red else 'green'}")
    return int(red)


def figures(tests: dict[str, dict[str, float]], exact: dict[str, Any], *, red: bool) -> dict[str, Any]:
    return {"bench": "test-gpu", "green": not red, "tests": tests, "exact": exact}


def counts(report: Path) -> dict[str, float]:
    """Of a JUnit report; a run that ended before it wrote one has no counts and one failure."""
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0, "seconds": 0.0}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    ran, failed, errors, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped"))
    return {"passed": ran - failed - errors - skipped, "failed": failed + errors, "skipped": skipped,
            "seconds": round(sum(float(suite.get("time", 0)) for suite in suites), 1)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
