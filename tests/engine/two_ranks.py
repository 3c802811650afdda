"""Engines of one rank and of two, to be compared. Fixtures take `settings` of the test module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.pushing import Pushable
from tlt_server.engine.cpu.link import CpuLink
from tlt_server.engine.exchange import gloo
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.engine.settings import EngineSettings


def ranks_of(engine: Pushable) -> Ranks[Any]:
    found = engine.engine.runner.ranks  # type: ignore[attr-defined]
    assert isinstance(found, Ranks)
    return found


def give_up_soon(ranks: Ranks[Any], patch: pytest.MonkeyPatch) -> None:
    """Give a silent rank up after a second. To be called just before one falls silent: a live rank
    of a loaded machine may be as slow.
    """
    for name, bound_s in (("JOIN_S", 5.0), ("FIRST_S", 1.0), ("WAIT_S", 1.0)):
        patch.setattr(gloo, name, bound_s)
    patch.setattr(CpuLink, "answer_s", 1.0)
    ranks._answers.patience_s = 1.0
    if "link" in vars(ranks):  # it has joined
        ranks.link.exchange._wait_s = 1.0


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
