"""Engines of one rank and of two, to be compared. Fixtures take `settings` of the test module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.engine.pushing import Pushable
from tlt_server.engine.ranks import Ranks
from tlt_server.engine.settings import EngineSettings


def ranks_of(engine: Pushable) -> Ranks:
    runner = engine.engine.runner
    found = getattr(runner, "followers", None) or getattr(runner, "ranks", None)
    assert isinstance(found, Ranks)
    return found


@contextmanager
def two_ranks(settings: EngineSettings, **changes: object) -> Iterator[Pushable]:
    engine = Pushable(replace(settings, tensor_parallel=2, **changes))  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        ranks_of(engine).close()


@pytest.fixture(scope="module")
def one(settings: EngineSettings) -> Pushable:
    return Pushable(settings)


@pytest.fixture(scope="module")
def shared(settings: EngineSettings) -> Iterator[Pushable]:
    with two_ranks(settings) as engine:
        yield engine
