"""Threads next to the loop are few, and one that cannot be started is an error for the command that
needs it, not the end of the engine.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.pushing import Pushable, cpu_settings, perturbed, small_request
from tests.engine.tiny import SMALLEST, write_target
from tlt_client.channels.errors import ChannelLost, ContentRefused
from tlt_client.channels.groups import MAX_GROUPS, Groups, Membership, WeightGroup, host_store
from tlt_server.engine.pushes.group_joins import MAX_JOINS
from tlt_server.engine.pushes.reads import MAX_READERS
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import Unavailable, from_code
from tlt_server.process.threads import Crew, started
from tlt_server.weights import checksums
from tlt_server.wire.commands import CommitWeights, JoinGroup, LookAtWeights, Sleep


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    write_target(tmp_path / "base", shape=SMALLEST)
    perturbed(tmp_path / "base", tmp_path / "root" / "new", 1)
    return cpu_settings(
        tmp_path / "base",
        kv_memory_mb=4,
        threads=1,
        weight_channels="disk,broadcast",
        weight_root=str(tmp_path / "root"),
    )


def join(id: str) -> JoinGroup:
    return JoinGroup(
        id, id, backend="gloo", master_address="127.0.0.1", master_port=1, rank=1, world_size=2
    )


def unavailable(engine: Pushable, id: str) -> str:
    error = engine.report(id).error
    assert error is not None and error[0] == "unavailable" and from_code(*error).http_status == 503
    return error[1]


def lives(engine: Pushable) -> bool:
    tokens, _ = engine.run(small_request(3))["r"]
    return len(tokens) == 3


def test_concurrent_group_joins_are_bounded(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, engine = threading.Event(), Pushable(settings)
    monkeypatch.setattr(Groups, "join", lambda self, member: go_on.wait(60))
    for i in range(MAX_JOINS + 2):
        engine.engine.send(join(f"j{i}"))
    for i in (MAX_JOINS, MAX_JOINS + 1):
        reason = unavailable(engine, f"j{i}")
        assert f"the limit is {MAX_JOINS}" in reason and "wait for one" in reason
    go_on.set()
    assert [engine.report(f"j{i}").result for i in range(MAX_JOINS)] == ["joined"] * MAX_JOINS
    engine.until(lambda: not engine.engine.pushes.busy, "end of the joins")
    engine.engine.send(join("later"))
    assert engine.report("later").result == "joined"


def test_weight_readers_are_bounded_even_after_a_commit(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, sound, engine = threading.Event(), checksums.mix64, Pushable(settings)
    assert engine.push("new", "v", commit=False).result == "staged"
    monkeypatch.setattr(checksums, "mix64", lambda tensor: (go_on.wait(60), sound(tensor))[1])
    engine.engine.send(LookAtWeights("l0", checksums=True))
    engine.step()
    engine.engine.send(CommitWeights("c", "v"))
    for i in range(1, MAX_READERS + 1):
        engine.engine.send(LookAtWeights(f"l{i}", checksums=True))
    assert f"the limit is {MAX_READERS}" in unavailable(engine, f"l{MAX_READERS}")
    go_on.set()
    assert all(engine.report(f"l{i}").result == "looked" for i in range(MAX_READERS))
    assert engine.report("c").result == "committed"


@pytest.mark.parametrize("staging", [None, "none"])
def test_failed_thread_start_is_reported_and_engine_survives(
    staging: str, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Pushable(replace(settings, weight_staging=staging))
    sums = engine.checksums()

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        engine.engine.send(join("j"))
        engine.engine.send(LookAtWeights("l", checksums=True))
        push = engine.send_push("new", "v")
        for id in ("j", "l", push):
            reason = unavailable(engine, id)
            assert "can't start new thread" in reason and "pids limit" in reason
        assert lives(engine) and not engine.engine.pushes.busy
    assert engine.checksums() == sums and engine.push("new", "v").result == "committed"


def test_every_failed_join_is_answered(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Pushable(settings)
    monkeypatch.setattr(Groups, "join", lambda self, member: {}["missing"])
    engine.engine.send(join("j"))
    error = engine.report("j").error
    assert error is not None
    assert error[0] == "channel_broken"
    assert "KeyError" in error[1]
    assert "join it again" in error[1]


def test_thread_bound_counts_waiting_calls_but_not_ended_threads() -> None:
    go_on, crew = threading.Event(), Crew("do it", 2)
    crew.check_room(1)
    with pytest.raises(Unavailable, match="2 calls to do it run or wait already, the limit is 2"):
        crew.check_room(2)
    for _ in range(2):
        crew.start(lambda: (go_on.wait(60), None)[1])
    with pytest.raises(Unavailable):
        crew.check_room()
    go_on.set()
    started("wait", lambda: None).join()
    while crew.busy:
        pass
    crew.check_room(1)


def test_broken_groups_are_not_counted_or_listed(settings: EngineSettings) -> None:
    pushes, stores = Pushable(settings).engine.pushes, []

    def join(name: str) -> WeightGroup:
        stores.append(host_store("127.0.0.1", 0, 2, 20))
        with ThreadPoolExecutor(1) as pool:
            ours = pool.submit(
                pushes.transaction.options.intake.groups.join,
                Membership(name, "gloo", "127.0.0.1", stores[-1].port, 1, 2),
            )
            theirs = WeightGroup(
                Membership(name, "gloo", "127.0.0.1", stores[-1].port, 0, 2), stores[-1]
            )
            ours.result()
        return theirs

    trainers = [join(str(i)) for i in range(MAX_GROUPS)]
    with pytest.raises(ContentRefused, match="the limit is"):
        pushes.transaction.options.intake.groups.join(
            Membership("more", "gloo", "127.0.0.1", 1, 1, 2)
        )
    pushes.transaction.options.intake.groups["3"].close()
    assert pushes.state().groups == sorted({*map(str, range(MAX_GROUPS))} - {"3"})
    trainers.append(join("more"))
    assert "more" in pushes.state().groups
    with pytest.raises(ChannelLost, match="no group '3'"):
        pushes.transaction.options.intake.groups["3"]
    for trainer in trainers:
        trainer.close()


def test_sleep_is_refused_while_a_trainer_holds_the_gpu(settings: EngineSettings) -> None:
    """Giving memory back waits for every kernel, and so would the loop for the trainer."""
    engine = Pushable(settings)
    groups = engine.engine.pushes.transaction.options.intake.groups
    for backend, code in (("nccl", "conflict"), ("gloo", None)):
        groups._joining.append(Membership("g", backend, "127.0.0.1", 1, 1, 2))
        engine.engine.send(Sleep(backend, ["kv_cache"]))
        engine.step()
        (report,) = engine.engine.control_reports()
        assert (report.error and report.error[0]) == code
        groups._joining.clear()
