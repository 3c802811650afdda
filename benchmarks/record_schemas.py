"""`python -m benchmarks.record_schemas [--commit NAME] [COUNT]`: let a small model answer generated
JSON schemas, 1,000 by default, and record how many answers are valid in
benchmarks/results/schemas-cpu.json.

It runs the test that is otherwise content with a few schemas.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tlt_server.bench.record import entry_of, write_entry

RECORD = Path(__file__).with_name("results") / "schemas-cpu.json"
FILE = "tests/engine/test_structured_outputs.py"
TEST = f"{FILE}::test_outputs_of_generated_schemas_are_valid"


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of pytest; only a green run is recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--commit", metavar="NAME", help="of the code [default: what git says]")
    parser.add_argument("count", metavar="COUNT", type=int, nargs="?", default=1000)
    asked = parser.parse_args(arguments)
    entry = entry_of(
        {}, f"python -m benchmarks.record_schemas {asked.count}", on_gpu=False, commit=asked.commit
    )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        how = ("-n", "0", f"--junitxml={report}", "-o", "junit_family=xunit1")
        environment = {**os.environ, "TLT_SCHEMAS": str(asked.count)}
        command = [sys.executable, "-m", "pytest", *how, TEST]
        status = subprocess.run(command, env=environment).returncode
        if status == 0:
            [counted] = ElementTree.parse(report).iter("property")
            figures = {"bench": "schemas", **json.loads(counted.get("value", "{}"))}
            write_entry(RECORD, entry | {"figures": figures})
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
