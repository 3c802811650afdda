"""Samples and the buffer of a drafter's training: its bounds hold, a restart finds it again, and
misfits are named.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.recorded_samples import VOCAB, sample
from tests.unit.sampled import samples
from tlt_server.samples.identity import Identity
from tlt_server.samples.sample import Sample, decode_sample, encode_sample
from tlt_server.samples.segments import (
    MAGIC,
    MAX_MESSAGE,
    SUFFIX,
    SegmentHeader,
    append,
    frame,
    header_bytes,
)
from tlt_server.trainer.recording import buffer as buffers
from tlt_server.trainer.recording.buffer import BufferBounds, SampleBuffer

HEADER = SegmentHeader.of(Identity("m", "t"), VOCAB)
BOUNDS = BufferBounds(tokens=400, bytes=40_000)

some = st.builds(
    sample,
    st.integers(0, 30),
    st.integers(0, 5),
    owner=st.sampled_from(["", "a", "b"]),
    output=st.integers(1, 60),
    accepted=st.integers(0, 3),
)


def contents(buffer: SampleBuffer) -> list[bytes]:
    return [encode_sample(entry.sample) for entry in buffer]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(some, st.none()), max_size=40))
def test_buffer_bounds_hold_and_a_restart_finds_the_same_samples(
    tmp_path_factory: pytest.TempPathFactory, turns: list[Sample | None]
) -> None:
    directory = tmp_path_factory.getbasetemp() / "samples"
    shutil.rmtree(directory, ignore_errors=True)
    buffer = SampleBuffer(directory, HEADER, BOUNDS)
    for turn in turns:
        if turn is None:  # another process takes over
            before = contents(buffer)
            buffer = SampleBuffer(directory, HEADER, BOUNDS)
            assert contents(buffer) == before
        else:
            assert buffer.add(turn)
            assert contents(buffer)[-1] == encode_sample(turn)
        buffer.check()
    files = sum(path.stat().st_size for path in directory.iterdir())
    headers = 200 * len([*directory.iterdir()])
    assert files <= BOUNDS.bytes + headers and not buffer.refusals.messages


@pytest.mark.parametrize("flooded", [True, False])
def test_flood_from_one_key_displaces_only_that_keys_samples(flooded: bool) -> None:
    buffer = SampleBuffer(None, HEADER, BOUNDS)
    for i in range(8):
        buffer.add(sample(i, owner="quiet"))
    for i in range(500 if flooded else 0):
        buffer.add(sample(1000 + i, owner="loud"))
    held = Counter(entry.sample.owner for entry in buffer)
    assert held["quiet"] == 8
    assert buffer.tokens > 0.8 * BOUNDS.tokens or not flooded


def test_lone_key_may_fill_the_whole_sample_buffer() -> None:
    buffer = SampleBuffer(None, HEADER, BOUNDS)
    for i in range(100):
        buffer.add(sample(i, owner="alone"))
    assert buffer.tokens > 0.9 * BOUNDS.tokens
    assert [entry.number for entry in buffer][-1] == 100


def damaged(directory: Path, cut: int) -> tuple[Path, int]:
    """Write two sequences and damage the second one's frame; return the file."""
    buffer = SampleBuffer(directory, HEADER, BufferBounds(10_000, 10**6))
    buffer.add(sample(1))
    (path,) = directory.glob(f"*{SUFFIX}")
    whole = path.stat().st_size
    buffer.add(sample(2))
    data = path.read_bytes()
    path.write_bytes(
        data[:cut] if cut < 0 else data[: whole + cut] + b"x" + data[whole + cut + 1 :]
    )
    return path, whole


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        (-3, r"frame 2: it has \d+ bytes of \d+"),
        (40, r"frame 2: its checksum is \w+, not \w+"),
        (3, r"frame 2: its length is \d+, at most"),
    ],
)
def test_intact_start_of_a_damaged_segment_is_used(tmp_path: Path, cut: int, says: str) -> None:
    path, _ = damaged(tmp_path, cut)
    again = SampleBuffer(tmp_path, HEADER, BufferBounds(10_000, 10**6))
    assert contents(again) == [encode_sample(sample(1))]
    (message,) = again.refusals.messages
    assert message.startswith(str(path))
    assert re.search(says, message), message
    assert again.add(sample(3))  # in another file
    assert contents(SampleBuffer(tmp_path, HEADER, BOUNDS))[-1] == encode_sample(sample(3))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (SegmentHeader.of(Identity("m", "t"), 50), "vocab_size 100, here 50"),
        (SegmentHeader.of(Identity("other", "t"), VOCAB), "model 'm', here 'other'"),
        (SegmentHeader.of(Identity("m", "u"), VOCAB), "template 't', here 'u'"),
    ],
)
def test_samples_of_a_different_target_are_refused(
    tmp_path: Path, header: SegmentHeader, says: str
) -> None:
    SampleBuffer(tmp_path, HEADER, BOUNDS).add(sample(1))
    again = SampleBuffer(tmp_path, header, BOUNDS)
    assert len(again) == 0
    (message,) = again.refusals.messages
    assert says in message and SUFFIX in message


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"format":2,"compressed":true}', "segment format 2, this version reads 1; .*wrote it"),
        (b'{"format":"2"}', "header that is not read"),
        (b'{"x":' + b"[" * 100_000, "header that is not read"),
    ],
)
def test_segments_with_other_headers_are_left_out(tmp_path: Path, header: bytes, says: str) -> None:
    append(tmp_path / f"1{SUFFIX}", MAGIC + frame(0, header) + frame(1, encode_sample(sample(1))))
    buffer = SampleBuffer(tmp_path, HEADER, BOUNDS)
    (message,) = buffer.refusals.messages
    assert len(buffer) == 0 and re.search(says, message), message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": sample(1).tokens[:-4] + (VOCAB).to_bytes(4, "little")}, "id is 100, .* 100"),
        ({"tokens": sample(1).tokens[:-4] + b"\xff" * 4}, "id is -1, the vocabulary has 100"),
        ({"tokens": sample(1).tokens * 100}, "1200 tokens, the limit is 100"),
        ({"max_tokens": 3}, "output has 8 tokens, max_tokens is 3"),
        ({"prompt_len": 40}, "output has -28 tokens"),
        ({"rows": b"123"}, "rows has 3 bytes for 3 cycles"),
        ({"spans": [(3, "v"), (1, "w")]}, r"spans begin at \[3, 1\]"),
        ({"spans": [(3, "v")]}, "first root is at 4, before 7, where the record begins"),
        ({"spans": []}, r"spans begin at \[\]"),
        ({"spans": [(0, "v"), (99, "w")]}, "span_start_S"),
        ({"first_root": 10}, "last root is at 14 of 12 tokens"),
        ({"gaps": [(0, 2**24)] * 256}, "last root is at"),  # in 32 bits where it was without
        ({"how": b"\7\7\7"}, "strategy 7 of 1"),
        ({"gaps": [(9, 1)]}, "cycle 9 of 3"),
        ({"temperature": float("nan")}, "sampling|>= 0.0"),
    ],
)
def test_misfit_sequence_is_refused_with_both_values(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    odd = msgspec.structs.replace(sample(1), **change)
    buffer = SampleBuffer(tmp_path, HEADER, BOUNDS)
    buffer.add(sample(2))
    assert not buffer.add(odd)
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    append(path, frame(7, encode_sample(odd)))
    append(path, frame(8, encode_sample(sample(3))))
    again = SampleBuffer(tmp_path, HEADER, BOUNDS)
    assert contents(again) == [encode_sample(sample(2)), encode_sample(sample(3))]
    for message in (*buffer.refusals.messages, *again.refusals.messages):
        assert re.search(says, message), message
    assert f"{path}, frame 2: " in again.refusals.messages[0]


# One field more than a sequence has, which is an array in an array, and so on.
DEEP = b"\xdc\x00\x15" + encode_sample(sample(1))[3:] + b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x93\1\2\3", encode_sample(sample(1))[:-1], DEEP])
def test_bytes_that_are_not_a_sequence_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="truncated|Expected|recursion"):
        decode_sample(data)


