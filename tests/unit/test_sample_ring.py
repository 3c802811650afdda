"""The ring between two processes, whose entries arrive whole and in order or are dropped and
counted, and the word that tells the trainer of work.
"""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.errors import StartupError
from tlt_server.samples.activity import Activity, ActivityReader, make_activity
from tlt_server.samples.ring import ENTRY, HEAD_BYTES, RingConsumer, RingProducer, make_ring
from tlt_server.trainer.process.schedule import MODES

CAPACITY = 512


def ring(path: Path, capacity: int = CAPACITY) -> tuple[RingProducer, RingConsumer]:
    path.unlink(missing_ok=True)
    make_ring(path, capacity)
    return RingProducer(path), RingConsumer(path)


@given(st.lists(st.one_of(st.none(), st.binary(max_size=CAPACITY + 8)), max_size=40))
def test_ring_entries_are_read_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, turns: list[bytes | None]
) -> None:
    producer, consumer = ring(tmp_path_factory.getbasetemp() / "ring")
    inside: deque[bytes] = deque()
    dropped = 0
    for turn in turns:
        if turn is None:
            assert consumer.take() == (inside.popleft() if inside else None)
        elif producer.offer(turn):
            inside.append(turn)
        else:
            dropped += 1
            fit = [ENTRY + -(-len(entry) // 8) * 8 for entry in (*inside, turn)]
            assert sum(fit) > CAPACITY
        assert producer.used <= CAPACITY
    assert [consumer.take() for _ in inside] == [*inside] and consumer.take() is None
    assert (consumer.offered, consumer.dropped) == (sum(t is not None for t in turns), dropped)
    assert consumer.lost == 0


PRODUCER = """
import sys
from pathlib import Path
from tlt_server.samples.ring import RingProducer
ring = RingProducer(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    ring.offer(number.to_bytes(8, "little") * (1 + number * 37 % 60))
"""


def test_ring_entries_cross_between_running_processes(tmp_path: Path) -> None:
    path, entries = tmp_path / "ring", 20_000
    make_ring(path, 4096)
    consumer = RingConsumer(path)
    command = [sys.executable, "-c", PRODUCER, str(path), str(entries)]
    with subprocess.Popen(command) as producer:
        seen = []
        while producer.poll() is None or consumer.used:
            content = consumer.take()
            if content is not None:
                number = int.from_bytes(content[:8], "little")
                assert content == content[:8] * (1 + number * 37 % 60)
                seen.append(number)
    assert producer.returncode == 0
    assert seen == sorted(set(seen)) and len(seen) + consumer.dropped == entries
    assert consumer.offered == entries and consumer.lost == 0 and seen


def test_next_producer_continues_where_the_last_one_ended(tmp_path: Path) -> None:
    first, consumer = ring(tmp_path / "ring")
    first.offer(b"one")
    first.close()
    second = RingProducer(tmp_path / "ring")
    second.offer(b"two")
    assert [consumer.take(), consumer.take()] == [b"one", b"two"]


def test_partial_entry_is_never_taken(tmp_path: Path) -> None:
    producer, consumer = ring(tmp_path / "ring")
    producer.offer(b"entry")
    with open(tmp_path / "ring", "r+b") as file:
        file.seek(HEAD_BYTES + ENTRY)
        file.write(b"E")
    assert [consumer.take() for _ in range(4)] == [None] * 4
    assert consumer.lost == 1 and consumer.used == 0
    producer.offer(b"next")
    assert consumer.take() == b"next"


@pytest.mark.parametrize("content", [b"", b"x" * 64, bytes(1000)])
def test_foreign_file_is_refused_as_a_ring(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StartupError, match="ring"):
        RingConsumer(tmp_path / "file")


def test_a_ring_without_room_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"{tmp_path} has no room .* lower drafter_ring_mb"):
        make_ring(tmp_path / "ring", 2**62)


def test_trainer_sees_new_work_at_once(tmp_path: Path) -> None:
    make_activity(tmp_path / "activity")
    told, seen = Activity(tmp_path / "activity"), ActivityReader(tmp_path / "activity")
    assert seen.busy  # the engine is not ready
    told.set("engine", 0)
    assert not seen.busy
    with told.during("requests"):
        assert seen.busy and seen.age_ms < 1000
        told.set("sequences", 2)
    assert seen.busy
    told.set("sequences", 0)
    assert not seen.busy
    told.sleeps(True)
    told.sleeps(True)  # the same one
    assert seen.busy and seen.asleep == told.asleep == 1
    told.sleeps(False)
    assert not seen.busy and not seen.asleep
    told.sleeps(True)
    assert seen.asleep == 2


def test_file_that_is_not_an_activity_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(64))
    with pytest.raises(StartupError, match="another file"):
        ActivityReader(tmp_path / "other")


def test_only_the_reasons_of_the_mode_stop_the_trainer(tmp_path: Path) -> None:
    make_activity(tmp_path / "activity")
    told = Activity(tmp_path / "activity", MODES["device"].parks_for)
    seen = ActivityReader(tmp_path / "activity")
    told.set("sequences", 3)
    assert seen.busy  # the engine is not ready
    told.set("engine", 0)
    assert not seen.busy
    with told.during("requests"):
        assert not seen.busy
        with told.during("weights"):
            assert seen.busy
    assert not seen.busy
    told.sleeps(True)
    assert seen.busy


def test_engine_sees_trainer_activity_until_the_trainer_ends(tmp_path: Path) -> None:
    make_activity(tmp_path / "activity")
    told, trainer, engine = (
        Activity(tmp_path / "activity"),
        *(ActivityReader(tmp_path / "activity") for _ in range(2)),
    )
    assert not engine.runs
    trainer.runs = True
    assert engine.runs
    told.trainer_ended()
    assert not engine.runs
