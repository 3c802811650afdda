"""Arguments of records, the tests that some of them run, and the files that they write."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tlt_server.bench.record import entry_of, without_folder, write_entry
from tlt_server.bench.settings import shape_of
from tlt_server.demo.workload import TARGET

RESULTS = Path(__file__).with_name("results")


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument(
        "--commit", metavar="NAME", help="of the code that runs [default: what git says]"
    )
    return found


def tested(
    *arguments: str, timeout_s: float | None = None, **environment: str
) -> tuple[int, list[ElementTree.Element]]:
    """Run pytest; return its exit status, -1 where it had to be ended, and the suites of its
    report: none where it ended before it wrote them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # The form with properties of tests.
        form = (f"--junitxml={report}", "-o", "junit_family=xunit1")
        command = [sys.executable, "-m", "pytest", *arguments, *form]
        try:
            status = subprocess.run(
                command, timeout=timeout_s, env={**os.environ, **environment}
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
        return status, suites(report)


def suites(report: Path) -> list[ElementTree.Element]:
    try:
        return [*ElementTree.parse(report).getroot().iter("testsuite")]
    except (OSError, ElementTree.ParseError):
        return []


class Served(NamedTuple):
    """A server that `tlt serve` starts with flags of the caller, and where its figures go."""

    flags: list[str]
    device: str
    width: int
    model: Path
    commit: str | None
    record: Path

    @classmethod
    def asked(cls, arguments: Sequence[str], description: str | None, record: Path) -> Served:
        """Read the arguments; `record` is the default of `--json`."""
        outer = parser(description)
        outer.add_argument(
            "--json", type=Path, default=record, metavar="FILE", help=f"[default {record.name}]"
        )
        outer.add_argument("flags", nargs="*", metavar="FLAG", help="of tlt serve, after --")
        found = outer.parse_args(arguments)
        named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        named.add_argument("--model", type=Path, default=TARGET)
        named.add_argument("--tensor-parallel", type=int, default=1)
        named.add_argument("--device", default="auto")
        said = named.parse_known_args(found.flags)[0]
        width = said.tensor_parallel
        return cls(found.flags, said.device, width, said.model, found.commit, found.json)

    def write(
        self, module: str, bench: str, rows: Sequence[Mapping[str, Any]], *, on_gpu: bool
    ) -> None:
        flags = " ".join(without_folder(flag) for flag in self.flags)
        figures = {
            "bench": bench,
            "shape": shape_of(self.model),
            "tensor_parallel": self.width,
            "rows": rows,
        }
        command = f"python -m {module} -- {flags}"
        write_entry(self.record, entry_of(figures, command, on_gpu=on_gpu, commit=self.commit))
