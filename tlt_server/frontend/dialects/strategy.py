"""Which strategy speculates: `GET /strategy` says what is in force, `PUT /strategy` replaces the
policy between two steps.

A switch never changes a token: it decides how many of the fixed tokens one pass reveals. Nothing is
flushed, running requests go on.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.config import nearest
from tlt_server.errors import InvalidRequest, StartupError, Unavailable
from tlt_server.frontend.http.bodies import read_object
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import Strict, checked, shown
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service
from tlt_server.records import EngineInfo, SetPolicy, Strategy, parse_strategy
from tlt_server.speculation.policies import POLICIES
from tlt_server.speculation.policies.arms import ladder

LIMITS = {
    "depth": 64,
    "width": 32,
    "rows": 256,
}  # of a strategy set while serving; larger trees gain nothing and stall a step


class PolicyFields(Strict):
    policy: Annotated[
        str,
        Field(
            description="who chooses each step's strategy",
            json_schema_extra={"enum": list(POLICIES)},
        ),
    ]
    strategy: Annotated[
        str | None,
        Field(description="for the policy fixed: drafter:DEPTHxWIDTHxROWS, such as eagle:7x4x16"),
    ] = None


class StrategyState(Struct, frozen=True):
    """What decides how much is speculated, and what could."""

    policy: Annotated[str, Meta(description="who chooses each step's strategy")]
    strategy: Annotated[str | None, Meta(description="the one of the policy fixed; else null")]
    in_force: Annotated[
        str | None, Meta(description="what the last step used; null before the first")
    ]
    arms: Annotated[list[str], Meta(description="the strategies that a policy chooses from")]
    policies: Annotated[list[str], Meta(description="that can be set")]
    drafters: Annotated[list[str], Meta(description="that are loaded")]


ROUTES = Routes()


@ROUTES.get("/strategy", needs="operate", gives=StrategyState, raises=(Unavailable,))
async def look(service: Service, request: Request) -> Response:
    """Which policy chooses, and which strategy was in force in the last step."""
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
    body = await request.body()
    service.engine.check_running()  # the body may have taken its time
    assert service.engine.info is not None
    service.engine.set_policy(_parse(await read_object(body, "policy"), service.engine.info))
    return json_response(_state(service))


def _state(service: Service) -> StrategyState:
    engine, config = service.engine, service.config
    assert engine.info is not None
    policy = engine.policy or SetPolicy(config.policy, config.strategy)
    return StrategyState(
        policy=policy.policy,
        strategy=policy.strategy.name if policy.strategy else None,
        in_force=engine.last_cycle.strategy.name if engine.last_cycle else None,
        arms=[arm.name for arm in ladder(_drafters(engine.info), engine.info.device).arms],
        policies=list(POLICIES),
        drafters=_drafters(engine.info),
    )


def _drafters(info: EngineInfo) -> list[str]:
    return [name for name in info.drafter.split("+") if name not in ("", "none")]


def _parse(content: dict[str, Any], info: EngineInfo) -> SetPolicy:
    """A policy that this engine can follow, or `InvalidRequest`."""
    asked, loaded = checked(PolicyFields, content), _drafters(info)
    policy, text = asked.policy, asked.strategy
    if policy not in POLICIES:
        raise InvalidRequest(
            f"policy is {shown(policy)}; known are {', '.join(POLICIES)}{nearest(policy, POLICIES)}"
        )
    if policy != "off" and not loaded:
        raise InvalidRequest(
            f"policy is {policy!r} but no drafter is loaded; use off, or restart the server with --drafter"
        )
    if (policy == "fixed") != (text is not None):
        raise InvalidRequest(
            f"policy is {policy!r} and strategy is {shown(text)}; strategy is for policy fixed, which needs one, "
            f"for example {ladder(loaded, info.device).arms[-1].name if loaded else 'eagle:7x4x16'}"
        )
    return SetPolicy(policy, _strategy(text, loaded) if text is not None else None)


def _strategy(text: str, loaded: list[str]) -> Strategy:
    try:
        strategy = parse_strategy(text, "strategy")
    except StartupError as error:
        raise InvalidRequest(error.message) from None
    if strategy.drafter not in loaded:
        raise InvalidRequest(
            f"strategy {text!r} needs the drafter {strategy.drafter!r}; loaded are {', '.join(loaded)}: "
            "use one of these, or restart the server with another --drafter"
        )
    for name, limit in LIMITS.items():
        value = getattr(strategy, name)
        if value > limit:
            raise InvalidRequest(
                f"strategy {text!r} has {name} {value}; the limit is {limit}: ask for less"
            )
    return strategy
