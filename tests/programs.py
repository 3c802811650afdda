"""Programs that tests run and pip does not bring; `programs.sh` installs them."""

from __future__ import annotations

import os
import shutil

import pytest


def require(program: str) -> None:
    """Without it the test is skipped, and where CI is set it fails: nobody reads there what was
    skipped.
    """
    if shutil.which(program) is None:
        miss = pytest.fail if os.environ.get("CI") else pytest.skip
        miss(
            f"{program} is not on PATH: make programs installs it, or apt-get install prometheus on Debian"
        )
