"""The id of NCCL in a store: raw, or as trainers write it which drive vLLM; read without unpickling
anything.
"""

from __future__ import annotations

import ctypes
import random

import pytest

from tests.nccl_id import written
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.nccl import NcclConfig, NcclId, id_in

IDS = [
    *(random.Random(seed).randbytes(128) for seed in range(50)),
    bytes(128),
    b"C\x80" * 64,
    b"." * 128,
    b"\x94\x86\x94\x86\x94R\x94." + bytes(120),
]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_nccl_id_is_read_as_written(protocol: int) -> None:
    for id in IDS:
        assert id_in(id) == id
        assert id_in(written(id, protocol)) == id


@pytest.mark.parametrize(
    "message",
    [
        b"",
        bytes(127),
        bytes(129),
        b"x" * 2000,
        b"\x80\x04\x95\x85" + bytes(7) + b"C\x80" + IDS[0] + b"\x94.",
        written(IDS[0])[:-1],
        written(IDS[0]) + b".",
        written(IDS[0])[:-1] + b"a.",
        written(IDS[0]).replace(b"ncclUniqueId", b"ncclUniqueIe"),
    ],
)
def test_invalid_nccl_id_message_is_refused(message: bytes) -> None:
    with pytest.raises(ContentRefused, match="nccl_unique_id_b64"):
        id_in(message)


def test_nccl_structures_have_the_layout_of_the_header() -> None:
    assert ctypes.sizeof(NcclId) == 128 and bytes(NcclId.from_buffer_copy(IDS[0])) == IDS[0]
    assert (
        ctypes.sizeof(NcclConfig),
        NcclConfig.magic.offset,
        NcclConfig.version.offset,
        NcclConfig.blocking.offset,
    ) == (24, 8, 12, 16)
