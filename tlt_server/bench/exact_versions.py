"""Two versions of the target for `tlt bench exact` over several ranks: runs take them in turns, by
pushes and rollbacks of one engine.
"""

from __future__ import annotations

import time
from pathlib import Path

from tlt_server.commands import Manifest, PushWeights, RollbackWeights
from tlt_server.demo.push import perturbed_copy
from tlt_server.engine.loop import Engine

STARTED, PUSHED = "initial", "pushed"  # the engine's own name for what it was started with


def write_pushed(model: Path, root: Path) -> None:
    perturbed_copy(model, root / PUSHED)


def bring(engine: Engine, version: str) -> None:
    """Make a version live on an engine with nothing to do."""
    if engine.pushes.state().target == version:
        return
    if version == STARTED:
        engine.send(RollbackWeights(version, STARTED))
    else:
        engine.send(PushWeights(version, Manifest(path=PUSHED, version=PUSHED)))
    while not (reports := engine.reports()):
        engine.step()
        time.sleep(0.001)
    assert [report.error for report in reports] == [None]
