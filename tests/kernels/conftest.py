"""The interpreter of the kernels' tests: the language is patched once per file, which saves a
third of their time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.triton_tests import DEVICE

# isort: split
from tests.engine.fast_interpreter import patched_once


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    if DEVICE != "cpu":
        yield
        return
    with patched_once():
        yield
