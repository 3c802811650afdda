"""A recorded rollout of the shipped pair: a replay predicts what the engine does under another
policy.
"""

from __future__ import annotations

import pytest

from tlt_server.bench.recording import recorded
from tlt_server.bench.replaying.names import parse_policy
from tlt_server.bench.replaying.simulated import Replay
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.speculation.recorded import DraftedTrees, RolloutRecord

CHAIN, SHORT, TREE = "fixed:eagle:7x1x8", "fixed:eagle:3x1x3", "fixed:eagle:4x2x6"
RUNS = ("off", CHAIN, SHORT, TREE)


@pytest.fixture(scope="module")
def record() -> RolloutRecord:
    settings = EngineSettings(
        model=TARGET,
        drafter=str(DRAFTER),
        policy="off",
        device="cpu",
        dtype="float32",
        attention="cpu",
        threads=2,
        kv_memory_mb=64,
        max_running=3,
        max_model_len=256,
    )
    return recorded(
        settings,
        problems_as_requests(TARGET, 5, group=2, seed=3, max_tokens=40),
        [parse_policy(name) for name in RUNS],
        [DraftedTrees("eagle", 7, 1), DraftedTrees("eagle", 4, 2)],
    )


@pytest.mark.parametrize("run", range(len(RUNS)), ids=RUNS)
def test_a_replay_accepts_what_the_engine_accepted(record: RolloutRecord, run: int) -> None:
    cycles = record.cycles
    of_run_V = cycles.run_C[cycles.cycle_V] == run
    seen = zip(cycles.request_V, cycles.root_V, cycles.accepted_V, strict=True)
    expected = [tuple(map(int, v)) for v, mine in zip(seen, of_run_V, strict=True) if mine]
    replayed = Replay(record, parse_policy(RUNS[run]), judged=False).run()
    assert [v for cycle in replayed.cycles for v in cycle.verified] == expected
    rows = cycles.rows_C[cycles.run_C == run]
    assert [cycle.cycle.rows for cycle in replayed.cycles] == rows.tolist()
    assert replayed.tokens == record.responses.output_len_N.sum()
