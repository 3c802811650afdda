"""`tlt doctor`: runs every check and prints its finding, with a remedy for each fault. Exit status
1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from subprocess import PIPE

import msgspec
from rich.console import Console
from rich.text import Text

from tlt_kernels.parents import bound
from tlt_server.config import Config
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.doctor.checks import Check, Finding, chosen, refused
from tlt_server.doctor.settings import usable_settings, written
from tlt_server.models.environment import library_environment
from tlt_server.process.faults import exit_of

CHILD = (sys.executable, "-P", "-m", "tlt_server.doctor.child")
CHILD_S = 300.0  # in which the child must be through; the self-test of a large model takes a minute
# Names of the flags that are no settings.
OTHERS = ("run", "config", "as_json", "launcher", "replicas", "ray_labels", "replica_cpus")
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run(arguments: argparse.Namespace) -> int:
    flags = {name: value for name, value in vars(arguments).items() if name not in OTHERS}
    if not ("model" in flags or "TLT_MODEL" in os.environ or arguments.config):
        flags = {"model": str(TARGET), "drafter": str(DRAFTER), **flags}  # the shipped pair
    findings = []
    console = Console(soft_wrap=True, highlight=False)
    for finding in chain(examine_all(flags, arguments.config), _cluster(flags, arguments)):
        findings.append(finding)
        if not arguments.as_json:
            _print(console, finding)
    names = {finding.check for finding in findings}
    failed = [*dict.fromkeys(each.check for each in findings if each.status == "fail")]
    if arguments.as_json:
        print(
            json.dumps(
                {
                    "ok": not failed,
                    "checks": [msgspec.structs.asdict(finding) for finding in findings],
                },
                indent=1,
            )
        )
    else:
        warned = sum(finding.status == "warn" for finding in findings)
        warnings = f", {warned} with a warning" if warned else ""
        console.print(
            f"{len(failed)} of {len(names)} checks failed: {', '.join(failed)}{warnings}"
            if failed
            else f"{len(names)} checks, none failed{warnings}"
            if warned
            else f"all {len(names)} checks passed",
            style="bold",
        )
    return 1 if failed else 0


def examine_all(flags: Mapping[str, object], file: Path | None) -> Iterator[Finding]:
    """Yield the findings in the order of the table. Each fault of the settings is one; a check that
    needs a faulty setting fails and names it.
    """
    config, faults = usable_settings(flags, file)
    if config is not None and not faults:
        described = f"model {config.model}, drafter {config.drafter}, policy {config.policy}"
        yield Finding("ok", described, check="settings")
    for fault in faults:
        yield msgspec.structs.replace(refused(fault), check="settings")
    with _child(config) as child:
        for check in chosen(config, in_child=False):
            yield check.run(config)
        yield from _reported(child, chosen(config, in_child=True))


def _cluster(flags: Mapping[str, object], arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings on the cluster of a launcher, if one is named."""
    config = usable_settings(flags, arguments.config).config if arguments.launcher else None
    if config is not None:
        yield from import_module("tlt_server.doctor.cluster").examine_cluster(config, arguments)


@contextlib.contextmanager
def _child(config: Config | None) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **library_environment(config.numerics if config else "strict")}
    child = subprocess.Popen(
        bound(CHILD), stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=environment
    )
    assert child.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(written(config) if config else "")
        child.stdin = None  # said all
        yield child
    finally:
        child.kill()
        child.communicate()


def _reported(child: subprocess.Popen[str], checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield the child's findings; if the child ended early, its unfinished check fails."""
    try:
        output, errors = child.communicate(timeout=CHILD_S)
        ended = exit_of(child.returncode)
    except subprocess.TimeoutExpired:
        child.kill()
        output, errors = child.communicate()
        ended = f"said nothing for {CHILD_S:g} s"
    findings = [msgspec.json.decode(line, type=Finding) for line in output.splitlines()]
    yield from findings
    for check in checks[len(findings) : len(findings) + 1]:
        said = errors.strip().splitlines()[-1:] or ["there is no message"]
        yield Finding(
            "fail",
            f"the process that checks it {ended}: {said[0]}",
            "reinstall torch and numba, in builds for this processor",
            check.name,
        )
    for check in checks[len(findings) + 1 :]:
        yield Finding("fail", "not checked, as the process ended before", "see above", check.name)


def _print(console: Console, finding: Finding) -> None:
    line = Text.assemble(
        (f"{finding.status:<5}", STYLES[finding.status]), f"{finding.check:<18}", finding.found
    )
    if finding.remedy:
        line.append(f"\n{'':<23}remedy: {finding.remedy}", style="bold")
    console.print(line)
