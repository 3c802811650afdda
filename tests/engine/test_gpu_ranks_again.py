"""The next epoch of a GPU engine over two ranks, in Triton's interpreter: every rank serves the
versions that were committed last. The drafter is an EAGLE-1, which reads the target's head.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.halting import done
from tests.engine.pushing import perturbed
from tests.engine.test_gpu_ranks import SHAPE, TREE, interpreted, responses, root, settings
from tests.engine.tiny import write_eagle1, write_target
from tests.engine.two_ranks import two_ranks
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import Sleep, WakeUp

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
__all__ = ["interpreted", "root", "settings"]


@pytest.mark.long
def test_restart_serves_committed_versions_on_both_ranks(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    """A tied head is a part of the embedding, which moves when it sleeps."""
    model = write_target(root / "tied", shape=replace(SHAPE, tied=True))
    drafter = write_eagle1(root / "eagle1", model, shape=SHAPE)
    perturbed(model, root / "new tied", 1, scale=0.05)
    perturbed(drafter, root / "new eagle1", 3, scale=0.05)
    lasting = replace(
        settings, model=model, state_dir=tmp_path, drafter=str(drafter), drafter_parallel="auto"
    )
    with two_ranks(lasting) as engine:
        assert engine.push(root / "new tied", "v1").result == "committed"
        assert engine.push(root / "new eagle1", "d1", role="drafter").result == "committed"
        expected, sums = responses(engine, None), engine.checksums()
    with two_ranks(lasting) as again:
        assert again.info.weight_version == "v1" and not again.info.lost
        done(again, Sleep("s", ("weights", "kv_cache")))
        done(again, WakeUp("w", ("weights", "kv_cache")))
        assert responses(again, TREE) == expected and again.checksums() == sums
        assert any(output.accepted for outputs in again.said.values() for output in outputs)
