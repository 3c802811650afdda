"""`/strategy`: what is in force, a policy that reaches the engine, and refusals that name value,
choice and remedy.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.frontend.fake_engine import UNPREPARED
from tests.frontend.live_server import LiveServer, live_server, server_and_client, serving
from tests.waiting import until
from tlt_client import Client, ServerError
from tlt_server.frontend.dialects import strategy
from tlt_server.speculation.policies.arms import ladder
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import OFF, Arms, Pin, Strategy, Switch

HISTORY = {"drafter": "history"}
server = serving(engine={"drafter": "eagle+history"})


def test_a_fresh_server_shows_its_initial_policy(model: Path) -> None:
    with server_and_client(model, engine=HISTORY, drafter="history") as (server, client):
        state = client.strategy()
        assert (state["policy"], state["strategy"], state["in_force"]) == ("goodput", None, None)
        assert state["drafters"] == ["history"]
        assert state["arms"] == [arm.name for arm in ladder(["history"]).arms]
        assert state["expected_tokens_per_s"] is state["cost_error"] is None
        assert state["switches"] == [] and state["outlook_ratio"] == {}
        client.generate([{"prompt": "a"}], sampling={"max_tokens": 4})
        assert client.strategy()["in_force"] == "off"


def test_reasons_of_a_strategy_choice_are_shown(model: Path) -> None:
    with server_and_client(
        model, engine={"drafter": "eagle"}, drafter="history", sd_max_batch=5
    ) as (server, client):
        client.generate([{"prompt": "a"}], sampling={"max_tokens": 4})
        state = client.strategy()
        assert (state["expected_tokens_per_s"], state["cost_error"]) == (900, 0.125)
        assert state["outlook_ratio"] == {"eagle": 0.75}
        assert state["calibration_error"] == {"eagle": 0.25}
        assert state["pins"] == [{"batch": [6, 8], "strategy": "off"}], "the limit is a pin"
        start = {"time_s": 1.5, "strategy": "off", "before": "", "reason": "start", "batch": 1}
        assert state["switches"] == [start]
        server.engine.switches = [Switch(i, "off", "", "pin", 1) for i in range(100)]
        client.generate([{"prompt": "a"}], sampling={"max_tokens": 4})
        assert [each["time_s"] for each in client.strategy()["switches"]] == [*range(68, 100)]
        said = client.metrics()
    assert 'tlt_strategy_switches_total{reason="pin"} 100.0' in said
    assert 'tlt_strategy_switches_total{reason="batch grew"} 0.0' in said
    assert 'tlt_sd_accepted_over_predicted{drafter="eagle"} 0.75' in said


def test_a_policy_reaches_the_engine_and_is_reported(client: Client, server: LiveServer) -> None:
    assert client.set_strategy("fixed", "eagle:7x4x16")["strategy"] == "eagle:7x4x16"
    assert client.set_strategy("off")["policy"] == "off"
    assert client.set_strategy("off")["prepared"] == "off is prepared"
    assert client.set_strategy("beg")["strategy"] is None
    until(lambda: len(server.engine.policies) == 4)
    assert server.engine.policies == [
        SetPolicy("fixed", Strategy("eagle", 7, 4, 16)),
        SetPolicy("off"),
        SetPolicy("off"),
        SetPolicy("beg"),
    ]
    assert client.strategy()["policy"] == "beg"


@pytest.fixture
def unprepared(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server that waits for no policy, and whose engine prepares none until it is told to."""
    monkeypatch.setattr(strategy, "PATIENCE_S", 0.0)
    engine = {"drafter": "eagle", "prepares": False}
    with live_server(model, engine=engine, max_restarts=20) as running:
        yield running


def let_die(server: LiveServer) -> None:
    """Let the engine die, and wait for the next one."""
    engines = len(server.engines)
    server.call(lambda: setattr(server.engine, "dies", True))
    until(lambda: len(server.engines) > engines and not server.client.replica.failure)


CHAIN = SetPolicy("fixed", Strategy("eagle", 7, 4, 16))


