"""What the programs of this folder have in common at their end: figures on stdout as a last line of
JSON, and in a file if one is named.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt_server.bench.record import entry_of, told, write_entry


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the figures, with machine, versions and commit, as JSON",
    )
    parser.add_argument(
        "--commit", metavar="NAME", help="of the code that runs [default: what git says]"
    )


def finish(arguments: argparse.Namespace, figures: Mapping[str, Any], *, on_gpu: bool) -> None:
    if arguments.json:
        command = f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(told(argument) for argument in sys.argv[1:])}".strip()
        write_entry(
            arguments.json, entry_of(figures, command, on_gpu=on_gpu, commit=arguments.commit)
        )
    print(json.dumps(figures))
