"""Two versions of the target for `tlt bench exact` over several ranks: runs take them in turns, by
pushes and rollbacks of one engine.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tlt_server.bench.exact_plan import PUSHED, STARTED
from tlt_server.engine.loop import Engine
from tlt_server.wire.commands import Manifest, PushWeights, RollbackWeights

SCALE = 0.01  # relative standard deviation of the change
AT_ONCE = 4  # files


def write_pushed(model: Path, root: Path, *, on_gpu: bool) -> None:
    """Write a target whose weights are a little off."""
    directory = root / PUSHED
    directory.mkdir()
    files = sorted(model.glob("*.safetensors"))

    def write(number: int) -> None:
        device = "cuda" if on_gpu else "cpu"
        generator = torch.Generator(device).manual_seed(number)
        changed = load_file(files[number], device=device)
        for tensor in changed.values():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, device=device)
                tensor.copy_(tensor.float().mul_(noise.mul_(SCALE).add_(1)))
        held = {name: tensor.cpu() for name, tensor in changed.items()}
        save_file(held, directory / files[number].name, metadata={"format": "pt"})

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(write, range(len(files))))
    for path in model.iterdir():
        if path.is_file() and path not in files:
            shutil.copy(path, directory)


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
