"""States captured on a real GPU, bfloat16 and with graphs: the bits that are computed again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.engine.capturing import Capturing
from tests.engine.gpu_engine import bits
from tests.engine.pushing import Pushable
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.samples.hidden_states import BFLOAT16, key_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_captured_hidden_states_equal_recomputed_ones(tmp_path: Path) -> None:
    """Over trees of several shapes, prefix hits of siblings, preemptions and the worker thread."""
    settings = EngineSettings(
        model=str(TARGET),
        drafter=str(DRAFTER),
        policy="goodput",
        device="cuda",
        dtype="bfloat16",
        attention="triton",
        pages=96,
        max_model_len=512,
        max_running=32,
        max_rows=512,
    )
    asked = [
        msgspec.structs.replace(each, train=True)
        for each in problems_as_requests(TARGET, 24, group=4, seed=3, max_tokens=160)
    ]
    plain = Pushable(settings)
    plain.run(*asked)
    engine = Capturing(settings, tmp_path / "rings", ring=2**28)
    engine.run(*asked)
    ids = [request.id for request in asked]
    assert bits(engine, ids) == bits(plain, ids)
    gauges = engine.engine.gauges()
    assert gauges["preemptions"] > 0
    assert any(engine.said[id][0].cached_tokens for id in ids)

    captured = engine.taken()
    texts = {key_of(text): text for text in map(engine.text, asked)}
    assert captured.keys() <= texts.keys() and len(captured) >= 0.9 * len(texts)
    again = {}
    wanted = list(texts.values())
    for at in range(0, len(wanted), 16):
        again |= engine.recomputed(wanted[at : at + 16])
    assert again.keys() == texts.keys()
    different = [key for key, states in captured.items() if states != again[key]]
    assert not different, f"{len(different)} of {len(captured)} sequences differ"
    assert all(states.item == BFLOAT16 for states in captured.values())
