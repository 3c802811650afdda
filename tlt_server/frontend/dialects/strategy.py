"""The strategy that speculates: `GET /strategy` shows what is in force, `PUT /strategy` replaces
the policy between two steps.

A switch never changes a token: a strategy decides how many of the fixed tokens one pass reveals.
Nothing is flushed, and running requests continue.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.commands import SetPolicy
from tlt_server.errors import InvalidRequest, StartupError, Unavailable
from tlt_server.events import EngineInfo
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import Strict, shown
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service
from tlt_server.records import MAX_DEPTH, MAX_ROWS, MAX_WIDTH, Strategy, parse_strategy
from tlt_server.speculation.policies import POLICIES
from tlt_server.speculation.policies.arms import ladder
from tlt_server.wording import nearest

# A strategy that is set while serving may not be larger: it would gain nothing and stall a step.
LIMITS = {"depth": MAX_DEPTH, "width": MAX_WIDTH, "rows": MAX_ROWS}


class PolicyFields(Strict, frozen=True, kw_only=True):
    """A policy, and the strategy that the policy fixed needs."""

    policy: Annotated[
        str,
        Meta(
            description="the policy that chooses each step's strategy",
            extra_json_schema={"enum": list(POLICIES)},
        ),
    ]
    strategy: Annotated[
        str | None,
        Meta(description="for the policy fixed: drafter:DEPTHxWIDTHxROWS, such as eagle:7x4x16"),
    ] = None


class StrategyState(Struct, frozen=True):
    """The policy and the strategy in force, and those that could be."""

    policy: Annotated[str, Meta(description="the policy that chooses each step's strategy")]
    strategy: Annotated[str | None, Meta(description="strategy of the policy fixed; else null")]
    in_force: Annotated[
        str | None, Meta(description="strategy of the last step; null before the first")
    ]
    arms: Annotated[list[str], Meta(description="the strategies that a policy chooses from")]
    policies: Annotated[list[str], Meta(description="policies that can be set")]
    drafters: Annotated[list[str], Meta(description="drafters that are loaded")]


ROUTES = Routes()


@ROUTES.get("/strategy", needs="operate", gives=StrategyState, raises=(Unavailable,))
async def look(service: Service, request: Request) -> Response:
    """Show which policy chooses, and which strategy the last step used."""
    service.engine.check_running()
    return json_response(_state(service))


@ROUTES.put(
    "/strategy",
    needs="operate",
    takes=PolicyFields,
    example={"policy": "off"},
    gives=StrategyState,
    raises=(Unavailable,),
)
async def replace(service: Service, request: Request) -> Response:
    """Replace the policy between two steps.

    No token changes and no running request is disturbed: a strategy decides how many of the
    fixed tokens one pass reveals.
    """
    service.engine.check_running()
    asked = await service.bodies.read(PolicyFields, await request.body())
    service.engine.check_running()  # again, since reading the body may take long
    assert service.engine.info is not None
    service.engine.set_policy(_parse(asked, service.engine.info))
    return json_response(_state(service))


def _state(service: Service) -> StrategyState:
    engine, config = service.engine, service.config
    assert engine.info is not None
    policy = engine.policy or SetPolicy(config.policy, config.strategy)
    return StrategyState(
        policy=policy.policy,
        strategy=policy.strategy.name if policy.strategy else None,
        in_force=engine.last_cycle.strategy.name if engine.last_cycle else None,
        arms=[arm.name for arm in ladder(engine.info.drafters, engine.info.device).arms],
        policies=list(POLICIES),
        drafters=engine.info.drafters,
    )


def _parse(asked: PolicyFields, info: EngineInfo) -> SetPolicy:
    """Return a policy that this engine can follow, or raise `InvalidRequest`."""
    policy, text, loaded = asked.policy, asked.strategy, info.drafters
    if policy not in POLICIES:
        raise InvalidRequest(
            f"policy is {shown(policy)}; known are {', '.join(POLICIES)}{nearest(policy, POLICIES)}"
        )
    if policy != "off" and not loaded:
        raise InvalidRequest(
            f"policy is {policy!r} but no drafter is loaded; use off, or restart the server with "
            "--drafter"
        )
    if (policy == "fixed") != (text is not None):
        raise InvalidRequest(
            f"policy is {policy!r} and strategy is {shown(text)}; strategy is for policy fixed, "
            "which needs one, for example "
            f"{ladder(loaded, info.device).arms[-1].name if loaded else 'eagle:7x4x16'}"
        )
    return SetPolicy(policy, _strategy(text, loaded) if text is not None else None)


def _strategy(text: str, loaded: list[str]) -> Strategy:
    try:
        strategy = parse_strategy(text, "strategy")
    except StartupError as error:
        raise InvalidRequest(error.message) from None
    if strategy.drafter not in loaded:
        raise InvalidRequest(
            f"strategy {text!r} needs the drafter {strategy.drafter!r}; loaded are "
            f"{', '.join(loaded)}: use one of these, or restart the server with another --drafter"
        )
    for name, limit in LIMITS.items():
        value = getattr(strategy, name)
        if value > limit:
            raise InvalidRequest(
                f"strategy {text!r} has {name} {value}; the limit is {limit}: ask for less"
            )
    return strategy
