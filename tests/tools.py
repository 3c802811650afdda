"""Programs that tests run and pip does not bring; `tools.sh` installs them."""

from __future__ import annotations

import os
import shutil

import pytest


def require(program: str) -> None:
    """Skip the test where the program is missing; fail where CI is set: a skip goes unread."""
    if shutil.which(program) is None:
        miss = pytest.fail if os.environ.get("CI") else pytest.skip
        miss(f"{program} is not on PATH: run make tools, or apt-get install prometheus on Debian")
