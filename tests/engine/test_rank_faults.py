"""A rank that is killed or stopped, or whose device fails: one error within its bound, no process
is left, and the next epoch has the version that was committed. In a sleep nothing has changed, or
the epoch ends.
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

from tests.engine.halting import done, send
from tests.engine.pushing import Pushable, why
from tests.engine.ranks_of_tests import run_rank_of_tests
from tests.engine.test_engine import requests
from tests.engine.test_ranks import root, settings
from tests.engine.two_ranks import give_up_soon, ranks_of, two_ranks
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
from tlt_server.wire.commands import Sleep, WakeUp

__all__ = ["root", "settings"]  # fixtures

QUICK = (("once it is staged", "stopped"), ("at install", "killed"))


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


@pytest.fixture
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
def test_rank_lost_while_loading_is_reported_as_one_error(
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
        lost()
        engine.commit("v1")
    engine.engine.pushes.transaction.close()
    ranks_of(engine).close()
    next_life = Pushable(replace(lasting, tensor_parallel=1))
    assert not next_life.info.lost
    pushed = {name: mix64(tensor) for name, tensor in load_file(root / "new" / SINGLE).items()}
    committed = moment == "at install"
    assert next_life.info.weight_version == ("v1" if committed else "initial")
    assert next_life.checksums() == (before | pushed if committed else before)


ORDERS = {
    "loading": ("LoadShard", "CheckNumerics", "Allocate", "ExtendRows"),
    "serving": ("ExtendRows", "LoadShard", "Install", "Save", "FreePages"),
    "waking": ("ReclaimPages", "Restore"),
}
CASES = [f"{stage} {order}" for stage, orders in ORDERS.items() for order in orders]


@pytest.mark.parametrize("case", mostly_long(CASES, "serving ExtendRows"))
def test_device_failure_at_an_order_is_reported_as_one_error(
    settings: EngineSettings, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    failing, begun = case.split()[0], tmp_path / "begun"
    monkeypatch.setenv("FAILING_ORDER", case.split()[1])
    monkeypatch.setenv("FAILING_FROM", str(begun))
    run_rank_of_tests(monkeypatch, "failing_rank")
    entered: list[str] = []

    def enter(stage: str) -> None:
        entered.append(stage)
        if stage == failing:
            begun.touch()

    with pytest.raises(EngineFailed, match=r"rank 1 \(process \d+\) ended with status 1"):
        enter("loading")
        engine = Pushable(replace(settings, tensor_parallel=2, state_dir=tmp_path / "state"))
        enter("serving")
        engine.submit(*requests(2))
        engine.step()
        assert engine.push(root / "new", "v1").result == "committed"
        send(engine, Sleep("s", ("kv_cache",)))
        enter("waking")
        send(engine, WakeUp("w", ("kv_cache",)))
        engine.finish()
    assert entered[-1] == failing
    assert time.monotonic() - float(begun.read_text()) < 10


@pytest.fixture(scope="module")
def short(settings: EngineSettings) -> Iterator[Pushable]:
    with pytest.MonkeyPatch.context() as patch:
        run_rank_of_tests(patch, "short_rank")
        with two_ranks(settings) as engine:
            yield engine


def test_all_ranks_stay_asleep_if_one_lacks_memory(short: Pushable) -> None:
    done(short, Sleep("s", ("kv_cache",)))
    report = send(short, WakeUp("w", ("kv_cache",)))
    assert why(report).startswith("unavailable") and "stays asleep" in why(report)
    done(short, WakeUp("again", ("kv_cache",)))
    short.submit(*requests(2))
    short.finish()


def test_rank_lost_while_staging_ends_the_epoch(
    short: Pushable, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*told: object) -> None:
        raise EngineFailed("rank 1 did not answer in 120 s")

    monkeypatch.setattr(ranks_of(short), "hand_over", lost)
    with pytest.raises(EngineFailed, match="did not answer"):
        short.push(root / "new", "lost")
    short.engine.pushes.transaction.close()


def test_rank_death_in_a_sleep_ends_the_epoch(short: Pushable) -> None:
    done(short, Sleep("s2", ("kv_cache",)))
    [process] = ranks_of(short)._processes
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    with pytest.raises(EngineFailed, match="rank 1 .* ended"):
        short.engine.halt.apply(WakeUp("dead", ("kv_cache",)))
