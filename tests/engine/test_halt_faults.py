"""Pauses, sleeps and wake-ups that fail, wait, or come in any order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.halting import (
    bits,
    disk_full,
    done,
    engine,
    expected,
    out_of_memory,
    send,
    speculating,
    started,
)
from tests.engine.pushing import Pushable, why
from tests.engine.weight_cases import request, root, settings
from tlt_server.engine.gate import Reason
from tlt_server.engine.halt import DeviceMemory
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import EngineFailed
from tlt_server.wire.commands import ControlCommand, Pause, Resume, Sleep, WakeUp

__all__ = ["engine", "expected", "root", "settings"]  # fixtures


@pytest.fixture(scope="module")
def one_engine(settings: EngineSettings) -> Pushable:
    return speculating(settings)


def test_full_disk_leaves_the_weights_awake(
    engine: Pushable, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(engine)
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", disk_full)
        report = send(engine, Sleep("s", ["weights", "kv_cache"]))
    assert why(report).startswith("storage_failed") and "No space" in why(report)
    engine.finish()
    assert bits(engine) == expected


@pytest.mark.parametrize("place", ["pages", "weights"])
def test_failed_wake_up_stays_asleep_and_can_be_repeated(
    place: str, engine: Pushable, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full by now, so the weights could not be put away again."""
    started(engine)
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    halt = engine.engine.halt
    taken: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", disk_full)
        device = Counted(halt._device, taken, fails=place == "pages")
        patched.setattr(halt, "_device", device)
        if place == "weights":
            patched.setattr(halt._dormant, "bring_back", out_of_memory)
        report = send(engine, WakeUp("w", ["weights", "kv_cache"]))
    assert why(report).startswith("unavailable") and "stays asleep" in why(report)
    given_back = ["reclaimed", "freed"] if place == "weights" else []
    assert taken == given_back, "what was taken is given back"
    assert engine.push("new", "v1").result == "conflict", "the weights still sleep"
    done(engine, WakeUp("w", ["weights", "kv_cache"]))
    engine.finish()
    assert bits(engine) == expected


def test_rank_lost_during_wake_up_gets_no_second_order(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    halt, taken = engine.engine.halt, list[str]()

    def lost() -> None:
        raise EngineFailed("rank 1 has ended")

    with monkeypatch.context() as patched:
        patched.setattr(halt, "_device", Counted(halt._device, taken, fails=False))
        patched.setattr(halt._dormant, "bring_back", lost)
        with pytest.raises(EngineFailed, match="rank 1 has ended"):
            send(engine, WakeUp("w", ["weights", "kv_cache"]))
    assert taken == ["reclaimed"], "its engine ends now"
    halt._device.free()
    done(engine, WakeUp("w", ["weights", "kv_cache"]))


class Counted:
    """The memory of a device, with a record of the calls to it."""

    def __init__(self, equipment: DeviceMemory, told: list[str], *, fails: bool) -> None:
        self._equipment, self._told, self._fails = equipment, told, fails

    def reclaim(self) -> None:
        if self._fails:
            out_of_memory()
        self._told.append("reclaimed")
        self._equipment.reclaim()

    def free(self) -> None:
        self._told.append("freed")
        self._equipment.free()

    def forget(self) -> None:
        self._equipment.forget()


def test_failed_sleep_aborts_no_request(engine: Pushable, root: Path, expected: object) -> None:
    started(engine)
    id = engine.send_push(root / "base", "v1", commit=False)
    report = send(engine, Sleep("s", ["weights"], "abort"))
    assert why(report).startswith("conflict")
    engine.report(id)
    engine.finish()
    assert bits(engine) == expected


IN_FLIGHT = st.sampled_from(["continue", "recompute", "abort", "drain"])


MEMORY = st.sampled_from([["weights"], ["kv_cache"], ["weights", "kv_cache"]])


COMMANDS = st.one_of(
    st.builds(lambda how: Pause("", how), IN_FLIGHT),
    st.just(Resume("")),
    st.builds(lambda memory, how: Sleep("", memory, how), MEMORY, IN_FLIGHT),
    st.builds(lambda m: WakeUp("", m), MEMORY),
)


FAULTS = st.sampled_from(["", "", "disk full", "no pages", "no room"])


@given(st.lists(st.tuples(COMMANDS, FAULTS, st.integers(0, 3)), max_size=8))
@hypothesis.settings(max_examples=20, deadline=None)
def test_pause_and_sleep_answers_match_orders_despite_failures(
    one_engine: Pushable,
    expected: dict[str, object],
    commands: list[tuple[ControlCommand, str, int]],
) -> None:
    engine, halt = one_engine, one_engine.engine.halt
    paused, asleep, sent, answers = False, set(), {}, {}
    engine.said.clear()
    started(engine, 2)

    def told() -> None:
        nonlocal paused, asleep
        for report in engine.engine.control_reports():
            command = sent.pop(report.id)
            answers[report.id] = report.error
            if report.error is None:
                paused = isinstance(command, Pause) or (paused and not isinstance(command, Resume))
                asleep |= {*command.memory} if isinstance(command, Sleep) else set()
                asleep -= {*command.memory} if isinstance(command, WakeUp) else set()
        assert engine.engine.gate.by_operator == (paused or bool(asleep))
        assert engine.engine.gate.held_for(Reason.WEIGHTS_ASLEEP) == ("weights" in asleep)

    ends = [(Resume(""), "", 1), (WakeUp("", ["weights", "kv_cache"]), "", 1)]
    for i, (command, failure, steps) in enumerate([*commands, *ends]):
        sent[f"c{i}"] = msgspec.structs.replace(command, id=f"c{i}")
        with pytest.MonkeyPatch.context() as patched:
            if failure == "disk full":
                patched.setattr(tempfile, "TemporaryFile", disk_full)
            elif failure == "no pages":
                patched.setattr(halt, "_device", Counted(halt._device, [], fails=True))
            elif failure == "no room":
                patched.setattr(halt._dormant, "bring_back", out_of_memory)
            engine.engine.send(sent[f"c{i}"])
            engine.step()
        told()
        engine.step(steps)
        told()
    assert not sent, "each is answered once"
    assert not paused and not asleep, "the last two end every halt"
    engine.finish()
    assert all(engine.said[id][-1].finish_reason in ("length", "abort") for id in expected)
    assert engine.run(*(request(i) for i in range(3))) == expected
