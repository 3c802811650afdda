"""Ranks join by memory that they map, or all by a library where one of them cannot. Two threads are
the ranks, files their windows, and gloo stands for NCCL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tlt_kernels.gpu.exchange import PeerWindows, WindowSizes
from tlt_server.engine.exchange import joining
from tlt_server.engine.exchange.gathered import GatheredPeers
from tlt_server.engine.exchange.joining import FileWindows, JoinedRank, RankGroup, join
from tlt_server.errors import EngineFailed, StartupError
from tlt_server.settings.server import ExchangeName

RANKS, SIZES = 2, WindowSizes(256)


def both(call: Callable[[int], object]) -> list[object]:
    """Return each rank's result, or its error."""

    def caught(rank: int) -> object:
        try:
            return call(rank)
        except (EngineFailed, StartupError) as error:
            return error

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(caught, range(RANKS)))


def joined(directory: Path, by: ExchangeName) -> list[object]:
    return both(
        lambda rank: join(RankGroup(directory, rank, RANKS, torch.device("cpu")), SIZES, by)
    )


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 1 be unable to map memory."""
    opened = FileWindows.open

    def refused(self: FileWindows, grants: list[bytes], *, timeout_s: float) -> PeerWindows:
        if self._rank == 1:
            raise StartupError("rank 1 cannot map the memory of rank 0; GPUs must be peers")
        return opened(self, grants, timeout_s=timeout_s)

    monkeypatch.setattr(FileWindows, "open", refused)


def test_ranks_map_peer_memory_where_possible(tmp_path: Path) -> None:
    for by in ("auto", "nvlink"):
        (tmp_path / by).mkdir()
        for rank in joined(tmp_path / by, by):  # type: ignore[arg-type]
            assert isinstance(rank, JoinedRank) and isinstance(rank.peers, PeerWindows)
            rank.close()


def test_all_ranks_gather_if_one_cannot_map_memory(
    tmp_path: Path, no_peers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = joined(tmp_path, "auto")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "rank 1 cannot map" in said and "NCCL" in said
    peers = [each.peers for each in ranks if isinstance(each, JoinedRank)]
    assert [type(each) for each in peers] == [GatheredPeers] * RANKS
    for each in peers:
        each.room(1)[:3] = torch.arange(3) + 10 * each.rank
        each.mute()
        out = torch.full((RANKS, 3), -1.0)
        assert each.gather(each.room(1)[:3], out).eq(-1).all(), "one alone would wait"
        each.reset()
    outs = both(lambda rank: peers[rank].gather(peers[rank].room(1)[:3], torch.empty(RANKS, 3)))
    assert [each.tolist() for each in outs] == [[[0, 1, 2], [10, 11, 12]]] * RANKS  # type: ignore[attr-defined]
    assert [each.failure() for each in peers] == [""] * RANKS


def test_nvlink_is_refused_where_memory_cannot_be_mapped(tmp_path: Path, no_peers: None) -> None:
    for error in joined(tmp_path, "nvlink"):
        assert isinstance(error, StartupError)
        assert "must be peers, or leave out --exchange nvlink" in error.message


@pytest.mark.parametrize("comes", [True, False])
def test_mapping_refusal_is_reported_even_if_a_rank_has_ended(
    comes: bool, tmp_path: Path, no_peers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 ends while rank 0 looks whether all live, after the last meeting or before it."""
    looks, ended = threading.Event(), threading.Event()

    def unmap(self: FileWindows) -> None:
        if self._rank == 1:
            assert looks.wait(30)
            if not comes:
                raise EngineFailed("killed")

    def check() -> None:
        if (tmp_path / "unmapped.0").exists():
            looks.set()
            assert ended.wait(30)
            raise EngineFailed("rank 1 ended with status 2")

    def ending(rank: int) -> object:
        group = RankGroup(tmp_path, rank, RANKS, torch.device("cpu"))
        try:
            return join(group if rank else group._replace(check=check), SIZES, "nvlink")
        finally:
            if rank:
                ended.set()

    monkeypatch.setattr(FileWindows, "unmap", unmap)
    first = both(ending)[0]
    assert isinstance(first, StartupError if comes else EngineFailed)
    assert ("leave out --exchange" if comes else "rank 1 ended") in first.message


def test_error_names_both_the_failed_mapping_and_gathering(
    tmp_path: Path, no_peers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise RuntimeError("NCCL: unhandled system error")

    monkeypatch.setattr(joining, "connected", refused)
    for error in joined(tmp_path, "auto"):
        assert isinstance(error, StartupError)
        assert "cannot exchange by NCCL (NCCL: unhandled system error), and rank 1" in error.message


def test_absent_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOIN_S", 0.1)
    alone = partial(join, RankGroup(tmp_path, 0, RANKS, torch.device("cpu")), SIZES, "auto")
    with pytest.raises(EngineFailed, match="rank 1 did not arrive at 'grants' within 0.1 s"):
        alone()
