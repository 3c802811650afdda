"""Before anything imports torch: the strict environment; then two torch threads, as on the smallest machine we serve."""

from __future__ import annotations

import os

from tlt_server.models.strict_environment import strict_environment

os.environ.update(strict_environment())

import torch  # noqa: E402

torch.set_num_threads(2)
