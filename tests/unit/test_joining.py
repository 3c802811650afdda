"""Conditions under which a replica may join a fleet."""

from __future__ import annotations

import msgspec
import pytest

from tests.frontend.fake_engine import INFO
from tlt_server.frontend.link.members import differences
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.fingerprint import Fingerprint, libraries

OURS = msgspec.structs.replace(
    INFO, libraries={"torch": "2.11.0", "kernels": "abc"}, gpu="NVIDIA H200, 143771 MiB, 9.0"
)


def other(**fields: object) -> EngineInfo:
    return msgspec.structs.replace(OURS, **fields)


def test_replica_differing_in_nothing_that_bits_need_may_join() -> None:
    assert differences(OURS, OURS) == ""
    unlike = {"pages": 7, "max_running": 3, "threads": 9, "pid": 1, "drafter": "history"}
    assert differences(OURS, other(**unlike, gpu="NVIDIA H200, 143770 MiB, 9.0")) == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "b"}, "model is 'fake' here and 'b' there"),
        (
            {"fingerprint": Fingerprint(8, "float32", "none", "strict 1")},
            "fingerprint: leaves is 1 here and 8 there",
        ),
        (
            {"libraries": {"torch": "2.12.0", "kernels": "abc"}},
            "torch is '2.11.0' here and '2.12.0' there; install the same versions",
        ),
        (
            {"libraries": {**OURS.libraries, "triton": "3.5"}},
            "triton is 'missing' here and '3.5' there; install the same versions",
        ),
        ({"vocab_size": 301}, "vocab_size is 300 here and 301 there"),
        ({"eos_token_ids": [256, 2]}, "eos_token_ids is [256] here and [256, 2] there"),
        ({"max_model_len": 511}, "max_model_len is 512 here and 511 there"),
        (
            {"gpu": "NVIDIA H100, 81559 MiB, 9.0"},
            "gpu is 'NVIDIA H200' here and 'NVIDIA H100' there",
        ),
    ],
)
def test_refused_replica_is_told_the_field_and_both_values(
    fields: dict[str, object], message: str
) -> None:
    assert differences(OURS, other(**fields)) == message


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"numerics": "fast: library matmuls"}, "--numerics strict"),
        ({"stages": False}, "weight_staging is 'none'"),
    ],
)
def test_replica_no_fleet_can_have_is_refused_as_the_first_one(
    fields: dict[str, object], remedy: str
) -> None:
    assert remedy in differences(other(**fields), other(**fields))


def test_libraries_name_the_installed_versions_and_the_kernels() -> None:
    found = libraries()
    assert {"torch", "numba", "llvmlite", "kernels"} <= found.keys() and all(found.values())
