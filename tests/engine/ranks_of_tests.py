"""Further ranks that run a program of these tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlt_server.engine.ranks import ranks

ROOT = str(Path(__file__).parents[2])


def run_rank_of_tests(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let ranks that start from now on run `tests.engine.NAME`."""
    patch.setattr(ranks, "RANK", f"tests.engine.{name}")
    patch.setenv("PYTHONPATH", ROOT, prepend=os.pathsep)
