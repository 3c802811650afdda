"""Start-up lines: phases as they end, and how far one is that takes long."""

from __future__ import annotations

import io

import pytest

from tlt_server.events import Phase, PhaseProgress
from tlt_server.frontend.link.progress import REWRITE, ProgressLines
from tlt_server.operator_lines import lasting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_terminal_shows_each_step_in_one_line_that_the_next_one_writes_over() -> None:
    stream = Terminal()
    progress = ProgressLines(stream, clock=lambda: 0.0)
    for done in (1, 2):
        progress.phase_progress(PhaseProgress("prepare runner", done, 57))
    progress.phase(Phase("prepare runner", 9.5, "57 graphs"))
    first, second, third = stream.getvalue().split(REWRITE)[1:]
    assert first.split() == ["prepare", "runner", "1", "of", "57"] and "\n" not in first + second
    assert third.endswith("57 graphs\n")
    progress.listening("http://x")
    assert stream.getvalue().count(REWRITE) == 3


def test_elsewhere_a_line_every_ten_seconds() -> None:
    stream, now = io.StringIO(), 0.0
    progress = ProgressLines(stream, clock=lambda: now)
    for done in range(1, 26):
        now += 1.0
        progress.phase_progress(PhaseProgress("prepare runner", done, 57))
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["10", "20"]


def test_a_stream_that_takes_no_line_stops_nothing() -> None:
    stream = Unread()
    ProgressLines(stream).draining(3, 10.0)
    lasting(stream).flush()
    assert not lasting(stream).isatty() and lasting(Terminal()).isatty()
    with pytest.raises(BrokenPipeError):
        print("line", file=stream)
