"""The fault that `tlt bench exact` plants on a GPU: one ulp on the logits of sampled tokens. It
shows in the log-probs, and it is gone afterwards.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.kernels.triton_tests import DEVICE
from tlt_kernels.gpu.tensors import BatchSlots, RowTable
from tlt_server.bench.faults import CALLS, planted
from tlt_server.engine.gpu.steps.extend import Extend, ExtendKey

ROWS, VOCAB = 5, 97


def extend() -> Extend:
    """Return the sampling part of a pass over ROWS rows, each of a request of its own. The last row
    is dead.
    """

    def integers(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)

    made: Any = Extend.__new__(Extend)
    batch_slots = BatchSlots.allocate(ROWS, 1, hidden=1, device=DEVICE)._replace(
        seed_Q=torch.arange(ROWS, device=DEVICE), temperature_Q=torch.ones(ROWS, device=DEVICE)
    )
    made.key, made.state = ExtendKey(ROWS, ROWS), SimpleNamespace(batch_slots=batch_slots)
    made.trees = SimpleNamespace(sample_row_S=integers([*range(ROWS - 1), -1]))
    made.rows = RowTable.allocate(ROWS, 1, device=DEVICE)._replace(
        position_R=integers(range(ROWS)), batch_slot_R=integers(range(ROWS))
    )
    return made


def calls(count: int) -> list[np.ndarray]:
    """Return the bits of the live rows' log-probs, call by call over the same logits."""
    logits_SV = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    one, found = extend(), []
    for _ in range(count):
        sampled = one.sample(logits_SV.to(DEVICE, copy=True))
        found.append(sampled.logprob_S[: ROWS - 1].cpu().numpy().view(np.int32).copy())
    return found


def test_planted_fault_changes_exactly_its_planned_calls() -> None:
    sound = calls(1)[0]
    with planted(SimpleNamespace(runner=None)):  # type: ignore[arg-type]
        inside = calls(CALLS.stop + 2)
    wrong = [i for i, bits in enumerate(inside) if (bits != sound).any()]
    assert wrong == list(CALLS)
    assert (calls(CALLS.start + 1)[-1] == sound).all()
