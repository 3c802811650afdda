"""Structures of one owner whose masks take ever more work: others do not wait for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.engine.pushing import Pushable, cpu_settings
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.errors import InvalidRequest
from tlt_server.grammars.forms import grammar_of
from tlt_server.process.machine import resident_bytes
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, Grammar, Sampling, Strategy

ITEMS = 32
ATTACKS = {
    # Just below the limit on products of counts.
    "counted": Grammar(kind="regex", text="((a{1,21}){1,21}){1,21}b"),
    "ambiguous": Grammar(kind="lark", text='start: e\ne: e e | e "+" e | "(" e ")" | "a"'),
}
MOST_OF_PLAIN = 1.5
TREE = Strategy("eagle", 4, 2, 9)


@pytest.fixture(scope="module")
def engine() -> Iterator[Pushable]:
    yield Pushable(cpu_settings(TARGET, DRAFTER, kv_memory_mb=256, max_running=64))


def asked(
    id: str, owner: str, text: str, grammar: Grammar | None, max_tokens: int
) -> GenerateRequest:
    tokenizer = Tokenizer.from_file(str(Path(TARGET) / "tokenizer.json"))
    [letter] = tokenizer.encode("a").ids
    return GenerateRequest(
        id=id,
        owner=owner,
        token_ids=tokenizer.encode(text).ids,
        seed=Random(id).randrange(2**32),
        sampling=Sampling(
            max_tokens=max_tokens,
            temperature=1.0,
            structured_outputs=grammar,
            logit_bias={letter: 60.0} if grammar else {},
        ),
    )


def ended_by_length(request: GenerateRequest) -> GenerateRequest:
    sampling = msgspec.structs.replace(request.sampling, ignore_eos=True)
    return msgspec.structs.replace(request, sampling=sampling)


def attack(engine: Pushable, name: str, items: int = ITEMS) -> list[str]:
    ids = [f"{name} {i}" for i in range(items)]
    engine.submit(*(asked(id, "attacker", "1+1=", ATTACKS[name], 400) for id in ids))
    return ids


def ends(engine: Pushable, ids: list[str]) -> list[tuple[list[int], object]]:
    return [(engine.tokens(id), engine.said[id][-1].error) for id in ids]


def one_token_s(engine: Pushable, id: str) -> float:
    """Return the seconds of another owner's request for one token."""
    started = time.perf_counter()
    engine.said.pop(id, None)
    engine.submit(asked(id, "other", "7*8=", None, 1))
    while not any(output.finish_reason for output in engine.said.get(id, [])):
        engine.step()
    return time.perf_counter() - started


def test_known_structure_attacks_are_refused_or_ended() -> None:
    with pytest.raises(InvalidRequest, match="multiply to 8000000"):
        grammar_of("regex", "((a{1,200}){1,200}){1,200}b")
    for grammar in ATTACKS.values():
        form = {"lark": "grammar"}.get(grammar.kind, grammar.kind)
        assert grammar_of(form, grammar.text) == grammar


def test_other_requests_run_while_a_slow_mask_is_computed(
    engine: Pushable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack sits out steps while threads do not answer, and other requests complete."""
    structures = engine.engine._structures
    engine.engine.send(SetPolicy("off"))
    ids = attack(engine, "counted", 4)
    while not structures.gauges()["structures_alone"]:
        engine.step()
    monkeypatch.setattr(structures.threads, "submit", lambda owner, work: Future())
    for i in range(3):
        one_token_s(engine, f"other {i}")
        assert engine.said[f"other {i}"][-1].error is None
    assert not any(output.finish_reason for id in ids for output in engine.said.get(id, []))
    engine.engine.scheduler.abort(ids)
    assert engine.engine.scheduler.idle


def while_busy(engine: Pushable, ids: list[str], most: int = 20_000) -> list[float]:
    """Return the seconds of each request for one token while these requests run."""
    found = list[float]()
    while not engine.engine.idle and len(found) < most:
        found.append(one_token_s(engine, f"other {len(found)}"))
    engine.engine.scheduler.abort(ids)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("name", ATTACKS)
def test_structure_attacks_delay_owners_like_plain_requests(
    engine: Pushable, name: str, record_property: Callable[[str, object], None]
) -> None:
    """The p99 of another owner's requests for one token, next to the attack and next to the same
    number of plain requests, which take turns: other programs may slow both.
    """
    engine.engine.send(SetPolicy("off"))
    one_token_s(engine, "warm")
    assert engine.run(asked(f"{name} 0", "attacker", "1+1=", ATTACKS[name], 400))
    expected = ends(engine, [f"{name} 0"])
    before = resident_bytes()
    times_s = {"idle": list[float](), "plain": list[float](), "attack": list[float]()}
    for policy in (SetPolicy("off"), SetPolicy("fixed", TREE)):
        engine.engine.send(policy)
        for _ in range(2):
            engine.said.clear()
            times_s["idle"] += [one_token_s(engine, f"idle {i}") for i in range(100)]
            ids = [f"plain {i}" for i in range(ITEMS)]
            plain = [asked(id, "attacker", "1+1=", None, 800) for id in ids]
            engine.submit(*(ended_by_length(request) for request in plain))
            times_s["plain"] += while_busy(engine, ids, 100)
            ids = attack(engine, name)
            times_s["attack"] += while_busy(engine, ids)
            assert ends(engine, ids)[:1] == expected
    p99 = {kind: 1e3 * float(np.quantile(each, 0.99)) for kind, each in times_s.items()}
    figures = {f"{name}: {kind} p99 ms": round(ms, 2) for kind, ms in p99.items()}
    figures |= {
        f"{name}: of plain": round(p99["attack"] / p99["plain"], 2),
        f"{name}: of idle": round(p99["attack"] / p99["idle"], 2),
        f"{name}: requests": len(times_s["attack"]),
        f"{name}: MB": round((resident_bytes() - before) / 1e6),
    }
    print(figures)
    record_property("counted", json.dumps(figures))
    assert p99["attack"] <= MOST_OF_PLAIN * p99["plain"]
