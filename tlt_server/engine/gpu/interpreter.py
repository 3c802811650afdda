"""The GPU engine on Triton's CPU interpreter, for tests."""

from __future__ import annotations

import torch

from tlt_server.engine.gpu.device import CudaDevice
from tlt_server.engine.gpu.steps.buckets import PromptShape
from tlt_server.engine.settings import DecidedSettings


class Interpreted(CudaDevice):
    name = "interpreter"
    warms_up = False  # nothing is compiled
    # Small, as a padded row costs as much as a real one.
    prompts = PromptShape(sizes=(2, 4), chunks=2, grain=4)

    def __init__(self, settings: DecidedSettings) -> None:
        super().__init__(settings, torch.device("cpu"))

    def _free(self) -> tuple[int, int]:
        return 2**40, 2**40
