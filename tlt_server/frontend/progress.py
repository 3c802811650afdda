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

    def lost(self, reason: str) -> None:
        self._say(f"tlt: nothing is generated: {reason}")

    def died(self, reason: str, restart_in_s: float, waiting: int) -> None:
        when = f"in {restart_in_s:g} s" if restart_in_s else "now"
        self._say(f"tlt: {reason} | restarting {when} | {waiting} sequences wait to resume, the others ended with a retryable error")

    def back(self, info: EngineInfo, after_s: float, waiting: int) -> None:
        self._say(f"tlt: the engine is back after {after_s:.1f} s | weights {info.weight_version} | {waiting} sequences resume")

    def gave_up(self, reason: str) -> None:
        self._say(f"tlt: {reason}; the server stops with status 1")

    def draining(self, open_sequences: int, timeout_s: float) -> None:
        self._say(f"tlt: draining {open_sequences} sequences (up to {timeout_s:g} s); send the signal again to stop at once")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
