"""Before anything imports torch: its libraries' environment; then two torch threads, as on the smallest machine we serve."""

from __future__ import annotations

import os

from tlt_server.models.environment import library_environment

os.environ.update(library_environment())

import torch  # noqa: E402

torch.set_num_threads(2)
