"""Start-up lines: phases as they end, and how far one is that takes long."""

from __future__ import annotations

import io

import pytest

from tlt_server.frontend.http.logs import lasting
from tlt_server.frontend.link.starting import REWRITE, ProgressLines, UnderWay
from tlt_server.wire.events import Phase


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def under_way(done: int, of: int = 57, seconds: float = 0.0) -> UnderWay:
    return UnderWay("capturing graphs", done, of, seconds)


def test_terminal_progress_overwrites_one_line() -> None:
    stream = Terminal()
    progress = ProgressLines(stream, clock=lambda: 0.0)
    for done in (1, 2):
        progress.under_way(under_way(done))
    progress.phase(Phase("prepare runner", 9.5, "57 graphs"))
    first, second, third = stream.getvalue().split(REWRITE)[1:]
    assert "capturing graphs (1 of 57)" in first and "\n" not in first + second
    assert third.endswith("57 graphs\n")
    progress.listening("http://x")
    assert stream.getvalue().count(REWRITE) == 3


def test_without_a_terminal_a_line_comes_every_ten_seconds() -> None:
    stream, now = io.StringIO(), 0.0
    progress = ProgressLines(stream, clock=lambda: now)
    for second in range(26):
        progress.under_way(under_way(second // 3, seconds=now))
        now += 1.0
    said = [line.split("(")[1].split()[0] for line in stream.getvalue().splitlines()]
    assert said == ["0", "3", "6"]


def test_phase_without_steps_is_said_every_ten_seconds() -> None:
    stream, now = io.StringIO(), 0.0
    progress = ProgressLines(stream, clock=lambda: now)
    for _ in range(26):
        progress.under_way(UnderWay("loading weights", 0, 0, now))
        now += 1.0
    assert stream.getvalue().splitlines() == [
        f"  loading weights, for {seconds} s so far ..." for seconds in (10, 20)
    ]


def test_an_unwritable_stream_stops_nothing() -> None:
    stream = Unread()
    ProgressLines(stream).draining(3, 10.0)
    lasting(stream).flush()
    assert not lasting(stream).isatty() and lasting(Terminal()).isatty()
    with pytest.raises(BrokenPipeError):
        print("line", file=stream)
