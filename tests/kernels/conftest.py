"""The interpreter of the kernels' tests: the language is patched once per file, which saves a
third of their time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    from tests.kernels.triton_tests import DEVICE

    if DEVICE != "cpu":
        yield
        return
    from tests.engine.fast_interpreter import patched_once

    with patched_once():
        yield
