"""A further rank of a CPU whose device fails at an order: `python -m tests.engine.failing_rank
DESCRIPTOR PARENT`. FAILING_ORDER names the order's class and which of them it is, such as
`Install 2`.
"""

from __future__ import annotations

import os

from tlt_server.engine.follower import Rank
from tlt_server.engine.orders import Order
from tlt_server.engine.rank import main

kind, count = os.environ["FAILING_ORDER"].split()
left = int(count)
follow = Rank.follow


def failing(rank: Rank, order: Order) -> str:
    global left
    if type(order).__name__ == kind:
        left -= 1
        if not left:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return follow(rank, order)


if __name__ == "__main__":
    Rank.follow = failing  # type: ignore[method-assign]
    main()
