"""`python -m benchmarks.record_soak [-n WORKERS] [--commit NAME] [--json FILE] [TEST ...]`: run
the long tests, and record what came of them, red ones included.

Without names of tests these are all that are marked `soak`, and the record is
benchmarks/results/soak.json. `make soak` runs this. A few tests need a record of their own, by
`--json`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from benchmarks.recording import RESULTS, parser, tested
from tlt_server.bench.record import entry_of, write_entry

RECORD = RESULTS / "soak.json"


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of pytest."""
    flags = parser(__doc__)
    flags.add_argument("-n", metavar="WORKERS", default="2", help="of pytest [default: 2]")
    flags.add_argument(
        "--json", type=Path, metavar="FILE", help=f"[default: {RECORD.name}, of all tests]"
    )
    flags.add_argument(
        "tests", nargs="*", metavar="TEST", help="files, or tests of them [default: all]"
    )
    asked = flags.parse_args(arguments)
    if asked.tests and asked.json is None:
        flags.error(f"{RECORD.name} is the record of all long tests; name another by --json")
    record: Path = asked.json or RECORD
    command = f"python -m benchmarks.record_soak -n {asked.n} {' '.join(asked.tests)}".strip()
    entry = entry_of({}, command, on_gpu=False, commit=asked.commit)
    status, found = tested("-m", "soak", "-n", asked.n, "--durations=0", *asked.tests)
    if found:
        write_entry(record, entry | {"figures": figures(found)})
        print(f"{record.name}: {'green' if status == 0 else 'red'}")
    return status


def figures(suites: Iterable[Element]) -> dict[str, Any]:
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
        "bench": "soak",
        "green": bool(files) and not any(came["failed"] for came in files.values()),
        "files": {name: dict(sorted(came.items())) for name, came in sorted(files.items())},
        "storms": dict(sorted(counted.items())),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
