"""NCCL that is joined, aborted and watched, with a library that only pretends."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tlt_server.engine.exchange import nccl
from tlt_server.engine.exchange.nccl import NcclGathering
from tlt_server.errors import EngineFailed

ROOM = torch.zeros(256)


class Library:
    def __init__(self) -> None:
        self.waits, self.aborted = threading.Event(), threading.Event()

    def ncclCommInitRankConfig(self, joined: Any, *rest: object) -> int:
        joined._obj.value = 1
        return 0

    def ncclCommGetAsyncError(self, joined: object, state: Any) -> int:
        return 0

    def ncclCommAbort(self, joined: object) -> int:
        self.aborted.set()
        return int(self.waits.wait(240))  # for graphs that have captured gathers


class Watched:
    def __init__(self) -> None:
        self.ended = False

    def check(self) -> None:
        if self.ended:
            raise EngineFailed("rank 1 ended")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(nccl, "library", lambda: made)
    monkeypatch.setattr(NcclGathering, "_connect", lambda self, room_X: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    return made


def gathering(check: Any = lambda: None, timeout_s: float = 5) -> NcclGathering:
    return NcclGathering(bytes(128), 0, 2, ROOM, check, timeout_s)


@pytest.mark.parametrize("dies", [True, False])
def test_nccl_is_aborted_when_a_rank_ends_or_its_user_is_freed(
    library: Library, dies: bool
) -> None:
    made, ranks = gathering(), Watched()
    made.watch(ranks.check)
    assert not library.aborted.wait(0.3)
    if dies:
        ranks.ended = True
    else:
        del ranks
    assert library.aborted.wait(60)
    started_s = time.monotonic()
    made.close()
    with pytest.raises(EngineFailed, match="NCCL was aborted"):
        made.gather(ROOM, ROOM)
    assert made.failure() == "" and time.monotonic() - started_s < 60, "it waited for graphs"
    library.waits.set()


def test_nccl_join_ends_when_a_rank_ends_or_at_its_timeout(library: Library) -> None:
    library.ncclCommInitRankConfig = lambda *_: library.waits.wait(60)  # type: ignore[method-assign]
    ranks = Watched()
    ranks.ended = True
    with pytest.raises(EngineFailed, match="rank 1 ended"):
        gathering(ranks.check)
    with pytest.raises(EngineFailed, match=r"did not connect rank 0 with the others in 0\.1 s"):
        gathering(timeout_s=0.1)
    library.waits.set()


def test_nccl_library_error_is_reported(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(result: int) -> None:
        raise RuntimeError(f"NCCL: error {result}")

    monkeypatch.setattr(nccl, "check_result", refused)
    with pytest.raises(RuntimeError, match="NCCL: error 0"):
        gathering()
