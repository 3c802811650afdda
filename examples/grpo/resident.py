"""Verbs of `tlt`, one after another in one process, so that imports and a GPU's context are paid
for once.

As a program it reads a JSON list of arguments per line, runs it, and answers with its exit status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys


class ResidentTlt:
    """The process, which ends when nothing more can be asked of it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "examples.grpo.resident"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str) -> None:
        """Run a verb; what it prints to stdout is dropped. `CalledProcessError`: it failed, or the
        process has ended.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            status = process.stdout.readline()
        except BrokenPipeError:
            status = ""
        if status.strip() != "0":
            raise subprocess.CalledProcessError(int(status or process.wait()), ["tlt", *arguments])


def serve() -> None:
    from tlt_server.__main__ import main

    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # also for libraries that do not print through Python
    for line in sys.stdin:
        print(main(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    from tlt_server.models.environment import library_environment

    os.environ.update(library_environment())  # read by torch when it is imported
    serve()
