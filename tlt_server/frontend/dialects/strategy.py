"""The speculation strategy: `GET /strategy` shows which one is active and why, `PUT /strategy`
replaces the policy, its arms and the pins between two steps.

A switch never changes a token: a strategy decides how many of the fixed tokens one pass reveals.
Nothing is flushed, running requests continue, and learned statistics stay.
"""

from __future__ import annotations

from itertools import combinations
from typing import Annotated

from msgspec import Meta, Struct

from tlt_client.fields import MAX_INT32
from tlt_server.errors import Conflict, InvalidRequest, StartupError
from tlt_server.frontend.http.endpoints import Routes, read_given, while_running
from tlt_server.frontend.http.fields import Strict, shown
from tlt_server.frontend.service import Service
from tlt_server.settings.wording import nearest
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.policies import POLICIES
from tlt_server.speculation.policies.arms import ladder
from tlt_server.speculation.policies.pinned import limit
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.records import OFF, Arms, Pin, Strategy, Switch, parse_strategy
from tlt_server.wire.tree_limits import MAX_DEPTH, MAX_ROWS, MAX_WIDTH

# A strategy that is set while serving may not be larger: it would gain nothing and stall a step.
LIMITS = {"depth": MAX_DEPTH, "width": MAX_WIDTH, "rows": MAX_ROWS}
MAX_ARMS, MAX_PINS = 64, 16
PATIENCE_S = 30.0  # for the kernels of a policy
RATIO = "outlook_ratio_"  # begins the names of the gauges of drafters

Batches = Annotated[
    list[Annotated[int, Meta(ge=1, le=MAX_INT32)]],
    "the smallest and the largest number of decoding sequences that it holds for",
    Meta(min_length=2, max_length=2),
]
PinnedName = Annotated[str, "drafter:DEPTHxWIDTHxROWS, or off"]


class PinFields(Strict, frozen=True, kw_only=True):
    """A strategy for a range of batch sizes."""

    batch: Batches
    strategy: PinnedName


class PolicyFields(Strict, frozen=True, kw_only=True):
    """A policy, the strategies that it may choose from, and those that hold in its place."""

    policy: Annotated[
        str,
        "the policy that chooses each step's strategy",
        Meta(extra_json_schema={"enum": list(POLICIES)}),
    ]
    strategy: Annotated[
        str | None, "for the policy fixed: drafter:DEPTHxWIDTHxROWS, such as eagle:7x4x16"
    ] = None
    arms: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=MAX_ARMS)] | None,
        "all that a policy may choose from, next to off: drafters, and strategies of which goodput "
        "takes depth and width; absent: everything",
    ] = None
    pins: Annotated[
        list[PinFields], "strategies that hold for ranges of batch sizes", Meta(max_length=MAX_PINS)
    ] = []


class PinState(Struct, frozen=True):
    """A strategy for a range of batch sizes."""

    batch: Batches
    strategy: PinnedName


class StrategyState(Struct, frozen=True, kw_only=True):
    """The policy and the strategy in force, those that could be, and what the choice rests on."""

    policy: Annotated[str, "the policy that chooses each step's strategy"]
    strategy: Annotated[str | None, "strategy of the policy fixed; else null"]
    in_force: Annotated[str | None, "strategy of the last step; null before the first"]
    expected_tokens_per_s: Annotated[
        float | None, "expected of steps like the last ones; null: not known"
    ]
    arms: Annotated[list[str], "strategies that beg chooses from; goodput has other depths, too"]
    pins: Annotated[
        list[PinState],
        "pins in force, with the limit of sd_max_batch; not those for more sequences than run at "
        "once",
    ]
    prepared: Annotated[str, "what the policy in force found prepared, and what was loaded for it"]
    preparing: Annotated[
        str | None,
        "the policy that was set last, while its kernels are compiled and loaded; null: it is in "
        "force",
    ]
    policies: Annotated[list[str], "policies that can be set"]
    drafters: Annotated[list[str], "drafters that are loaded"]
    cost_error: Annotated[
        float | None, "mean relative error of predicted step times; null: not known"
    ]
    outlook_ratio: Annotated[
        dict[str, float], "drafter -> draft tokens accepted over those predicted, of late"
    ]
    calibration_error: Annotated[dict[str, float], "drafter -> how far that ratio is from 1"]
    switches: Annotated[list[Switch], "the last changes of the strategy, newest last"]


ROUTES = Routes(needs="operate")


@ROUTES.get("/strategy", engine_fails=False)
async def look(service: Service) -> StrategyState:
    """Show which policy chooses, which strategy the last step used, and why."""
    service.engine.check_running()
    return _state(service)


@ROUTES.put(
    "/strategy", read=while_running(read_given), example={"policy": "off"}, raises=(Conflict,)
)
async def replace(service: Service, asked: PolicyFields) -> StrategyState:
    """Replace the policy, its arms and the pins between two steps; what is absent is unset.

    No token changes and no running request is disturbed: a strategy decides how many of the
    fixed tokens one pass reveals. The kernels of its strategies are loaded first, and graphs
    recorded where they are fixed, while the policy before chooses. The answer comes when it is in
    force, or after 30 s, or while memory sleeps at once, with `preparing`. 409: another policy was
    set meanwhile.
    """
    policy = _parse(asked, service.running())  # again, since reading the body may take long
    await service.engine.set_policy(policy, PATIENCE_S)
    return _state(service)


