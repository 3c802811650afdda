"""Policies: which strategy the next step uses. "No speculation" is an ordinary arm. No torch here.

One file each, one table line each. `make` builds a policy from what the engine has for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from tlt_server.records import Cycle, StepContext, Strategy
from tlt_server.registry import Registry
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.policies.arms import Rows

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
    """The parts that an engine gives a policy."""

    arms: Sequence[Strategy]  # OFF first; of the policy `fixed` the one strategy
    rows: Rows  # as in `arms.Ladder`
    knowledge: Knowledge


class Policy(Protocol):
    def choose(self, context: StepContext) -> Strategy: ...

    def observe(self, cycle: Cycle) -> None: ...

    def gauges(self) -> Mapping[str, float]: ...
