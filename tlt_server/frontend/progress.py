"""What an operator reads while the server starts: one line per phase, and one line that says what runs."""

from __future__ import annotations

import sys
from typing import TextIO

from tlt_server.config import Config
from tlt_server.records import EngineInfo, Phase


class Progress:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def phase(self, phase: Phase) -> None:
        self._say(f"  {phase.name:<28} {phase.seconds:8.2f} s  {phase.detail}".rstrip())

    def listening(self, url: str) -> None:
        self._say(f"tlt: listening on {url}; the engine is starting")

    def ready(self, url: str, config: Config, info: EngineInfo) -> None:
        full_length = info.pages * info.page_size // info.max_model_len
        self._say(f"tlt: ready at {url} | model {config.served_model_name} | weights {info.weight_version} | {info.pages} pages of "
                  f"{info.page_size} | up to {info.max_running} sequences ({full_length} at full length) | "
                  f"drafter {info.drafter or 'none'} | policy {info.policy} | numerics {info.numerics.partition(':')[0]}")

    def draining(self, open_sequences: int, timeout_s: float) -> None:
        self._say(f"tlt: draining {open_sequences} sequences (up to {timeout_s:g} s); send the signal again to stop at once")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
