"""Before anything imports torch: its libraries' environment; then two torch threads, as on the
smallest machine we serve, and without a GPU Triton's CPU interpreter, which must be chosen before a
kernel is imported. Hypothesis has no deadlines: machines are shared.

Under xdist a worker runs whole files, so that what a file's fixtures build is built once; the
end-to-end tests share one server, and kernels' tests, which share nothing, go one by one. Files for
a GPU have servers of their own.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tlt_server.models.environment import library_environment

os.environ.update(library_environment())
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and so would all it starts

import torch  # noqa: E402

torch.set_num_threads(2)
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


class ByShared(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/kernels/"):
            return nodeid
        file = nodeid.partition("::")[0]
        return (
            "tests/e2e"
            if file.startswith("tests/e2e/") and not file.endswith("_on_gpu.py")
            else file
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByShared:
    return ByShared(config, log)
