"""The trainer process keeps what comes through the ring, over its own restarts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.unit.recorded_samples import VOCAB, sample
from tlt_server.samples.hidden_states import Captured
from tlt_server.samples.ring import RingProducer, make_ring
from tlt_server.samples.sample import encode_sample
from tlt_server.trainer.process.main import BEAT_S, REPORT_S, Keeper
from tlt_server.wire.events import BufferReport
from tlt_server.wire.training import TrainerSettings

COMMAND = (sys.executable, "-P", "-m", "tlt_server.trainer.process.main")


def settings(directory: Path, *, vocab_size: object = VOCAB) -> TrainerSettings:
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_bytes(msgspec.json.encode({"vocab_size": vocab_size}))
    ring = directory / "ring"
    if not ring.exists():
        make_ring(ring, 2**14)
    samples = str(directory / "samples")
    return TrainerSettings(str(ring), str(model), samples, 1000, 10**6, os.getpid())


def test_sequences_are_kept_and_reported_by_version(tmp_path: Path) -> None:
    now = [0.0]
    keeper = Keeper(settings(tmp_path), lambda: now[0])
    ring = RingProducer(tmp_path / "ring")
    assert keeper.report() == BufferReport()
    for i in range(12):
        ring.offer(encode_sample(sample(i, version=f"v{i}", output=2)))
    ring.offer(b"junk")
    ring.offer(encode_sample(msgspec.structs.replace(sample(1), max_tokens=1)))
    assert keeper.take() == 14 and keeper.take() == 0
    assert keeper.report() is None  # so soon
    now[0] += REPORT_S
    report = keeper.report()
    assert report is not None
    assert (report.sequences, report.tokens, report.refused) == (12, 12 * 6, 2)
    assert [*report.tokens_by_version] == ["older", *(f"v{i}" for i in range(4, 12))]
    assert report.tokens_by_version["older"] == 8
    assert "no sequence" in report.refusals[0] and "max_tokens is 1" in report.refusals[1]
    now[0] += REPORT_S
    assert keeper.report() is None  # nothing has changed
    now[0] += BEAT_S
    beat = keeper.report()
    assert beat is not None and beat.sequences == 12 and not beat.refusals
    assert keeper.report() is None


def test_idle_trainer_counts_its_buffer_once_per_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    keeper = Keeper(settings(tmp_path), lambda: now[0])
    counted: list[float] = []

    def count() -> dict[str, int]:
        counted.append(now[0])
        return {}

    monkeypatch.setattr(keeper.buffer, "tokens_by_version", count)
    for step in range(40):
        now[0] = step * REPORT_S / 8
        keeper.report()
    assert counted == [i * REPORT_S for i in range(5)]


def captured(number: int, version: str, length: int = 3) -> Captured:
    return Captured(
        version=version,
        key=number.to_bytes(16, "little"),
        length=length,
        item=4,
        feature_width=6,
        hidden_width=2,
        features=bytes(24 * length),
        hidden=bytes(8 * length),
    )


def test_trainer_keeps_features_of_the_newest_version_only(tmp_path: Path) -> None:
    features = tmp_path / "features"
    make_ring(features, 2**14)
    given = msgspec.structs.replace(
        settings(tmp_path), feature_ring=str(features), feature_bytes=1000
    )
    now = [0.0]
    keeper, ring = Keeper(given, lambda: now[0]), RingProducer(features)
    for number in range(12):  # 96 bytes each
        ring.offer(msgspec.msgpack.encode(captured(number, "v0")))
    ring.offer(b"junk")
    assert keeper.take() == 13
    report = keeper.report()
    assert report is not None and (report.feature_tokens, report.feature_size) == (30, 960)
    assert report.refused == 1
    ring.offer(msgspec.msgpack.encode(captured(12, "v1")))
    assert keeper.take() == 1
    now[0] += REPORT_S
    report = keeper.report()
    assert report is not None and (report.feature_tokens, report.feature_size) == (3, 96)


@pytest.mark.slow
def test_killed_trainer_process_loses_no_accepted_sequence(tmp_path: Path) -> None:
    given = settings(tmp_path)
    ring = RingProducer(tmp_path / "ring")
    for turn in range(2):
        ring.offer(encode_sample(sample(turn)))
        with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(given) + b"\n")
            process.stdin.flush()
            while True:
                report = msgspec.json.decode(process.stdout.readline(), type=BufferReport)
                if report.sequences == turn + 1:
                    break
            process.kill()
    ring.offer(encode_sample(sample(2)))
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(given) + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        for i in range(3, 9):
            ring.offer(encode_sample(sample(i)))
        process.terminate()
        assert process.wait(60) == 0  # with all that the ring had
    assert len(Keeper(given).buffer) == 9 and ring.used == 0


def test_trainer_process_ends_without_its_parent(tmp_path: Path) -> None:
    given = msgspec.structs.replace(settings(tmp_path), parent=1)
    subprocess.run(COMMAND, input=msgspec.json.encode(given) + b"\n", timeout=60, check=True)


@pytest.mark.parametrize("vocab_size", [None, 0, "100"])
def test_a_model_without_a_vocabulary_is_refused(tmp_path: Path, vocab_size: object) -> None:
    given = settings(tmp_path, vocab_size=vocab_size)
    done = subprocess.run(
        COMMAND, input=msgspec.json.encode(given) + b"\n", capture_output=True, timeout=60
    )
    assert done.returncode == 2 and b"vocab_size" in done.stderr
