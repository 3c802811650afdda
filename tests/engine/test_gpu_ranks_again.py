"""The next life of a GPU engine over two ranks, in Triton's interpreter: every rank serves the
versions that were committed last. The drafter is an EAGLE-1, which reads the target's head.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.pushing import perturbed
from tests.engine.test_gpu_ranks import SHAPE, TREE, interpreted, responses, root, settings
from tests.engine.tiny import write_eagle1
from tests.engine.two_ranks import two_ranks
from tlt_server.engine.settings import EngineSettings

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
__all__ = ["interpreted", "root", "settings"]


def test_a_restart_serves_the_committed_versions_on_both_ranks(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    drafter = write_eagle1(root / "eagle1", root / "base", shape=SHAPE)
    perturbed(drafter, root / "new eagle1", 3, scale=0.05)
    lasting = replace(settings, state_dir=tmp_path, drafter=str(drafter))
    with two_ranks(lasting) as engine:
        assert engine.push(root / "new", "v1").result == "committed"
        assert engine.push(root / "new eagle1", "d1", role="drafter").result == "committed"
        expected, sums = responses(engine, None), engine.checksums()
    with two_ranks(lasting) as again:
        assert again.info.weight_version == "v1" and not again.info.lost
        assert responses(again, TREE) == expected and again.checksums() == sums
        assert any(output.accepted for outputs in again.said.values() for output in outputs)
