"""Start a server once and stop it: numba's cache and the bytecode are then there for every test."""

from __future__ import annotations

import os

from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET

if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with ServerProcess("--model", str(TARGET), "--drafter", str(DRAFTER)):
        pass
