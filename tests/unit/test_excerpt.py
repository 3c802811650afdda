"""Excerpts of segment files: all sequences in the order of their arrival, once each, while the
files grow and go.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.recorded_samples import VOCAB, sample
from tlt_server.samples import excerpt
from tlt_server.samples.excerpt import SampleFiles
from tlt_server.samples.identity import identity_of
from tlt_server.samples.sample import Sample
from tlt_server.samples.segments import (
    SUFFIX,
    Recorded,
    Refusals,
    SegmentHeader,
    append,
    header_bytes,
    read_segment,
    recorded,
)
from tlt_server.trainer.recording.buffer import BufferBounds, SampleBuffer


class Kept:
    """A buffer with files, and the reader of these files."""

    def __init__(self, directory: Path, tokens: int = 10**5) -> None:
        self.model = directory / "model"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_bytes(msgspec.json.encode({"vocab_size": VOCAB}))
        self.header = SegmentHeader.of(identity_of(self.model), VOCAB)
        self.directory, self.taken = directory / "samples", directory / "taken"
        self.bounds = BufferBounds(tokens, 10**7)
        self.buffer = SampleBuffer(self.directory, self.header, self.bounds)
        self.files = SampleFiles(self.directory, self.model)

    def add(self, *samples: Sample) -> None:
        assert all(self.buffer.add(each) for each in samples)

    def read(self, after: int = 0, limit: int = 1000) -> tuple[list[Recorded], int, int]:
        """Return the sequences, where to go on, and how many are left."""
        found = self.files.read(after, limit)
        self.taken.write_bytes(found.data)
        refusals = Refusals()
        entries = [*read_segment(self.taken, self.header, refusals)]
        assert not refusals.count
        return entries, found.after, found.left


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=30), st.integers(1, 7)
)
def test_consecutive_excerpts_equal_the_sample_buffer(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, int]], limit: int
) -> None:
    kept, read, after = Kept(tmp_path_factory.mktemp("kept")), list[Recorded](), 0
    for i, (owner, output) in enumerate(turns):
        kept.add(sample(i, owner=owner, output=output))
        if i % 4 == 0:
            entries, after, _ = kept.read(after, limit)
            read += entries
    left = 1
    while left:
        entries, after, left = kept.read(after, limit)
        assert len(entries) <= limit and left == max(0, len(kept.buffer) - len(read + entries))
        read += entries
    assert read == [*kept.buffer]


def test_excerpt_of_an_empty_buffer_is_an_empty_segment(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.files.read(0, 10) == (header_bytes(kept.header), 0, 0, 0)


def test_excerpt_is_bounded_but_holds_at_least_one_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    kept.add(*(sample(i, output=60) for i in range(5)))
    monkeypatch.setattr(excerpt, "MAX_BYTES", 1)
    assert [kept.read(after)[1:] for after in range(4)] == [(1, 4), (2, 3), (3, 2), (4, 1)]
    monkeypatch.setattr(excerpt, "MAX_BYTES", 2 * max(e.size for e in kept.buffer))
    assert kept.read()[1:] == (2, 3)


def test_sequence_arriving_while_files_are_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two come at once: one in a file that was read already, one in a file that is read next."""
    kept = Kept(tmp_path)
    kept.add(sample(1, owner="a"), sample(2, owner="b"))
    opened = []
    pread = os.pread

    def slow(descriptor: int, size: int, at: int) -> bytes:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        opened.append(path)
        if len(set(opened)) == 2 and len(kept.buffer) == 2:  # the first file is passed
            kept.add(sample(3, owner="a"), sample(4, owner="b"))
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", slow)
    entries, after, _ = kept.read()
    monkeypatch.undo()
    assert len(kept.buffer) == 4
    assert [e.number for e in [*entries, *kept.read(after)[0]]] == [1, 2, 3, 4]


def test_excerpt_skips_partial_entries_and_other_targets(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.add(sample(1), sample(2))
    [path] = kept.directory.iterdir()
    _, third = recorded(3, sample(3))
    append(path, third[:-1])
    assert kept.read()[1:] == (2, 0)
    append(path, third[-1:])
    assert kept.read()[1:] == (3, 0)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    entries, after, left = kept.read()
    assert ([e.number for e in entries], after, left) == ([1, 2], 3, 0)
    other = msgspec.structs.replace(kept.header, model="xxh3:0")
    for name, content in (
        ("other", header_bytes(other) + recorded(7, sample(7))[1]),
        ("junk", b"junk"),
        ("huge", header_bytes(kept.header) + b"\xff" * 40),
        ("empty", b""),
    ):
        (kept.directory / f"{name}{SUFFIX}").write_bytes(content)
    (kept.directory / f"link{SUFFIX}").symlink_to(path)
    (kept.directory / f"folder{SUFFIX}").mkdir()
    os.mkfifo(kept.directory / f"pipe{SUFFIX}")
    assert kept.read() == (entries, after, left)


def test_excerpt_skips_a_file_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    kept.add(sample(1, owner="a"), sample(2, owner="b"))
    first = min(kept.directory.iterdir())
    frame = excerpt._frame
    monkeypatch.setattr(excerpt, "_frame", lambda place: (first.unlink(True), frame(place))[1])
    entries, after, left = kept.read()
    assert ([e.number for e in entries], after, left) == ([2], 2, 0)
