"""`python -m benchmarks.record_schemas [--commit NAME] [COUNT]`: let a small model answer generated
JSON schemas, 1,000 by default, and record how many answers are valid in
benchmarks/results/schemas-cpu.json.

It runs the test that is otherwise content with a few schemas.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from benchmarks.recording import RESULTS, parser, tested
from tlt_server.bench.record import entry_of, write_entry

FILE = "tests/engine/test_structured_outputs.py"
TEST = f"{FILE}::test_outputs_of_generated_schemas_are_valid"


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of pytest; only a green run is recorded."""
    flags = parser(__doc__)
    flags.add_argument("count", metavar="COUNT", type=int, nargs="?", default=1000)
    asked = flags.parse_args(arguments)
    command = f"python -m benchmarks.record_schemas {asked.count}"
    entry = entry_of({}, command, on_gpu=False, commit=asked.commit)
    status, suites = tested("-n", "0", TEST, TLT_SCHEMAS=str(asked.count))
    if status == 0:
        [counted] = [value for suite in suites for value in suite.iter("property")]
        figures = {"bench": "schemas", **json.loads(counted.get("value", "{}"))}
        write_entry(RESULTS / "schemas-cpu.json", entry | {"figures": figures})
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