def _state(service: Service) -> StrategyState:
    engine, config = service.engine, service.config
    info, replica = service.info, engine.replica
    gauges, last = replica.gauges, replica.last_cycle
    policies = engine.policies
    policy = policies.in_force or SetPolicy(config.policy, config.strategy)
    ratios = {name: gauges[RATIO + name] for name in info.drafters if RATIO + name in gauges}
    return StrategyState(
        policy=policy.policy,
        strategy=policy.strategy.name if policy.strategy else None,
        in_force=last.strategy.name if last else None,
        expected_tokens_per_s=gauges.get("expected_rate") or None,
        arms=[arm.name for arm in ladder(info.drafters, info.device).within(policy.arms).arms],
        pins=[
            PinState([pin.first, min(pin.last, info.max_running)], pin.strategy.name)
            for pin in (*policy.pins, *limit(config.sd_max_batch))
            if pin.first <= info.max_running
        ],
        prepared=policies.prepared,
        preparing=policies.preparing.name if policies.preparing else None,
        policies=list(POLICIES),
        drafters=info.drafters,
        cost_error=gauges.get("cost_error"),
        outlook_ratio=ratios,
        calibration_error={name: abs(ratio - 1) for name, ratio in ratios.items()},
        switches=[*replica.switches],
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
    if asked.arms is not None and policy in ("off", "fixed"):
        raise InvalidRequest(
            f"policy is {policy!r} and arms is {shown(asked.arms)}; arms are for a policy that "
            "chooses: leave them out, or use goodput or beg"
        )
    return SetPolicy(
        policy,
        _strategy("strategy", text, loaded) if text is not None else None,
        _arms(policy, asked.arms, info) if asked.arms is not None else None,
        _pins(asked.pins, loaded),
    )


def _strategy(field: str, text: str, loaded: list[str]) -> Strategy:
    try:
        strategy = parse_strategy(text, field)
    except StartupError as error:
        raise InvalidRequest(error.message) from None
    if strategy.drafter not in loaded:
        raise InvalidRequest(
            f"{field} {text!r} needs the drafter {strategy.drafter!r}; loaded are "
            f"{', '.join(loaded) or 'none'}: use one of these, or restart the server with another "
            "--drafter"
        )
    for name, most in LIMITS.items():
        value = getattr(strategy, name)
        if value > most:
            raise InvalidRequest(
                f"{field} {text!r} has {name} {value}; the limit is {most}: ask for less"
            )
    return strategy


def _arms(policy: str, names: list[str], info: EngineInfo) -> Arms:
    """Return the arms for these names, each of which is a drafter or a strategy."""
    strategies, arms = [], ladder(info.drafters, info.device)
    for i, name in enumerate(names):
        if name in info.drafters:
            continue
        if ":" not in name:
            raise InvalidRequest(
                f"arms[{i}] is {shown(name)}; it must be a drafter that is loaded "
                f"({', '.join(info.drafters)}) or a strategy such as eagle:7x1x8"
                f"{nearest(name, info.drafters)}"
            )
        strategy = _strategy(f"arms[{i}]", name, info.drafters)
        half = DRAFTERS[strategy.drafter].half(info.device)
        shaped = strategy.depth in half.depths and strategy.width in half.widths
        if not shaped and strategy not in arms.arms:
            raise InvalidRequest(
                f"arms[{i}] is {name!r}; policies choose the depths "
                f"{', '.join(map(str, half.depths))} and the widths "
                f"{', '.join(map(str, half.widths))} of {strategy.drafter}: name one of these, or "
                "use policy fixed, or a pin"
            )
        rows = sorted({group.rows for group in arms.groups} - {OFF.rows})
        if policy == "beg" and strategy.rows not in rows:
            raise InvalidRequest(
                f"arms[{i}] is {name!r}; beg chooses strategies of {', '.join(map(str, rows))} "
                "verify rows: name one of these, or use goodput"
            )
        strategies.append(strategy)
    drafters = tuple(name for name in info.drafters if name in names)
    return Arms(drafters, tuple(strategies))


def _pins(asked: list[PinFields], loaded: list[str]) -> tuple[Pin, ...]:
    pins = []
    for i, pin in enumerate(asked):
        first, last = pin.batch
        if first > last:
            raise InvalidRequest(
                f"pins[{i}].batch is {pin.batch}; the smallest batch comes first: swap the two"
            )
        off = pin.strategy == OFF.name
        strategy = OFF if off else _strategy(f"pins[{i}].strategy", pin.strategy, loaded)
        pins.append(Pin(first, last, strategy))
    for (i, one), (j, other) in combinations(enumerate(pins), 2):
        if one.first <= other.last and other.first <= one.last:
            raise InvalidRequest(
                f"pins[{i}] and pins[{j}] both hold for batches of {max(one.first, other.first)}; "
                "let their ranges not overlap"
            )
    return tuple(pins)
