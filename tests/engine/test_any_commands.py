"""All commands in any order: repeated, unknown and foreign names, ends in the step of an abort,
adapters that go, structures that fail on their way, deadlines, pauses, pushes, other policies.

After each step every structure checks itself, each command and each sequence is answered as often
as it was sent, nothing is contained, and an undisturbed sequence has the tokens of a quiet engine.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from tests.engine.adapters import write_adapter
from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import checkpoints, on_cpu, prompt
from tests.engine.pushing import perturbed
from tests.engine.tiny import SMALLEST, write_alphabet
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.wire.commands import (
    Abort,
    AbortWeights,
    ClearCache,
    Command,
    CommitWeights,
    LeaveGroup,
    LookAtWeights,
    Manifest,
    NameWeights,
    Pause,
    PushWeights,
    ReadWeights,
    Recompute,
    Resume,
    RollbackWeights,
    SetPolicy,
    Sleep,
    Submit,
    UnloadAdapter,
    WakeUp,
)
from tlt_server.wire.records import GenerateRequest, Grammar, Sampling, StepOutput, Strategy

NAMES = tuple("abcdefghijkl")
PATHS = ("base", "new", "newer", "none")
ADAPTERS = ("x", "y")
REGEXES = ("[a-e]{2,5}", "a{3}~", "[ab]c~", "([a-c]{1,3}){1,4}")  # no token has a tilde
GRAMMARS = [Grammar(kind="regex", text=text) for text in REGEXES]
KINDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 1},
    {"max_tokens": 6},
    {"max_tokens": 9, "temperature": 0.0, "repetition_penalty": 1.3},
    {"max_tokens": 5, "ignore_eos": False, "stop_token_ids": (3, 7, 11, 20, 40)},
    {"max_tokens": 0, "prompt_logprobs": 1},
    {"max_tokens": 30},
    *({"max_tokens": 8, "ignore_eos": False, "structured_outputs": g} for g in GRAMMARS),
    {"max_tokens": 60},  # with most prompts more than the model holds
)
COMMON = [*range(len(KINDS) - 1)]


@dataclass
class Driven:
    """An engine, what it was sent, and what it has answered."""

    settings: EngineSettings
    ids: Iterator[int] = field(default_factory=itertools.count)
    sent: Counter[str] = field(default_factory=Counter)  # ends that are owed, by id
    asked: dict[str, str] = field(default_factory=dict)  # commands without an answer
    said: dict[str, list[StepOutput]] = field(default_factory=dict)
    results: Counter[str] = field(default_factory=Counter)
    requests: dict[str, list[GenerateRequest]] = field(default_factory=dict)
    quiet: dict[bytes, list[int]] = field(default_factory=dict)  # tokens of a run alone
    compared: int = 0
    before: list[int] = field(default_factory=list)  # changes of weights when the example began
    unchanged: set[str] = field(default_factory=set)  # ended before any change of the example

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.engine, self.info = assemble(self.settings)
        self.asked.clear()
        self.forget()

    def send(self, command: Command) -> None:
        if isinstance(command, Submit):
            self.sent.update(request.id for request in command.requests)
            for request in command.requests:
                self.requests.setdefault(request.id, []).append(request)
        elif id := getattr(command, "id", ""):
            self.asked[id] = type(command).__name__
        self.engine.send(command)

    def submit(self, requests: list[GenerateRequest]) -> None:
        named = [msgspec.structs.replace(made, id=made.id or self.id()) for made in requests]
        self.send(Submit(named))

    def step(self) -> None:
        ended = []
        for output in self.engine.step():
            self.said.setdefault(output.id, []).append(output)
            if output.finish_reason is not None:
                ended.append(output.id)
                self.sent[output.id] -= 1
                self.results[output.error[0] if output.error else output.finish_reason] += 1
            assert self.sent[output.id] >= 0, f"{output.id} has ended too often"
        for report in [*self.engine.reports(), *self.engine.control_reports()]:
            if report.id:
                asked = self.asked.pop(report.id)
                self.results[f"{asked}: {report.error[0] if report.error else 'done'}"] += 1
        if self.changes == self.before:
            self.unchanged.update(ended)
        self.check()

    def check(self) -> None:
        engine = self.engine
        engine.scheduler.check()
        engine.gate.check()
        assert engine.faults.count == 0, "a fault was contained"
        cycle = engine.last_cycle
        if cycle is not None:
            assert len(cycle.accepted) <= cycle.context.decoding
            assert all(count >= 0 for count in cycle.accepted)
            assert sum(cycle.accepted) <= cycle.drafted
        assert all(value >= 0 for name, value in engine.gauges().items() if "error" not in name)

    def until(self, done: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 240
        while not done():
            assert time.monotonic() < give_up, (self.sent, self.asked)
            self.step()
            if self.engine.last_cycle is None:
                time.sleep(0.0002)

    def settle(self) -> None:
        """End every halt and every wait, then everything; nothing may be left."""
        self.send(Resume(self.id()))
        self.send(WakeUp(self.id(), ["weights", "kv_cache"]))
        self.send(AbortWeights(self.id()))  # an unload waits for a push that is staged
        self.until(lambda: not self.owed and not self.asked and self.engine.idle)
        self.send(AbortWeights(self.id()))  # what is staged and was not committed
        self.until(lambda: not self.asked and not self.engine.pushes.busy)
        gauges = self.engine.gauges()
        assert gauges["pages_free"] == self.info.pages, "pages leak"
        assert gauges["running"] == gauges["waiting"] == gauges["spanning"] == 0

    @property
    def owed(self) -> list[str]:
        return [id for id, count in self.sent.items() if count]

    def id(self) -> str:
        return f"c{next(self.ids)}"

    def push(self, path: str, **fields: Any) -> None:
        manifest = {"path": path, "version": f"v{path}", **fields}
        self.send(PushWeights(self.id(), msgspec.convert(manifest, Manifest)))

    def start_over(self) -> None:
        """Bring back the weights, adapters and policy that every example begins with."""
        self.send(SetPolicy("fixed", Strategy("history", 3, 2, 6)))
        if self.engine.pushes.state().target not in ("vbase", "initial"):
            self.push("base")
            self.until(lambda: not self.asked)
        for name in ADAPTERS:
            if name not in self.engine.pushes.state().adapters:
                self.push(name, version="one", role="adapter", adapter=name)
                self.until(lambda: not self.asked)
        assert {*ADAPTERS} == {*self.engine.pushes.state().adapters}, self.results
        self.forget()
        self.before = self.changes

    def forget(self) -> None:
        for held in (self.said, self.sent, self.requests, self.unchanged):
            held.clear()

    @property
    def changes(self) -> list[int]:
        """Count the changes of weights so far."""
        kinds = ("PushWeights", "CommitWeights", "RollbackWeights")
        return [self.results[f"{kind}: done"] for kind in kinds]

    def compare(self) -> None:
        """Compare what has ended by itself, before any change of weights, with a run alone."""
        ended = [
            (made[0], [token for output in self.said[id] for token in output.token_ids])
            for id, made in self.requests.items()
            if len(made) == 1
            and id in self.unchanged
            and self.said[id][-1].finish_reason in ("length", "stop")
        ]
        self.start_over()
        for request, tokens in ended:
            plain = (request.token_ids, request.sampling, request.lora)
            key = msgspec.msgpack.encode(plain)
            if key not in self.quiet:
                self.forget()
                token_ids, sampling, lora = plain
                one = GenerateRequest(
                    id="one", token_ids=token_ids, sampling=sampling, lora=lora, seed=request.seed
                )
                self.send(Submit([one]))
                self.until(lambda: not self.owed)
                self.quiet[key] = [id for output in self.said["one"] for id in output.token_ids]
            assert tokens == self.quiet[key], request
            self.compared += 1


Act = Callable[[Driven], None]


def request(id: str, kind: int, text: int, adapter: str = "", **fields: Any) -> GenerateRequest:
    sampling = Sampling(**{"ignore_eos": True, **KINDS[kind]})
    token_ids, seed = prompt(text, 3 + 7 * text), 300 + text
    return GenerateRequest(
        id=id, token_ids=token_ids, sampling=sampling, seed=seed, lora=adapter, **fields
    )


REQUESTS = st.builds(
    request,
    st.sampled_from((*NAMES, *("",) * len(NAMES))),  # empty: a name of its own
    st.sampled_from(COMMON * 2 + [len(KINDS) - 1]),
    st.integers(0, 3),
    st.sampled_from((*("",) * 8, *ADAPTERS * 3, "unknown")),
    owner=st.sampled_from(("", "k", "l")),
    priority=st.integers(0, 1),
    sd=st.sampled_from((True, True, False)),
    deadline_s=st.sampled_from((*(None,) * 12, 1.0, 1e12)),  # long past, or never
    begin_by_s=st.sampled_from((*(None,) * 12, 1.0, 1e12)),
)
BATCHES: st.SearchStrategy[Act] = st.lists(REQUESTS, min_size=1, max_size=3).map(
    lambda made: lambda driven: driven.submit(made)
)


def sends(make: Callable[..., Command], *drawn: Any) -> st.SearchStrategy[Act]:
    """Build a command whose first field is its id."""
    return st.tuples(*drawn).map(
        lambda given: lambda driven: driven.send(make(driven.id(), *given))
    )


IN_FLIGHT = st.sampled_from(("continue", "recompute", "abort", "drain"))
MEMORY = st.sampled_from((["weights"], ["kv_cache"], ["weights", "kv_cache"]))
UNLOADS = st.sampled_from(("drain", "abort"))
SOME = st.lists(st.sampled_from((*NAMES, "unknown")), max_size=4)
VERSIONS = st.sampled_from(("", "vnew", "vnewer", "initial", "unknown"))
POLICIES = (
    SetPolicy("off"),
    SetPolicy("fixed", Strategy("history", 4, 2, 8)),
    SetPolicy("fixed", Strategy("eagle", 2, 2, 4)),
    SetPolicy("goodput"),
    SetPolicy("none"),
)
STEPS = st.integers(0, 9).map(lambda n: lambda driven: [driven.step() for _ in range(n)])
AWAKE: st.SearchStrategy[Act] = st.one_of(
    sends(Resume), sends(WakeUp, st.just(["weights", "kv_cache"]))
)
KINDS_OF_ACTS: tuple[st.SearchStrategy[Act], ...] = (
    *(BATCHES for _ in range(12)),
    *(STEPS for _ in range(12)),
    *(AWAKE for _ in range(4)),
    st.tuples(SOME, st.booleans()).map(
        lambda given: lambda driven: driven.send(Abort(given[0], all=given[1] and not given[0]))
    ),
    sends(Pause, IN_FLIGHT, st.booleans()),
    sends(Resume),
    sends(Sleep, MEMORY, IN_FLIGHT),
    sends(WakeUp, MEMORY),
    sends(ClearCache, st.booleans()),
    st.sampled_from(POLICIES).map(lambda command: lambda driven: driven.send(command)),
    st.tuples(st.sampled_from(PATHS), IN_FLIGHT, st.booleans()).map(
        lambda given: lambda driven: driven.push(given[0], in_flight=given[1], commit=given[2])
    ),
    st.tuples(st.sampled_from((*ADAPTERS, "none")), IN_FLIGHT).map(
        lambda given: (
            lambda driven: driven.push(
                given[0], version=driven.id(), role="adapter", adapter=given[0], in_flight=given[1]
            )
        )
    ),
    sends(UnloadAdapter, st.sampled_from((*ADAPTERS, "unknown")), UNLOADS),
    sends(CommitWeights, VERSIONS),
    sends(AbortWeights, VERSIONS),
    sends(RollbackWeights, VERSIONS, IN_FLIGHT),
    sends(NameWeights, st.sampled_from(("named", "vnew"))),
    sends(LookAtWeights, st.booleans()),
    sends(ReadWeights, st.sampled_from(("model.norm.weight", "unknown")), st.integers(0, 2)),
    sends(LeaveGroup, st.just("unknown")),
    st.just(lambda driven: driven.send(Recompute([b"\0" * 64]))),
)


# `one_of` would take equal strategies for one, so their weights would not count.
ACTS: st.SearchStrategy[Act] = st.sampled_from(KINDS_OF_ACTS).flatmap(lambda kind: kind)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    root = tmp_path_factory.mktemp("smallest")
    made = checkpoints(root)
    write_alphabet(root / "base", SMALLEST)
    perturbed(root / "base", root / "newer", 2)
    for i, name in enumerate(ADAPTERS):
        write_adapter(root / name, root / "base", i, rank=2)
    return replace(made, max_loras=2, max_lora_rank=4, max_rows=24, weight_channels="disk")


@pytest.fixture(scope="module", params=["cpu", pytest.param("interpreter", marks=pytest.mark.soak)])
def driven(request: pytest.FixtureRequest, settings: EngineSettings) -> Iterator[Driven]:
    if request.param == "cpu":
        yield Driven(replace(on_cpu(settings), kv_memory_mb=0))
    else:
        with patched_once():
            yield Driven(settings)


def drive(driven: Driven, acts: list[Act]) -> None:
    try:
        driven.start_over()
        for act in acts:
            act(driven)
        driven.settle()
        driven.compare()
    except Exception:
        driven.renew()  # for hypothesis, which tries the example again
        raise


EXAMPLES: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "phases": (hypothesis.Phase.generate,),
}
DRAWN = st.lists(ACTS, min_size=20, max_size=60)


def test_commands_in_any_order_end_their_named_sequences(driven: Driven) -> None:
    @hypothesis.settings(max_examples=200, **EXAMPLES)
    @hypothesis.given(DRAWN)
    def every(acts: list[Act]) -> None:
        drive(driven, acts)

    every()
    for expected in ("length", "stop", "abort", "structure_failed", "deadline_exceeded"):
        assert driven.results[expected] > 10, driven.results
    # About 520: a push that is staged sooner or later moves it by 20.
    assert driven.compared > 300, "hardly a sequence was compared"
    assert driven.results["PushWeights: done"] > 20 and driven.results["Pause: done"] > 20


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_many_commands_in_any_order_end_their_named_sequences(
    driven: Driven, record_property: Any
) -> None:
    """20,000 examples on a CPU; an interpreted step takes 30 times as long."""
    count = 20_000 if driven.settings.device == "cpu" else 500

    @hypothesis.settings(max_examples=count, **EXAMPLES | {"derandomize": False})
    @hypothesis.given(DRAWN)
    def every(acts: list[Act]) -> None:
        drive(driven, acts)

    every()
    record_property("counted", json.dumps(dict(driven.results)))
