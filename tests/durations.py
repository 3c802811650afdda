"""`python -m tests.durations [--json FILE]`: the seconds of each file of tests in the last `make
test`, printed or recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from tests.again import RECORD
from tlt_server.bench.record import entry_of, write_entry


def by_file(seconds: dict[str, float]) -> Counter[str]:
    """Add up the seconds of tests by the file that their names begin with."""
    found: Counter[str] = Counter()
    for name, taken in seconds.items():
        found[name.partition("::")[0]] += taken
    return found


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--json", type=Path, metavar="FILE", help="[default: print them]")
    asked = flags.parse_args()
    if not RECORD.exists():
        sys.exit(f"{RECORD} is missing; `make test` writes it")
    files = by_file(json.loads(RECORD.read_text())["seconds"])
    if asked.json:
        found = {file: {"seconds": round(taken, 1)} for file, taken in files.most_common()}
        figures = {"bench": "test", "files": found, "storms": {}}
        write_entry(asked.json, entry_of(figures, "make test", on_gpu=False))
    else:
        for file, taken in files.most_common():
            print(f"{taken:8.1f} {file}")
        print(f"{files.total():8.1f} all {len(files)} files")
