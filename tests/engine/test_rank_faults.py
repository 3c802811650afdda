"""A rank that is killed or stopped while an engine loads, or during a push: one error within its
bound, no process is left, and the next epoch has the version that was committed.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from tests.engine.pushing import Pushable
from tests.engine.test_ranks import root, settings, steps_until
from tests.engine.two_ranks import give_up_soon, ranks_of
from tests.mostly_long import mostly_long
from tlt_client.channels.checkpoint import SINGLE
from tlt_client.channels.checksums import mix64
from tlt_server.engine.cpu import device as cpu_device
from tlt_server.engine.cpu import link as cpu_link
from tlt_server.engine.ranks import ranks
from tlt_server.engine.ranks.answers import START_S
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import EngineFailed

__all__ = ["root", "settings"]  # fixtures

QUICK = (("once it is staged", "stopped"),)


class RankFault(NamedTuple):
    signal: int
    error: str


FAULTS = {
    "killed": RankFault(signal.SIGKILL, "rank 1 .*ended"),
    "stopped": RankFault(
        signal.SIGSTOP, r"rank 1 did not answer order \d+ \(\w+\) in |could not connect to rank 1"
    ),
}


def hit(engine: Ranks[Any], number: int, patch: pytest.MonkeyPatch) -> None:
    """Send a signal to rank 1, and return once it has ended or is stopped. A silent rank is given
    up after a second from now on.
    """
    give_up_soon(engine, patch)
    [process] = engine._processes
    os.kill(process.pid, number)
    if number == signal.SIGKILL:
        process.wait(60)
    while number == signal.SIGSTOP and state_of(process.pid) != "T":
        time.sleep(0.001)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def hit_before(patch: pytest.MonkeyPatch, holder: Any, name: str, hit: Callable[[], None]) -> None:
    """Let the fault happen just before the next call of this method."""
    call = getattr(holder, name)

    def called(*given: Any, **named: Any) -> Any:
        patch.setattr(holder, name, call)
        hit()
        return call(*given, **named)

    patch.setattr(holder, name, called)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ranks[Any]]]:
    """Yield the ranks of all engines. At the end none may be left."""
    monkeypatch.setattr(ranks, "BEAT_S", 0.3)
    found: list[Ranks[Any]] = []
    launch = Ranks._launch

    def noted(self: Ranks[Any], *given: Any) -> None:
        found.append(self)
        launch(self, *given)

    monkeypatch.setattr(Ranks, "_launch", noted)
    yield found
    for each in found:
        each.close()
        assert all(process.returncode == -signal.SIGKILL for process in each._processes)


LOADING: dict[str, tuple[Any, str]] = {
    "join": (cpu_link, "GlooExchange"),
    "hand_over": (Ranks, "hand_over"),
    "test": (cpu_device, "check_numerics"),
}


@pytest.mark.parametrize("moment", mostly_long(LOADING, "hand_over"))
@pytest.mark.parametrize("fault", mostly_long(FAULTS, "killed"))
def test_rank_lost_while_loading_is_one_error(
    settings: EngineSettings,
    launched: list[Ranks[Any]],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    fault: str,
) -> None:
    hit_before(
        monkeypatch, *LOADING[moment], lambda: hit(launched[0], FAULTS[fault].signal, monkeypatch)
    )
    began_s = time.monotonic()
    with pytest.raises(EngineFailed, match=FAULTS[fault].error):
        Pushable(replace(settings, tensor_parallel=2))
    assert time.monotonic() - began_s < START_S, "a rank that starts may take this long"


PUSH_MOMENTS = ("while it is staged", "once it is staged", "at install")


@pytest.mark.parametrize(
    ("moment", "fault"),
    [
        pytest.param(
            moment,
            fault,
            id=f"{fault} {moment}",
            marks=() if (moment, fault) in QUICK else pytest.mark.long,
        )
        for moment, fault in itertools.product(PUSH_MOMENTS, FAULTS)
    ],
)
def test_rank_lost_in_a_push_leaves_one_version_after_restart(
    settings: EngineSettings,
    launched: list[Ranks[Any]],
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    fault: str,
) -> None:
    """The new version once the commit has renamed its file, which comes before the install."""
    lasting = replace(settings, tensor_parallel=2, state_dir=tmp_path)
    engine = Pushable(lasting)
    before = engine.checksums()
    lost = partial(hit, ranks_of(engine), FAULTS[fault].signal, monkeypatch)
    if moment == "while it is staged":
        hit_before(monkeypatch, ranks_of(engine), "hand_over", lost)
    elif moment == "at install":
        hit_before(monkeypatch, engine.engine.pushes, "_install", lost)
    with pytest.raises(EngineFailed, match=FAULTS[fault].error):
        report = engine.push(root / "new", "v1", commit=moment == "at install")
        assert report.result == "staged", "it ends the epoch, not the push"
        if moment == "once it is staged":
            lost()
        steps_until(engine, lambda: False)
    engine.engine.pushes.transaction.close()
    ranks_of(engine).close()
    next_life = Pushable(replace(lasting, tensor_parallel=1))
    assert not next_life.info.lost
    pushed = {name: mix64(tensor) for name, tensor in load_file(root / "new" / SINGLE).items()}
    committed = moment == "at install"
    assert next_life.info.weight_version == ("v1" if committed else "initial")
    assert next_life.checksums() == (before | pushed if committed else before)
