"""The process of a worker rank, which ends with rank 0 from its first moment.

`ranks.py` starts it as `python -P -m tlt_server.engine.ranks.rank DESCRIPTOR PARENT`. Everything
else is in `follower.py`, imported only once the system will end this process with its parent: rank
0 may die during the seconds that torch takes to import, and no GPU may be held after that.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from tlt_kernels.parents import end_with


def main() -> NoReturn:
    descriptor, parent = map(int, sys.argv[1:])
    end_with(parent)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # rank 0 decides
    from tlt_server.engine.ranks.follower import follow

    follow(descriptor)


if __name__ == "__main__":
    main()