def test_a_policy_in_preparation_is_shown_next_to_the_active_one(unprepared: LiveServer) -> None:
    with Client(unprepared.url) as client:
        assert client.strategy()["preparing"] is None
        state = client.set_strategy("fixed", "eagle:7x4x16")
        assert (state["policy"], state["strategy"]) == ("off", None)
        assert state["preparing"] == "fixed with eagle:7x4x16"
        until(lambda: unprepared.engine.policies)
        let_die(unprepared)
        until(lambda: unprepared.engine.policies == [CHAIN])
        assert client.strategy()["preparing"] == "fixed with eagle:7x4x16"
        unprepared.call(lambda: setattr(unprepared.engine, "prepares", True))
        client.set_strategy("beg")
        until(lambda: client.strategy()["policy"] == "beg" and not client.strategy()["preparing"])
        state = client.strategy()
        assert (state["prepared"], state["preparing"]) == ("beg is prepared", None)


def test_restart_restores_the_active_then_the_pending_policy(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "PATIENCE_S", 0.0)
    with server_and_client(model, engine={"drafter": "eagle"}) as (server, client):
        client.set_strategy("beg")
        until(lambda: client.strategy()["policy"] == "beg")
        server.call(lambda: setattr(server.engine, "prepares", False))
        client.set_strategy("fixed", "eagle:7x4x16")
        until(lambda: server.engine.policies == [SetPolicy("beg"), CHAIN])
        let_die(server)  # the next engine prepares
        until(lambda: server.engine.policies == [SetPolicy("beg"), CHAIN])
        until(lambda: client.strategy()["strategy"] == "eagle:7x4x16")
        assert client.strategy()["preparing"] is None


def test_policy_pending_at_two_engine_deaths_is_dropped(
    unprepared: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "PATIENCE_S", 60.0)

    def cut_off() -> str:
        """Return the answer to a change during which the engine dies."""
        body = {"policy": "fixed", "strategy": "eagle:7x4x16"}
        answer = thread.submit(httpx.put, f"{unprepared.url}/strategy", json=body, timeout=120)
        until(lambda: bool(unprepared.client.policies.answers))
        until(lambda: CHAIN in unprepared.engine.policies)
        let_die(unprepared)
        assert answer.result().status_code == 500
        return str(answer.result().json()["error"]["message"])

    with ThreadPoolExecutor(1) as thread, Client(unprepared.url) as client:
        first = cut_off()
        assert "GET /strategy" in first and "dropped" not in first
        until(lambda: unprepared.engine.policies == [CHAIN])
        second = cut_off()
        assert "policy fixed with eagle:7x4x16 was being prepared at 2 deaths" in second
        state = client.strategy()
        assert (state["policy"], state["preparing"]) == ("off", None)
        assert unprepared.engine.policies == []


def test_an_unpreparable_policy_is_an_error(client: Client, server: LiveServer) -> None:
    before = client.set_strategy("beg")
    answer = httpx.put(f"{server.url}/strategy", json={"policy": "fixed", "strategy": UNPREPARED})
    assert answer.status_code == 503 and "not compiled" in answer.json()["error"]["message"]
    assert client.strategy() == before and before["preparing"] is None


def test_arms_and_pins_are_unset_by_the_next_policy(client: Client, server: LiveServer) -> None:
    pins = [{"batch": [1, 8], "strategy": "eagle:7x1x8"}, {"batch": [9, 100000], "strategy": "off"}]
    state = client.set_strategy("beg", arms=["history", "eagle:4x1x5"], pins=pins)
    assert state["pins"] == [pins[0]], "8 run at most"
    history = [arm.name for arm in ladder(["history"]).arms]
    assert state["arms"] == [*history, "eagle:4x1x5"]
    until(lambda: bool(server.engine.policies and server.engine.policies[-1].pins))
    chain = Strategy("eagle", 7, 1, 8)
    assert server.engine.policies[-1] == SetPolicy(
        "beg",
        arms=Arms(("history",), (Strategy("eagle", 4, 1, 5),)),
        pins=(Pin(1, 8, chain), Pin(9, 100000, OFF)),
    )
    state = client.set_strategy("beg")
    assert state["pins"] == [] and len(state["arms"]) > len(history) + 1


def test_every_reported_arm_can_be_set(client: Client) -> None:
    arms = client.strategy()["arms"]
    assert arms == [arm.name for arm in ladder(["eagle", "history"]).arms]
    for arm in arms[1:]:
        assert client.set_strategy("fixed", arm)["strategy"] == arm
    assert client.set_strategy("goodput", arms=arms[1:])["arms"] == arms


