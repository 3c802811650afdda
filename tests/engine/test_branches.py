"""Earlier responses in the trees of a neural drafter: the tokens of a response that is asked for
again are found, and no bit changes.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.engine.gpu_engine import bits, checkpoints, drafting, on_cpu, request
from tests.engine.pushing import Pushable
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.records import DraftLimits, GenerateRequest


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return on_cpu(checkpoints(tmp_path_factory.mktemp("smallest")))


def again(turn: int, **fields: object) -> list[GenerateRequest]:
    """Three requests whose prompts and seeds are the same in every turn."""
    asked = [request(i, 6, max_tokens=24) for i in range(3)]
    return [msgspec.structs.replace(r, id=f"{r.id}/{turn}", **fields) for r in asked]


def accepted(engine: Pushable, turn: int) -> int:
    return sum(out.accepted for r in again(turn) for out in engine.said[r.id])


def test_branches_from_an_earlier_response_change_no_bit(settings: EngineSettings) -> None:
    plain = Pushable(settings)
    engine = Pushable(drafting(settings, "eagle", 4, 1, 7))
    for turn in range(3):
        plain.run(*again(turn))
        engine.run(*again(turn))
        ids = [r.id for r in again(turn)]
        assert bits(engine, ids) == bits(plain, ids)
    # The network has random weights; 3 x 24 tokens are 72.
    assert accepted(engine, 0) < 30, (accepted(engine, 0), accepted(engine, 1))
    assert accepted(engine, 1) > 40, (accepted(engine, 0), accepted(engine, 1))
    assert engine.engine.gauges()["branch_nodes"] > 0


@pytest.mark.parametrize(
    "fields", [{"salt": "another"}, {"sd": DraftLimits(drafter="eagle")}], ids=["salt", "limits"]
)
def test_no_branches_for_requests_that_exclude_history(
    settings: EngineSettings, fields: dict[str, object]
) -> None:
    engine = Pushable(drafting(settings, "eagle", 4, 1, 7))
    engine.run(*again(0))
    engine.run(*again(1, **fields))
    assert accepted(engine, 1) < 30
