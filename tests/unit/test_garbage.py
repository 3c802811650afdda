"""Collection of the oldest generation of objects, which never holds the loop for long."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from tlt_server.process import garbage
from tlt_server.process.garbage import FEW, MANY, NEVER, RENEWED, collect_while_few, loading, look


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_else_is_collected() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def old_cycle() -> weakref.ref[Cycle]:
    """Return a reference to a cycle that has become old."""
    held = Cycle()
    reference = weakref.ref(held)
    for _ in range(RENEWED):
        gc.collect(1)
    del held
    assert gc.get_count()[2] == RENEWED
    return reference


def test_garbage_cycles_are_collected_while_few_objects_are_old() -> None:
    cycle = old_cycle()
    look()
    assert cycle() is None and gc.get_count()[2] == 0


def test_garbage_cycles_wait_while_many_objects_are_old() -> None:
    held: list[list[int]] = [[] for _ in range(FEW)]
    cycle = old_cycle()
    look()
    assert cycle() is not None
    held.clear()
    look()
    assert cycle() is None


def test_garbage_cycles_are_collected_eventually(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "MANY", FEW)
    held: list[list[int]] = [[] for _ in range(FEW)]
    cycle = old_cycle()
    look()
    assert held and cycle() is None and MANY > FEW


def test_new_objects_trigger_no_collection_of_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = gc.get_threshold()
    monkeypatch.setattr(garbage, "EVERY_S", 0.001)

    async def main() -> None:
        collecting = asyncio.create_task(collect_while_few())
        await asyncio.sleep(0)
        assert gc.get_threshold() == (*thresholds[:2], NEVER)
        cycle = old_cycle()
        async with asyncio.timeout(30):
            while cycle() is not None:  # noqa: ASYNC110 (no event tells of it)
                await asyncio.sleep(0.001)
        collecting.cancel()
        await asyncio.wait({collecting})

    asyncio.run(main())
    assert gc.get_threshold() == thresholds


def test_libraries_load_without_garbage_collections() -> None:
    gc.enable()
    with loading():
        assert not gc.isenabled()
        held = Cycle()
        reference = weakref.ref(held)
        del held
    assert gc.isenabled()
    gc.collect()
    assert reference() is not None
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()