@pytest.mark.parametrize(
    ("name", "model", "number"), [("f" * 20, "m", 1), ("1", "m", 2**64 - 1), ("1", "x" * 10**6, 1)]
)
def test_unexpected_file_names_harm_no_later_sequence(
    tmp_path: Path, name: str, model: str, number: int
) -> None:
    header = msgspec.structs.replace(HEADER, model=model)
    data = header_bytes(header) + frame(number, encode_sample(sample(1)))
    append(tmp_path / (name + SUFFIX), data)
    buffer = SampleBuffer(tmp_path, HEADER, BOUNDS)
    assert buffer.add(sample(2))
    assert all(len(message) <= MAX_MESSAGE for message in buffer.refusals.messages)
    assert encode_sample(sample(2)) in contents(SampleBuffer(tmp_path, HEADER, BOUNDS))


def test_full_disk_keeps_the_buffer_in_memory_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    buffer = SampleBuffer(tmp_path, HEADER, BOUNDS, lambda: now[0])
    buffer.add(sample(1))

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(buffers, "append", full)
        buffer.add(sample(2))
        buffer.add(sample(3))
        buffer.check()
        assert len(buffer) == 3 and "No space left on device" in buffer.disk_error
    buffer.add(sample(4))
    assert buffer.disk_error  # not tried again yet
    now[0] += 2 * buffers.RETRY_S
    buffer.add(sample(5))
    assert not buffer.disk_error and len(buffer) == 5
    again = contents(SampleBuffer(tmp_path, HEADER, BOUNDS))
    assert again == [encode_sample(sample(1)), encode_sample(sample(5))]


