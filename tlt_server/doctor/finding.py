"""The finding of a check: ok, warn (it works, but not as it could) or fail (`tlt serve` would not
work), and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

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
