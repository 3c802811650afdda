"""Admission: whether a request gets in, by the open sequences, tokens and forecast KV pages, and by
its forecast wait.

A request gets in whole or not at all. One that exceeds a bound by itself is `TooLarge` (413); the
bound by forecast never refuses a request that is alone. One that does not fit with the open ones is
`QueueFull`, and one that would wait for them longer than its time is `Overloaded` (both 429, with
the seconds after which it should succeed). The engine client asks before a prompt is tokenised, so
a refusal is cheap.

Keys share each bound (`process.turns.fits`), so that only greedy ones are refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from msgspec import Struct

from tlt_server.errors import DeadlineExceeded, Overloaded, QueueFull, TooLarge
from tlt_server.frontend.link.forecast import Forecast
from tlt_server.frontend.link.suspects import Rests
from tlt_server.process.turns import OVER, fits
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.records import Cycle, GenerateRequest, StepOutput

# Factor on a forecast. Half of all waits are longer than their mean, and work that ends too late is
# lost, while a refusal costs nothing as long as others wait.
CAUTION = 1.5


class Demand(NamedTuple):
    """The total demand of a request's sequences; unknown tokens count 0."""

    sequences: int
    prompt_tokens: int = 0
    output_tokens: int = 0  # sum of max_tokens
    begin_by_s: float = math.inf  # time.monotonic(), as are all deadlines
    deadline_s: float = math.inf
    owner: str = ""  # name of the key that asks

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @classmethod
    def of(cls, requests: Sequence[GenerateRequest]) -> Self:
        return cls(
            sequences=len(requests),
            prompt_tokens=sum(len(request.token_ids) for request in requests),
            output_tokens=sum(request.sampling.max_tokens for request in requests),
            begin_by_s=min(
                (r.begin_by_s for r in requests if r.begin_by_s is not None), default=math.inf
            ),
            deadline_s=min(
                (r.deadline_s for r in requests if r.deadline_s is not None), default=math.inf
            ),
            owner=requests[0].owner if requests else "",
        )


class _Open(Struct, gc=False):
    owner: str
    prompt_tokens: int
    max_tokens: int
    given: int = 0


class _Held(Struct):
    """The open sequences of one key, or of all."""

    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0  # sum of max_tokens
    unstarted: int = 0  # sequences without a token yet

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def add(self, sequences: int, prompt_tokens: int, output_tokens: int, unstarted: int) -> None:
        self.sequences += sequences
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.unstarted += unstarted


NOTHING = _Held()


class _Bound(NamedTuple):
    unit: str
    made_of: str
    setting: str
    limit: float
    measure: Callable[[_Held | Demand], float]
    known: bool = True  # False: by forecast, which another hour's ends may change


