"""Policies: which strategy the next step uses. "No speculation" is an ordinary arm. No torch here.

One file and one table line each. `make` builds a policy from a `Setup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tlt_server.registry import Registry
from tlt_server.speculation.policies.arms import Ladder
from tlt_server.speculation.sizes import Recordings, Sizes
from tlt_server.wire.records import Arms, Cycle, StepContext, Strategy

if TYPE_CHECKING:  # it loads a compiler, which the frontend does not need
    from tlt_server.speculation.knowledge import Knowledge

POLICIES = Registry(
    "policy",
    {
        "off": "tlt_server.speculation.policies.off:Off",
        "fixed": "tlt_server.speculation.policies.fixed:Fixed",
        "beg": "tlt_server.speculation.policies.beg:Beg",
        "goodput": "tlt_server.speculation.policies.goodput:Goodput",
    },
)


class Setup(NamedTuple):
    """The engine's inputs to a policy."""

    ladder: Ladder  # for `beg`
    strategy: Strategy  # for `fixed`
    knowledge: Knowledge
    sizes: Sizes
    arms: Arms | None = None  # what an operator allows; None: all
    recordings: Recordings | None = None  # None: the device records nothing


class Policy(Protocol):
    measures: bool  # it predicts the time of steps, so the engine measures some at start

    def choose(self, context: StepContext) -> Strategy: ...

    def observe(self, cycle: Cycle) -> None: ...

    def strategies(self, requests: range, *, prompts: bool) -> Iterable[Strategy]:
        """Return every strategy that the policy may choose for these numbers of decoding requests,
        with or without prompts in the step. A device pads these numbers to one size, and prepares
        these strategies.
        """

    def gauges(self) -> Mapping[str, float]: ...
