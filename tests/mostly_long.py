"""Parametrised cases of which `make test` runs a few, and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_long(cases: Iterable[str], *quick: str) -> list[Any]:
    """Return the cases by name, all but the quick ones marked `long`."""
    named = list(cases)
    assert set(quick) < set(named), f"no case is called {set(quick) - set(named)}"
    return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in named]
