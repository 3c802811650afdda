"""The demo's display while it runs: a live line per round on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tlt_server.demo.rounds import Moment, Round, RoundOutcome

PLAIN_EVERY_S = 5.0
STARTING = (
    "starting `tlt serve` (the very first start on a machine also compiles kernels, for about 20 s "
    "of an idle core; they are kept)"
)


class Display:
    """A context manager; `say` prints a line above the live part. On a terminal the live part is
    redrawn four times a second.
    """

    def __init__(self, console: Console, sequences: int) -> None:
        self.console, self._sequences = console, sequences
        self._round: Round | None = None
        self._moment: Moment | None = None
        self._doing = ""
        self._started = self._said = time.monotonic()
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._render, refresh_per_second=4, transient=True
            )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def phase(self, doing: str) -> None:
        """Show an activity without figures."""
        self._doing, self._round, self._started = doing, None, time.monotonic()
        if self._live is None:
            self.say(doing)

    def begin(self, turn: Round) -> None:
        self._round, self._moment, self._started = turn, None, time.monotonic()
        self._said = self._started
        if self._live is None:
            self.say(f"{turn.name}: {self._sequences} responses to make")

    def show(self, moment: Moment) -> None:
        self._moment = moment
        if self._live is None and time.monotonic() - self._said >= PLAIN_EVERY_S:
            self._said = time.monotonic()
            self.say(f"  {_line(moment, self._sequences)}")

    def end(self, outcome: RoundOutcome) -> None:
        accepted = f", accept length {outcome.accept_length:.2f}" if outcome.accept_length else ""
        self.say(
            f"{outcome.round.name:<8} {outcome.seconds:6.1f} s  {outcome.passes:5d} passes  "
            f"{outcome.tokens / outcome.seconds:5.0f} tokens/s{accepted}"
        )

    def _render(self) -> Group | Spinner:
        if self._round is None:
            self._spinner.update(text=f" {self._doing}: {time.monotonic() - self._started:.0f} s")
            return self._spinner
        finished = self._sequences - self._moment.engine.open if self._moment else 0
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self._round.name, "bold"),
            ProgressBar(self._sequences, finished, width=40),
            f"{finished}/{self._sequences}",
        )
        return Group(
            bar,
            Text(
                _line(self._moment, self._sequences)
                if self._moment
                else "waiting for the first token"
            ),
        )


def _line(moment: Moment, sequences: int) -> str:
    engine = moment.engine
    accepted = f" | accept length {engine.accept_length:.2f}" if engine.accept_length else ""
    return (
        f"running {engine.running} | finished {sequences - engine.open} of {sequences} | "
        f"{moment.tokens / moment.seconds:.0f} tokens/s | "
        f"in force {engine.strategy or 'none yet'}{accepted}"
    )
