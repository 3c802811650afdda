"""The journal's file: after any cut or overwritten byte, what is read is a prefix of what was
written.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.errors import StorageFailed
from tlt_server.frontend.generation.requests import RequestItem
from tlt_server.frontend.rollouts.journal import (
    Grown,
    Header,
    Journal,
    KeptItem,
    Past,
    Record,
    RolloutEnd,
    elapsed_s,
    frame,
    now,
    past,
)
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput, TokenLogprobs

PROMPT = [1, 2, 3, 2**31 - 1]
ITEM = RequestItem(
    "ein Ding",
    [
        GenerateRequest(
            id=f"a-0.{i}",
            token_ids=PROMPT,
            seed=2**64 - 1 - i,
            group_id="g",
            salt="s",
            deadline_s=7.0,
            sampling=Sampling(max_tokens=9, stop=("x",), logit_bias={5: -1.5}),
        )
        for i in range(3)
    ],
)
HEADER = Header(
    id="r-1",
    model="/m",
    detached=True,
    key="k",
    digest="d",
    created_s=1.5,
    deadline_s=9.5,
    items=[KeptItem.of(ITEM)],
)
OUTPUTS = [
    StepOutput(
        id="a-0.0",
        token_ids=[4, 5],
        logprobs=[-0.5, -1e-30],
        weight_version="v1",
        drafted=3,
        accepted=1,
        cached_tokens=2,
        prompt_logprobs=[None, TokenLogprobs((1,), (-2.0,))],
        top_logprobs=[TokenLogprobs((4, 9), (-0.5, -3.0))] * 2,
    ),
    StepOutput(
        id="a-0.1",
        token_ids=[],
        logprobs=[],
        finish_reason="error",
        error=("engine_failed", "no luck"),
    ),
    StepOutput(id="a-0.2", token_ids=[6], logprobs=[-0.25], finish_reason="stop", stop_reason=6),
]
RECORDS: list[Record] = [HEADER, Grown(OUTPUTS[:1]), Grown(OUTPUTS[1:]), RolloutEnd(3.5, 3)]
FRAMES = [frame(record) for record in RECORDS]
WHOLE = b"".join(FRAMES)
ENDS = [sum(map(len, FRAMES[:i])) for i in range(len(FRAMES) + 1)]


def check_prefix(data: bytes, whole_records: int) -> None:
    """Assert that reading `data` gives its first `whole_records`, also without outputs."""
    said = past(data)
    assert past(data, outputs=False) == (said and said._replace(outputs=[]))
    if whole_records == 0:
        assert said is None
        return
    assert said is not None and said.header == HEADER and said.length == ENDS[whole_records]
    assert said.outputs == [OUTPUTS[:0], OUTPUTS[:1], OUTPUTS, OUTPUTS][whole_records - 1]
    assert said.end == (RECORDS[3] if whole_records == 4 else None)


def test_journal_reads_back_bit_for_bit_with_its_prompt_once() -> None:
    check_prefix(WHOLE, 4)
    said = past(WHOLE)
    assert said is not None and said.header.items[0].item(7.0) == ITEM
    assert FRAMES[0].count(b"\xce\x7f\xff\xff\xff") == 1  # the prompt's last token


def test_journal_without_owner_is_read() -> None:
    before = {name: value for name, value in msgspec.to_builtins(HEADER).items() if name != "owner"}
    payload = msgspec.msgpack.encode({**before, "items": [KeptItem.of(ITEM)]})
    length = len(payload).to_bytes(4, "little")
    said = past(length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little") + payload)
    assert said is not None and said.header == HEADER and said.header.owner == ""


def test_journal_cut_at_any_byte_is_read_to_its_last_record() -> None:
    for cut in range(len(WHOLE) + 1):
        check_prefix(WHOLE[:cut], sum(end <= cut for end in ENDS[1:]))


def test_journal_with_any_byte_overwritten_is_read_safely() -> None:
    for at in range(len(WHOLE)):
        for other in {0, 255, WHOLE[at] ^ 1, WHOLE[at] ^ 0x80} - {WHOLE[at]}:
            check_prefix(
                WHOLE[:at] + bytes([other]) + WHOLE[at + 1 :], sum(end <= at for end in ENDS[1:])
            )


@settings(max_examples=400, deadline=None)
@given(
    at=st.integers(0, len(WHOLE)), length=st.integers(0, len(WHOLE)), junk=st.binary(max_size=200)
)
def test_journal_with_any_stretch_replaced_is_read_safely(
    at: int, length: int, junk: bytes
) -> None:
    data = WHOLE[:at] + junk + WHOLE[at + length :]
    same = len(os.path.commonprefix([data, WHOLE]))
    check_prefix(data, sum(end <= same for end in ENDS[1:]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(FRAMES), max_size=6))
def test_out_of_order_records_end_the_reading_of_a_journal(frames: list[bytes]) -> None:
    said = past(b"".join(frames))
    assert (said is None) == (not frames or frames[0] != FRAMES[0])
    if said is not None:
        middle = [f for f in frames[1:] if f in FRAMES[1:3]]
        taken = next(
            (i for i, f in enumerate(frames[1:]) if f in (FRAMES[0], FRAMES[3])), len(middle)
        )
        assert len(said.outputs) == sum(1 if f == FRAMES[1] else 2 for f in frames[1 : 1 + taken])


def test_damaged_outputs_do_not_hide_the_end_of_a_journal() -> None:
    """Start-up reads every journal; outputs are read when a client asks for them."""
    other = b"\x81\xa4type\xa5grown"  # whole, and nothing that can be decoded
    length = len(other).to_bytes(4, "little")
    strange = length + zlib.crc32(other, zlib.crc32(length)).to_bytes(4, "little") + other
    length = ENDS[1] + len(strange) + len(FRAMES[3])
    said = past(FRAMES[0] + strange + FRAMES[3], outputs=False)
    assert said == (HEADER, [], RolloutEnd(3.5, 3), length)
    for data in (strange + FRAMES[3], FRAMES[3]):
        assert past(data, outputs=False) is None


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_not_read_as_a_journal(data: bytes) -> None:
    assert past(data) is None


def test_journal_continues_after_its_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "r.journal"
    path.write_bytes(WHOLE[: ENDS[2] + 11])  # torn in the third
    said = past(path.read_bytes())
    assert said is not None
    journal = Journal(path, said.length)
    for framed in FRAMES[2:]:
        journal.append(framed)
    journal.close()
    assert path.read_bytes() == WHOLE


def test_journal_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    Journal(tmp_path / "r.journal").close()
    assert stat.S_IMODE((tmp_path / "r.journal").stat().st_mode) == 0o600


def test_full_disk_at_a_journal_is_a_typed_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = Journal(tmp_path / "r.journal")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFailed, match=r"No space left.*free space"):
        journal.append(FRAMES[0])
    with pytest.raises(StorageFailed):
        Journal(tmp_path / "nowhere" / "r.journal")


def test_journal_times_never_go_backwards_after_a_reboot() -> None:
    at = now()
    assert elapsed_s(at._replace(boot_s=at.boot_s - 5, wall_s=0)) == pytest.approx(5, abs=1)
    for boot in ("another", ""):
        other = at._replace(boot=boot, boot_s=1e12)
        assert elapsed_s(other._replace(wall_s=at.wall_s - 7)) == pytest.approx(7, abs=1)
        assert elapsed_s(other._replace(wall_s=at.wall_s + 86400.0)) == 0


def test_journal_end_of_an_older_format_is_found() -> None:
    payload = msgspec.msgpack.encode({"type": "end", "at_s": 3.5, "tokens": 3})
    length = len(payload).to_bytes(4, "little")
    before = length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little") + payload
    for end in (before, frame(RolloutEnd(3.5, 3))):
        whole = FRAMES[0] + end
        assert past(whole, outputs=False) == Past(HEADER, [], RolloutEnd(3.5, 3), len(whole))