def fixed(strategy: object) -> dict[str, object]:
    return {"policy": "fixed", "strategy": strategy}


def arms(*names: str) -> dict[str, object]:
    return {"policy": "beg", "arms": [*names]}


def pinned(*pins: dict[str, object]) -> dict[str, object]:
    return {"policy": "beg", "pins": [*pins]}


PIN = {"batch": [1, 8], "strategy": "off"}
REFUSED: list[tuple[object, tuple[str, ...]]] = [
    (b"", ("not JSON",)),
    ([1], ("must be a JSON object",)),
    ({}, ("policy is missing",)),
    ({"policy": 3}, ("policy is 3", "a string")),
    ({"policy": "fixd"}, ("'fixd'", "did you mean fixed?")),
    ({"policy": "beg", "stratgy": "x"}, ("stratgy", "did you mean strategy?")),
    ({"policy": "fixed"}, ("strategy is None", "needs one", "for example")),
    (fixed("eagle:7x4x16") | {"policy": "off"}, ("'eagle:7x4x16'", "for policy fixed")),
    (fixed(7), ("strategy is 7", "a string")),
    (fixed("eagle-7"), ("'eagle-7'", "drafter:DEPTHxWIDTHxROWS")),
    (fixed("eagle:0x4x16"), ("'eagle:0x4x16'", "at least 1")),
    (fixed("medusa:7x4x16"), ("'medusa'", "eagle, history", "--drafter")),
    (fixed("eagle:65x4x16"), ("depth 65", "limit is 64")),
    (fixed("eagle:7x33x16"), ("width 33", "limit is 32")),
    (fixed("eagle:7x4x257"), ("rows 257", "limit is 256")),
    (arms(), ("arms is []", "at least 1")),
    (arms("eagle") | {"policy": "off"}, ("'off'", "['eagle']", "goodput or beg")),
    (arms("egle"), ("arms[0] is 'egle'", "did you mean eagle?")),
    (arms("eagle", "medusa:4x1x5"), ("arms[1]", "'medusa'", "--drafter")),
    (arms("eagle:6x1x7"), ("'eagle:6x1x7'", "5, 7, 10", "or a pin")),
    (arms("eagle:4x1x6"), ("'eagle:4x1x6'", "3, 5, 8", "use goodput")),
    (pinned({"batch": [1, 8]}), ("pins[0].strategy is missing",)),
    (pinned(PIN | {"batch": 8}), ("pins[0].batch", "a list")),
    (pinned(PIN | {"batch": [8]}), ("batch", "at least 2")),
    (pinned(PIN | {"batch": [0, 8]}), ("batch[0] is 0",)),
    (pinned(PIN | {"batch": [8, 1]}), ("[8, 1]", "swap")),
    (
        pinned(PIN | {"strategy": "none"}),
        ("pins[0].strategy is 'none'", "drafter:DEPTHxWIDTHxROWS"),
    ),
    (pinned(PIN, PIN | {"batch": [8, 9]}), ("pins[0] and pins[1]", "batches of 8", "not overlap")),
    (pinned(*[PIN] * 17), ("pins is", "at most 16 items")),
]


@pytest.mark.parametrize(("body", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_invalid_policy_is_refused_and_the_active_policy_stays(
    body: object, says: tuple[str, ...], server: LiveServer
) -> None:
    before = httpx.get(f"{server.url}/strategy").json()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.put(f"{server.url}/strategy", content=content)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_request"
    for part in says:
        assert part in response.json()["error"]["message"]
    assert httpx.get(f"{server.url}/strategy").json() == before


def test_without_a_drafter_only_policy_off_can_be_set(model: Path) -> None:
    with server_and_client(model) as (server, client):
        assert client.set_strategy("off")["arms"] == ["off"]
        for policy, strategy in (("beg", None), ("fixed", "eagle:7x4x16")):
            with pytest.raises(ServerError, match="no drafter is loaded.*--drafter"):
                client.set_strategy(policy, strategy)


def test_draining_server_refuses_a_policy_change(model: Path) -> None:
    with live_server(model) as server:
        server.call(lambda: setattr(server.client, "draining", True))
        assert httpx.put(f"{server.url}/strategy", json={"policy": "off"}).status_code == 503
