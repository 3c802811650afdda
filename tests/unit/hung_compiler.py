"""The compiler's process, whose workers write their pids to a file and compile for ever:
`python -m tests.unit.hung_compiler FILE WORKERS PARENT`.
"""

from __future__ import annotations

import os
import sys
import time

from tlt_kernels.gpu import compiler


def compile_variant(module: str, kernel: str, specialization: str) -> None:
    with open(file, "a") as found:
        print(os.getpid(), os.getppid(), file=found)
    time.sleep(60)


if __name__ == "__main__":
    file = sys.argv.pop(1)
    compiler.compile_variant = compile_variant
    compiler.main()
