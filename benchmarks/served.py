"""Arguments and figures that records share whose server `tlt serve` starts with flags of the
caller.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tlt_server.bench.record import without_folder
from tlt_server.bench.settings import shape_of
from tlt_server.demo.workload import TARGET


class Served(NamedTuple):
    """A server's flags, and where its figures go."""

    flags: list[str]
    device: str
    width: int
    model: Path
    commit: str | None
    record: Path

    def command(self, module: str) -> str:
        """Return the command line that a record names."""
        return f"python -m {module} -- {' '.join(without_folder(flag) for flag in self.flags)}"

    def figures(self, bench: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        shape = shape_of(self.model)
        return {"bench": bench, "shape": shape, "tensor_parallel": self.width, "rows": rows}


def asked(arguments: Sequence[str], description: str, record: Path) -> Served:
    """Read the arguments; `record` is the default of `--json`."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--commit", metavar="NAME", help="of the code [default: what git says]")
    parser.add_argument(
        "--json", type=Path, default=record, metavar="FILE", help=f"[default {record.name}]"
    )
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of tlt serve, after --")
    found = parser.parse_args(arguments)
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--model", type=Path, default=TARGET)
    named.add_argument("--tensor-parallel", type=int, default=1)
    named.add_argument("--device", default="auto")
    said = named.parse_known_args(found.flags)[0]
    return Served(
        found.flags, said.device, said.tensor_parallel, said.model, found.commit, found.json
    )
