"""`python -m tests.durations`: the seconds of each file of tests in the last `make test`."""

from __future__ import annotations

import json
import sys
from collections import Counter

from tests.again import RECORD


def by_file(seconds: dict[str, float]) -> Counter[str]:
    """Add up the seconds of tests by the file that their names begin with."""
    found: Counter[str] = Counter()
    for name, taken in seconds.items():
        found[name.partition("::")[0]] += taken
    return found


if __name__ == "__main__":
    if not RECORD.exists():
        sys.exit(f"{RECORD} is missing; `make test` writes it")
    files = by_file(json.loads(RECORD.read_text())["seconds"])
    for file, taken in files.most_common():
        print(f"{taken:8.1f} {file}")
    print(f"{files.total():8.1f} all {len(files)} files")