class Admission:
    """Counts open sequences and applies the bounds. `engine` is set once the engine has reported
    its size; before that there is no forecast of pages.
    """

    def __init__(
        self,
        *,
        max_queue: int,
        max_queue_tokens: int,
        max_page_forecast: float,
        restart_window_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_queue, self.max_queue_tokens = max_queue, max_queue_tokens
        self.max_page_forecast = max_page_forecast
        self.forecast, self.rests = Forecast(), Rests(restart_window_s)
        self.engine: EngineInfo | None = None
        self.all = _Held()  # the sums over the open sequences
        self._open: dict[str, _Open] = {}
        self._held: dict[str, _Held] = {}  # by owner, of those with open sequences
        self._clock = clock

    def __len__(self) -> int:
        return len(self._open)

    @property
    def tokens(self) -> int:
        return self.all.tokens

    @property
    def pages(self) -> float:
        """Pages that the open sequences are expected to have at their ends."""
        return self._pages(self.all)

    # -- asking

    def admit(self, demand: Demand) -> None:
        """Raise if the demand cannot get in now. Changes nothing."""
        self.rests.check(demand.owner, self._clock())
        for bound in self._bounds():
            asked, open_ = bound.measure(demand), bound.measure(self.all)
            if bound.known and asked > bound.limit:
                raise TooLarge(
                    f"the request has {asked:.0f} {bound.unit} ({bound.made_of}); the limit "
                    f"is {bound.limit:.0f} ({bound.setting}): split it"
                )
            own, owners = self._held.get(demand.owner, NOTHING), self._owners(demand.owner)
            if open_ and not fits(asked, bound.limit, bound.measure(own), open_, owners):
                raise self._full(bound, asked, open_, bound.measure(own), owners)
        self._check_time(demand)

    def _full(
        self, bound: _Bound, asked: float, open_: float, own: float, owners: int
    ) -> QueueFull:
        over = open_ + asked - bound.limit
        whose = f", {own:.0f} of them this key's, and its share is {bound.limit / owners:.0f}"
        caution = CAUTION if owners > 1 else 1.0  # others come in meanwhile
        return QueueFull(
            f"{open_:.0f} {bound.unit} are open{whose if owners > 1 else ''} and "
            f"{asked:.0f} more are over the limit of {bound.limit:.0f} ({bound.setting}); "
            "wait for some to end",
            retry_after_s=max(1.0, caution * self._end_s(min(1.0, over / open_))),
        )

    def wait_s(self, owner: str | None = None) -> float:
        """Forecast the time until one more sequence of this key would start; by default, of the key
        with most waiting. 0 if at once, or if unknown.
        """
        if owner is None:
            owner = max(self._held, key=lambda each: self._held[each].unstarted, default="")
        own, owners = self._held.get(owner, NOTHING), self._owners(owner)
        capacity = self._capacity()
        if not self._open or (owners > 1 and own.sequences < max(1, capacity // owners // 2)):
            return 0.0  # the engine makes room for a key that has so little
        # Keys take turns, so of each other key as many come before it as of its own.
        before = own.unstarted + sum(
            min(held.unstarted, own.unstarted + 1)
            for other, held in self._held.items()
            if other != owner
        )
        running: float = len(self) - self.all.unstarted
        if own.sequences < max(held.sequences for held in self._held.values()):
            running = min(running, capacity)  # what was preempted is the greediest key's
        must_end = before + 1 + running - capacity
        return self._end_s(must_end / len(self)) if must_end > 0 else 0.0

    def _owners(self, asking: str) -> int:
        return len(self._held) + (asking not in self._held)

    def _bounds(self) -> tuple[_Bound, ...]:
        held = self.engine.pages if self.engine is not None else math.inf
        forecast, most = f"max_page_forecast, x {held} pages", self.max_page_forecast * held
        tokens, of_tokens = self.max_queue_tokens, "prompt + max_tokens"
        return (
            _Bound("sequences", "items x n", "max_queue", self.max_queue, lambda d: d.sequences),
            _Bound("tokens", of_tokens, "max_queue_tokens", tokens, lambda d: d.tokens),
            _Bound("KV pages", "by forecast", forecast, most, self._pages, known=False),
        )

    def _check_time(self, demand: Demand) -> None:
        """Refuse a demand that would wait for others longer than its time. Its own run time never
        refuses it: alone it always gets in.
        """
        wait_s = self.wait_s(demand.owner)
        if not wait_s:
            return
        per_sequence = demand.output_tokens / demand.sequences
        others = sum(
            held.unstarted > 0 for other, held in self._held.items() if other != demand.owner
        )
        before = self.forecast.share * per_sequence * (demand.sequences - 1) * (1 + others)
        begin_s = CAUTION * (wait_s + self.forecast.seconds(before))
        end_s = begin_s + CAUTION * self.forecast.sequence_seconds(
            self.forecast.long_share * per_sequence
        )
        now = self._clock()
        for what, forecast_s, allowed_s, setting in (
            ("begin", begin_s, demand.begin_by_s - now, "queue_timeout_s"),
            ("have ended", end_s, demand.deadline_s - now, "timeout_s"),
        ):
            if forecast_s > allowed_s:
                raise Overloaded(
                    f"by forecast the request would {what} after {forecast_s:.1f} s, and it has "
                    f"{max(0.0, allowed_s):.1f} s ({setting}); send it again when less is open, "
                    "or give it more time",
                    retry_after_s=max(1.0, min(wait_s, forecast_s - allowed_s)),
                )

    def _pages(self, held: _Held | Demand) -> float:
        if self.engine is None:
            return 0.0
        tokens = held.prompt_tokens + self.forecast.share * held.output_tokens
        return tokens / self.engine.page_size + held.sequences / 2  # last pages are half full

    def _capacity(self) -> float:
        """Return how many sequences can run at once."""
        if self.engine is None:
            return math.inf
        by_pages = self.engine.pages * len(self) / self.pages if self._open else math.inf
        return max(1.0, min(self.engine.max_running, by_pages))

    def _end_s(self, part: float) -> float:
        """Forecast the time until this share of the open sequences has ended."""
        return self.forecast.seconds(part * self.forecast.share * self.all.output_tokens)

    # -- opening and closing

    def open(self, requests: Sequence[GenerateRequest]) -> None:
        """Count an admitted batch of one key. The sums are updated once, since a batch of thousands
        holds the loop meanwhile.
        """
        if not requests:
            return
        owner, prompt_tokens, output_tokens = requests[0].owner, 0, 0
        for request in requests:
            prompt, output = len(request.token_ids), request.sampling.max_tokens
            self._open[request.id] = _Open(owner, prompt, output)
            prompt_tokens += prompt
            output_tokens += output
        self._add(owner, len(requests), prompt_tokens, output_tokens, len(requests))

    def stepped(self, cycle: Cycle, waiting: float) -> None:
        """Add a step to the forecast if the engine is full. It is full whenever a new request would
        wait, so refusals follow the engine's present speed. `waiting`: sequences that wait in the
        engine after the step.
        """
        if waiting or len(self) >= self._capacity():
            self.forecast.stepped(cycle)

    def take(self, output: StepOutput, *, closes: bool = True) -> None:
        """Count an output of an open sequence; the last one closes it, if it `closes`."""
        opened = self._open[output.id]
        if output.token_ids and not opened.given:
            self.all.unstarted -= 1
            self._held[opened.owner].unstarted -= 1
        opened.given += len(output.token_ids)
        if output.finish_reason is not None:
            if closes:
                self.close(output.id)
            self._learn(output, opened)

    def _learn(self, output: StepOutput, opened: _Open) -> None:
        if not opened.max_tokens:
            return  # a prompt that was only scored tells nothing of outputs
        if output.finish_reason in ("stop", "length"):
            self.forecast.ended(opened.given, opened.max_tokens)
        elif output.error is not None and output.error[0] == DeadlineExceeded.code and opened.given:
            self.forecast.cut_off(opened.given, opened.max_tokens)

    def close(self, id: str) -> None:
        """Remove a sequence from the counts, unless that was done."""
        closed = self._open.pop(id, None)
        if closed is None:
            return
        unstarted = 0 if closed.given else -1
        self._add(closed.owner, -1, -closed.prompt_tokens, -closed.max_tokens, unstarted)
        if not self._held[closed.owner].sequences:
            del self._held[closed.owner]

    def _add(
        self, owner: str, sequences: int, prompt_tokens: int, output_tokens: int, unstarted: int
    ) -> None:
        for held in (self.all, self._held.setdefault(owner, _Held())):
            held.add(sequences, prompt_tokens, output_tokens, unstarted)

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self) <= OVER * self.max_queue and self.tokens <= OVER * self.max_queue_tokens, (
            "over a bound"
        )
        held: dict[str, _Held] = {}
        every = _Held()
        for opened in self._open.values():
            for each in (every, held.setdefault(opened.owner, _Held())):
                each.add(1, opened.prompt_tokens, opened.max_tokens, 0 if opened.given else 1)
        assert every == self.all, "the sums leak"
        assert held == self._held, "a key's sums leak"