def test_buffer_stays_in_memory_if_its_directory_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    buffer = SampleBuffer(tmp_path / "file" / "samples", HEADER, BOUNDS)
    assert buffer.add(sample(1)) and "Not a directory" in buffer.disk_error
    assert len(buffer) == 1


def test_files_of_a_different_target_are_deleted_first(tmp_path: Path) -> None:
    old = SampleBuffer(tmp_path, HEADER, BufferBounds(10_000, 10**6))
    for i in range(50):
        old.add(sample(i))
    other = SegmentHeader.of(Identity("other", ""), VOCAB)
    SampleBuffer(tmp_path, other, BufferBounds(10_000, 10**6))
    assert [*tmp_path.iterdir()]
    SampleBuffer(tmp_path, other, BufferBounds(1000, 1000))
    assert not [*tmp_path.iterdir()]


def test_output_tokens_are_counted_by_version() -> None:
    buffer = SampleBuffer(None, HEADER, BOUNDS)
    buffer.add(sample(1, output=8))
    buffer.add(msgspec.structs.replace(sample(2, output=8), spans=[(0, "v0"), (5, "v1")]))
    buffer.add(msgspec.structs.replace(sample(3, output=8), spans=[(6, "v2")], first_root=10))
    assert buffer.tokens_by_version() == {"v0": 13, "v1": 3}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("root_V", -1, "root_V"),
        ("root_V", 7, "root_V"),
        ("root_V", 1, "root_V"),
        ("accepted_V", 5, "accepted_V"),
        ("rows_V", 1, "accepted_V"),
        ("own_rows_V", 9, "own_rows_V"),
        ("own_accepted_V", 3, "own_accepted_V"),
        ("strategy_V", 9, r"strategy_V .* not in \[0, 2\)"),
        ("calibration_V", 1, r"calibration_V .* not in \[0, 1\)"),
        ("request_V", 2, r"request_V .* not in \[0, 2\)"),
    ],
)
def test_misfit_verifications_are_refused(name: str, value: int, says: str) -> None:
    found = samples()
    found.check()
    values = getattr(found.verified, name).copy()
    values[1] = value
    with pytest.raises(ValueError, match=says):
        replace(found, verified=replace(found.verified, **{name: values})).check()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("token_T", 50, r"token_T .* 50, not in \[0, 50\)"),
        ("token_T", -1, "token_T lies between -1"),
        ("prompt_len_N", -3, "prompt_len_N"),
        ("prompt_len_N", 99, "outputs"),
        ("start_N", 0, "start_N"),
        ("max_tokens_N", 1, "outputs"),
        ("temperature_N", np.nan, "sampling"),
        ("end_N", 4, "end_N"),
        ("span_version_S", 3, "span_version_S"),
        ("span_start_S", 5, "span_start_S"),
        ("span_request_S", 2, "span_request_S"),
    ],
)
def test_misfit_responses_are_refused(name: str, value: float, says: str) -> None:
    found = samples()
    values = getattr(found.responses, name).copy()
    values[1] = value
    with pytest.raises(ValueError, match=says):
        replace(found, responses=replace(found.responses, **{name: values})).check()


@pytest.mark.parametrize("part", ["responses", "verified"])
def test_arrays_of_unequal_length_are_refused(part: str) -> None:
    found = samples()
    arrays = getattr(found, part)
    for field in fields(arrays):
        if field.name != "token_T":
            short = replace(arrays, **{field.name: getattr(arrays, field.name)[:-1]})
            with pytest.raises(ValueError, match="does not fit the rest"):
                replace(found, **{part: short}).check()
