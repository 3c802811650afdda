"""A further rank of the interpreter's engine, at the speed of the tests: `python -m
tests.engine.interpreted_rank DESCRIPTOR`.
"""

from __future__ import annotations

from tests.engine.fast_interpreter import patched_once
from tlt_server.engine.rank import main

if __name__ == "__main__":
    with patched_once():
        main()
