"""Policies: which strategy the next step uses. "No speculation" is an ordinary arm. No torch here.

One file each, one table line each. A policy is built as `Policy(arms, rows=...)`, see
`arms.Ladder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tlt_server.records import Cycle, StepContext, Strategy
from tlt_server.registry import Registry

POLICIES = Registry(
    "policy",
    {
        "off": "tlt_server.speculation.policies.off:Off",
        "fixed": "tlt_server.speculation.policies.fixed:Fixed",
        "beg": "tlt_server.speculation.policies.beg:Beg",
    },
)


class Policy(Protocol):
    def choose(self, context: StepContext) -> Strategy: ...

    def observe(self, cycle: Cycle) -> None: ...

    def gauges(self) -> Mapping[str, float]: ...
