"""The descriptors of this process: how many the settings need, the limit on them, and a reserve for
the next engine.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from tlt_server.config import Config
from tlt_server.errors import StartupError
from tlt_server.frontend.http.connections import PROBES, max_open

RESERVE = 64  # pipes and sockets to one engine
SPARE = 448  # libraries, model files, uploads, what a closed connection holds for a moment
# gRPC's core accepts by itself: it closes connections above its limit, the newest first, and silent
# ones after header_timeout_s. So it has more room.
GRPC_SILENT = 3


def max_grpc_connections(config: Config) -> int:
    return (1 + GRPC_SILENT) * config.max_connections


def needed(config: Config) -> int:
    """Return how many descriptors a server with these settings may use at once."""
    ports = max_open(config.max_connections)
    ports += PROBES if config.probe_port is not None else 0
    ports += max_grpc_connections(config) if config.grpc_port is not None else 0
    return ports + config.max_rollouts + RESERVE + SPARE


def shortage(config: Config) -> str:
    """Say by how much the hard limit is below what the settings need; empty if it is not."""
    need, limit = needed(config), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit not in range(need):  # RLIM_INFINITY is negative
        return ""
    return (
        f"this process may open {limit} files (the hard limit), and max_connections "
        f"{config.max_connections} with max_rollouts {config.max_rollouts} may need {need}; raise "
        f"the limit (ulimit -Hn {need}, LimitNOFILE, --ulimit nofile), or lower these settings"
    )


def raise_limit(config: Config) -> None:
    """Raise the soft limit to the hard one. `StartupError`: that is too low for the settings."""
    if short := shortage(config):
        raise StartupError(short)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # some systems refuse "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Reserve:
    """Descriptors held open so that they are there when an engine is launched."""

    def __init__(self, size: int = RESERVE) -> None:
        self._size = size
        self._held: list[int] = []
        self.fill()

    def fill(self) -> None:
        """Hold the whole reserve. `OSError`: there are not enough descriptors."""
        while len(self._held) < self._size:
            self._held.append(os.open(os.devnull, os.O_RDONLY))

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Give the reserve up for the length of a launch, and take again what is left after it.
        `OSError`, before anything is launched: it was not whole.
        """
        self.fill()
        self.close()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.fill()

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())
