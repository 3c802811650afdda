"""The checks that need torch, in a separate process: settings as JSON on stdin, one finding per
line on stdout.
"""

from __future__ import annotations

import os
import sys

import msgspec

from tlt_server.doctor.checks import chosen
from tlt_server.doctor.settings import read


def main() -> int:
    data = sys.stdin.read()
    config = read(data) if data else None
    with os.fdopen(os.dup(1), "w") as report:
        os.dup2(2, 1)  # what a library prints is no finding
        for check in chosen(config, in_child=True):
            report.write(msgspec.json.encode(check.run(config)).decode() + "\n")
            report.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
