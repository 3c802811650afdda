"""`tlt serve` with a planted fault: the real engine dies in the step that is to compute a prompt
which begins with FATAL.

As a program: `fatal.py serve FLAGS` is the server, `fatal.py DIR` its engine.
"""

from __future__ import annotations

import os
import signal
import sys

FATAL = [11, 12, 13]

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        from tlt_server import __main__, build

        build.ENGINE = (sys.executable, __file__)
        sys.exit(__main__.main(sys.argv[1:]))

    from tlt_server.engine import process
    from tlt_server.engine.cpu.runner import CpuRunner
    from tlt_server.engine.schedule.batch import Batch
    from tlt_server.wire.records import Strategy

    class FatalRunner(CpuRunner):
        def launch(self, batch: Batch, strategy: Strategy) -> None:
            if any(work.sequence.tokens[: len(FATAL)].tolist() == FATAL for work in batch.chunks):
                os.kill(os.getpid(), signal.SIGKILL)
            super().launch(batch, strategy)

    from tlt_server.engine.cpu import device as cpu

    cpu.CpuRunner = FatalRunner  # type: ignore[misc]
    sys.exit(process.main())
