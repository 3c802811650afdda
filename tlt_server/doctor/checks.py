"""The table of checks, in the order of the report, and their findings: ok, warn (it works, but not
as it could) or fail (`tlt serve` would not work). A check that needs torch runs in a child process,
which may crash without harm.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Literal, NamedTuple

from msgspec import Struct

from tlt_server.config import Config
from tlt_server.errors import TltError


class Finding(Struct, frozen=True):
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""
    check: str = ""


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warn(found: str, remedy: str) -> Finding:
    return Finding("warn", found, remedy)


def fail(found: str, remedy: str) -> Finding:
    return Finding("fail", found, remedy)


def refused(error: TltError) -> Finding:
    """Split our message into value and limit and, after a semicolon, the remedy."""
    found, _, remedy = error.message.partition("; ")
    return fail(found, remedy or "correct it; tlt serve --help lists all settings")


def examine(name: str, check: Callable[[], Finding]) -> Finding:
    """Return the check's finding under its name; a raised error is a finding, too."""
    try:
        finding = check()
    except TltError as error:
        finding = refused(error)
    except Exception as error:
        finding = fail(
            f"the check itself broke: {type(error).__name__}: {error}",
            "the machine is in an unusual state; if it is not, report this line",
        )
    return Finding(finding.status, finding.found, finding.remedy, name)


class Check(NamedTuple):
    name: str
    where: str  # module:function below `tlt_server.doctor`
    needs_settings: bool = True  # its one argument
    in_child: bool = False

    def run(self, config: Config | None) -> Finding:
        def check() -> Finding:
            module, _, function = self.where.partition(":")
            found: Finding = getattr(import_module(f"tlt_server.doctor.{module}"), function)(
                *([config] if self.needs_settings else [])
            )
            return found

        return examine(self.name, check)


def chosen(config: Config | None, *, in_child: bool) -> list[Check]:
    """Return the possible checks; without usable settings, only those that need none."""
    return [
        check
        for check in CHECKS
        if check.in_child == in_child and (config is not None or not check.needs_settings)
    ]


CHECKS = (
    Check("python", "host:python", needs_settings=False),
    Check("packages", "host:packages", needs_settings=False),
    Check("locale", "host:locale_encoding", needs_settings=False),
    Check("sockets", "host:sockets", needs_settings=False),
    Check("open files", "host:open_files"),
    Check("processors", "host:processors"),
    Check("libraries", "host:libraries"),
    Check("port", "places:port"),
    Check("api keys", "places:api_keys"),
    Check("certificates", "places:certificates"),
    Check("traces", "places:traces"),
    Check("weight root", "places:weight_root"),
    Check("state directory", "places:state_directory"),
    Check("step times", "places:step_times"),
    Check("disk", "places:disk_space"),
    Check("tokenizer", "places:tokenizer"),
    Check("torch", "compute:torch_import", needs_settings=False, in_child=True),
    Check("gpu", "compute:gpu", needs_settings=False, in_child=True),
    Check("kernels", "compute:kernels", needs_settings=False, in_child=True),
    Check("device", "model:device", in_child=True),
    Check("model", "model:target", in_child=True),
    Check("drafter", "model:drafter", in_child=True),
    Check("numerics", "model:numerics", in_child=True),
    Check("memory", "model:memory", in_child=True),
    Check("committed weights", "model:committed_weights", in_child=True),
)
