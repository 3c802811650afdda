"""A further rank of the interpreter's engine, at the speed of the tests: `python -m
tests.engine.interpreted_rank DESCRIPTOR PARENT`. It has no memory to record a graph.
"""

from __future__ import annotations

import torch

from tests.engine.fast_interpreter import patched_once
from tlt_server.engine.gpu.start import preparing
from tlt_server.engine.ranks.rank import main


def out_of_memory(*asked: object) -> None:
    raise torch.OutOfMemoryError


if __name__ == "__main__":
    preparing._capture_later = out_of_memory
    with patched_once():
        main()
