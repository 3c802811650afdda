"""Sequences that a GPU's engine records, on the interpreter: each cycle with its own drafts and its
branches, one step late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import checkpoints, drafting, request
from tests.engine.pushing import Pushable
from tlt_server.engine.settings import EngineSettings
from tlt_server.samples.ring import RingConsumer, make_ring
from tlt_server.samples.sample import decode_sample
from tlt_server.wire.records import GenerateRequest


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        settings = replace(checkpoints(tmp_path_factory.mktemp("smallest")), max_running=2)
        yield drafting(settings, "eagle", 4, 1, 7)


def again(turn: int) -> list[GenerateRequest]:
    asked = [request(i, 6, max_tokens=12) for i in range(2)]
    return [msgspec.structs.replace(r, id=f"{r.id}/{turn}", train=True) for r in asked]


@pytest.mark.long
def test_cycles_tell_own_drafts_from_branches(settings: EngineSettings, tmp_path: Path) -> None:
    make_ring(tmp_path / "ring", 2**16)
    ring = RingConsumer(tmp_path / "ring")
    engine = Pushable(replace(settings, sample_ring=tmp_path / "ring"))
    branches = []
    for turn in range(2):
        engine.run(*again(turn))
        samples = {s.seed: s for s in map(decode_sample, iter(ring.take, None))}
        assert sorted(samples) == [r.seed for r in again(turn)]
        found = 0
        for r in again(turn):
            sample, said = samples[r.seed], [o for o in engine.said[r.id] if o.token_ids]
            sample.check(engine.info.vocab_size)
            assert sample.token_T.tolist() == [*r.token_ids, *engine.tokens(r.id)]
            accepted_C, branches_C, own_C = (
                np.frombuffer(column, np.uint8)
                for column in (sample.accepted, sample.branches, sample.own_accepted)
            )
            rows_C = np.frombuffer(sample.rows, "<u2")
            gave = [len(output.token_ids) for output in said]
            assert (accepted_C[:-1] + 1).tolist() == gave[1:-1]
            assert (rows_C - 1).tolist() == [output.drafted for output in said[1:]]
            assert sample.root_C.tolist() == (5 + np.cumsum(gave[:-1])).tolist()
            # A chain of 4 is all that the drafter itself has; branches take the rows left over.
            assert (rows_C - 1 - branches_C <= 4).all()
            assert (own_C <= accepted_C).all() and (accepted_C - own_C <= branches_C).all()
            found += int(branches_C.sum())
        branches.append(
            (found, sum(sum(s.accepted) - sum(s.own_accepted) for s in samples.values()))
        )
    assert branches[0] < branches[1] and branches[1][1] > 0, branches
