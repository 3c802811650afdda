"""Names of policies on the command line and in figures: `goodput`, `fixed:eagle:7x1x8`. No
torch.
"""

from __future__ import annotations

from typing import get_args

from tlt_server.errors import StartupError
from tlt_server.settings.server import PolicyName
from tlt_server.speculation.policies import POLICIES
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import parse_strategy


def parse_policy(text: str) -> SetPolicy:
    """Parse a policy. `StartupError` if it is invalid."""
    name, _, strategy = text.partition(":")
    POLICIES.resolve(name)
    if (name == "fixed") != bool(strategy):
        raise StartupError(
            f"--policy is {text[:80]!r}; fixed takes a strategy, for example fixed:eagle:7x1x8, "
            "and no other policy does"
        )
    assert name in get_args(PolicyName)
    return SetPolicy(name, parse_strategy(strategy, "--policy") if strategy else None)


def policy_name(command: SetPolicy) -> str:
    return f"{command.policy}:{command.strategy.name}" if command.strategy else command.policy
