"""Checks of the machine and the Python environment. No torch."""

from __future__ import annotations

import locale
import os
import platform
import resource
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tlt_server.config import Config
from tlt_server.doctor.checks import Finding, fail, ok, warn
from tlt_server.frontend.http.connections import needed, shortage
from tlt_server.models.environment import library_environment

SUPPORTED = ((3, 11), (3, 13))  # from, and below
DISTRIBUTIONS = ("tlt-server", "tlt-kernels", "tlt-client")
SOCKET_PATH = 107  # longest path of a Unix socket
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if SUPPORTED[0] <= sys.version_info[:2] < SUPPORTED[1]:
        return ok(found)
    return fail(found, "use Python 3.11 or 3.12: make setup PYTHON=/path/to/python3.12")


def packages() -> Finding:
    try:
        wanted = [
            Requirement(line) for name in DISTRIBUTIONS for line in metadata.requires(name) or ()
        ]
    except metadata.PackageNotFoundError as error:
        return warn(
            f"{error.name} runs from a checkout and is not installed, so what it requires is not "
            "known",
            "install it: pip install ./kernels ./clients .",
        )
    wrong: dict[str, str] = {}
    needed = [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    for need in needed:
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            wrong[f"{need.name}{need.specifier}"] = f"{need.name} is missing"
        else:
            if not need.specifier.contains(version, prereleases=True):
                wrong[f"{need.name}{need.specifier}"] = f"{need.name} is {version}"
    if wrong:
        return fail(
            ", ".join(wrong.values()), "pip install " + " ".join(f"'{need}'" for need in wrong)
        )
    return ok(f"{len(needed)} requirements are met")


def locale_encoding() -> Finding:
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") == "utf8":
        return ok(encoding)
    return warn(f"text files are read as {encoding}", "set LANG=C.UTF-8 or PYTHONUTF8=1")


def sockets() -> Finding:
    directory = Path(tempfile.gettempdir())
    longest = len(str(directory / "tlt-12345678" / "00" / "commands"))
    if longest > SOCKET_PATH:
        return fail(
            f"socket paths below {directory} have {longest} characters, the limit is {SOCKET_PATH}",
            "set TMPDIR to a shorter path",
        )
    return ok(f"temporary directory {directory}")


def open_files(config: Config) -> Finding:
    short = shortage(config)
    if short:
        found, _, remedy = short.partition("; ")
        return fail(found, remedy)
    return ok(f"limit {resource.getrlimit(resource.RLIMIT_NOFILE)[1]}, needed {needed(config)}")


def processors(config: Config) -> Finding:
    usable = float(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cpu_quota()
    usable = min(usable, quota or usable)
    assert isinstance(config.threads, int)
    if config.threads > usable:
        return warn(
            f"{config.threads} compute threads, but this process may use {usable:g} processors",
            f"--threads {max(1, int(usable))}, or give it more processors",
        )
    return ok(f"{config.threads} compute threads on {usable:g} processors")


def _cpu_quota() -> float | None:
    """Return the number of processors that the control group (a container's limit) allows."""
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such limit
        return None


def libraries(config: Config) -> Finding:
    chosen = library_environment(config.numerics)
    found = " ".join(f"{name}={value}" for name, value in chosen.items())
    if chosen["OMP_WAIT_POLICY"].upper() == "ACTIVE":
        return warn(
            found,
            "unset OMP_WAIT_POLICY: spinning threads keep frontend and clients off the processors",
        )
    return ok(found)
