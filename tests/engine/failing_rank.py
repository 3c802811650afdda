"""A further rank of a CPU whose device fails at an order: `python -m tests.engine.failing_rank
DESCRIPTOR PARENT`. FAILING_ORDER names the order's class; FAILING_FROM a file: the rank fails once
it is there, and writes the time into it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tlt_server.engine.ranks import follower
from tlt_server.engine.ranks.follower import RankHalf
from tlt_server.engine.ranks.orders import RankOrder
from tlt_server.engine.ranks.rank import main

kind, begun = os.environ["FAILING_ORDER"], Path(os.environ["FAILING_FROM"])
execute = follower.execute


def failing(rank: RankHalf, order: RankOrder) -> str:
    if type(order).__name__ == kind and begun.exists():
        begun.write_text(str(time.monotonic()))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return execute(rank, order)


if __name__ == "__main__":
    follower.execute = failing
    main()
