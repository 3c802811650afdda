"""The id of NCCL in a store: raw, or as trainers write it which drive vLLM; read without unpickling anything."""

from __future__ import annotations

import ctypes
import pickle
import random

import pytest

from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.nccl import _Config, _Id, id_in


class ncclUniqueId(ctypes.Structure):  # noqa: N801
    """As vLLM calls it and lays it out."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


IDS = [*(random.Random(seed).randbytes(128) for seed in range(50)),
       bytes(128), b"C\x80" * 64, b"." * 128, b"\x94\x86\x94\x86\x94R\x94." + bytes(120)]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_an_id_is_read_as_it_was_written(protocol: int) -> None:
    for id in IDS:
        assert id_in(id) == id
        assert id_in(pickle.dumps(ncclUniqueId.from_buffer_copy(id), protocol)) == id


@pytest.mark.parametrize("message", [
    b"", bytes(127), bytes(129), pickle.dumps(IDS[0]), pickle.dumps([ncclUniqueId(), ncclUniqueId()]),
    pickle.dumps(ncclUniqueId())[:-1], pickle.dumps(ncclUniqueId()) + b".", b"x" * 2000,
    pickle.dumps(ncclUniqueId()).replace(b"ncclUniqueId", b"ncclUniqueIe"),
])
def test_anything_else_is_refused(message: bytes) -> None:
    with pytest.raises(ContentRefused, match="nccl_unique_id_b64"):
        id_in(message)


def test_the_structures_are_laid_out_as_in_the_header() -> None:
    assert ctypes.sizeof(_Id) == 128 and bytes(_Id.from_buffer_copy(IDS[0])) == IDS[0]
    assert (ctypes.sizeof(_Config), _Config.magic.offset, _Config.version.offset, _Config.blocking.offset) == (24, 8, 12, 16)
