"""Over HTTP, with the real pair: what is sampled depends on prompt, parameters and seed, and on
nothing else.
"""

import itertools
from typing import Any

import pytest

from tlt_client import Client
from tlt_client.wire import Choice, ItemResult
from tlt_server.demo.task import problem

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "min_tokens": 20,
        "logit_bias": {"20": 1.5},
    },
    {"logprobs": 3, "raw_logprobs": True},
]
SALTS = itertools.count()


def batch(count: int = 6, n: int = 2) -> list[dict[str, Any]]:
    """The same requests each time, in a salt of their own."""
    salt = str(next(SALTS))
    return [
        {
            "id": str(i),
            "messages": [{"role": "user", "content": problem(i).prompt_text}],
            "n": n,
            "seed": 100 + i,
            "salt": salt,
            "sampling": SAMPLINGS[i % len(SAMPLINGS)],
        }
        for i in range(count)
    ]


def said(choices: list[Choice]) -> list[tuple[Any, ...]]:
    """Everything that must not depend on the way; floats compare by value, which for these is by
    bits.
    """
    return [
        (
            c.index,
            c.token_ids,
            c.logprobs,
            c.raw_logprobs,
            c.top_logprobs,
            c.text,
            c.finish_reason,
            c.stop_reason,
            c.seed,
        )
        for c in choices
    ]


def generate(client: Client, items: list[dict[str, Any]]) -> list[list[tuple[Any, ...]]]:
    reply = client.generate(items, sampling={"max_tokens": 150})
    assert all(result.error is None for result in reply.results)
    return [said(result.choices) for result in reply.results]


@pytest.fixture(scope="module")
def plain(server: Any) -> list[list[tuple[Any, ...]]]:
    with Client(server.url, timeout_s=60) as client:
        client.set_strategy("off")
        return generate(client, batch())


CHAIN, WIDE = ("fixed", "eagle:1x1x2"), ("fixed", "eagle:10x6x32")
POLICIES = [
    ("fixed", "eagle:7x4x16"),
    CHAIN,
    ("fixed", "history:8x2x9"),
    WIDE,
    ("beg", None),
    ("goodput", None),
]


@pytest.mark.parametrize(
    "policy,strategy",
    [
        pytest.param(*each, marks=pytest.mark.long if each in (CHAIN, WIDE) else ())
        for each in POLICIES
    ],
)
def test_speculation_changes_neither_a_token_nor_a_logprob(
    client: Client, plain: list[Any], policy: str, strategy: str | None
) -> None:
    client.set_strategy(policy, strategy)
    reply = client.generate(batch(), sampling={"max_tokens": 150})
    assert [said(result.choices) for result in reply.results] == plain
    if strategy is not None:
        assert sum(choice.sd.accepted for result in reply.results for choice in result.choices) > 0
        assert client.strategy()["in_force"] == strategy


def test_policy_change_mid_request_changes_no_token(client: Client, plain: list[Any]) -> None:
    turns = itertools.cycle([*POLICIES, ("off", None)])
    found: dict[str, list[Any]] = {}
    for i, event in enumerate(client.stream(batch(), sampling={"max_tokens": 150})):
        if i % 20 == 0:
            client.set_strategy(*next(turns))
        if isinstance(event, ItemResult):
            found[event.id] = said(event.choices)
    assert [found[str(i)] for i in range(len(plain))] == plain


def test_the_same_seed_gives_the_same_tokens_alone_or_in_a_batch(
    client: Client, plain: list[Any]
) -> None:
    client.set_strategy("beg")
    one = batch()[3]
    assert generate(client, [one]) == generate(client, [one]) == [plain[3]]


def test_different_seeds_give_different_tokens(client: Client, plain: list[Any]) -> None:
    changed = [{**item, "seed": 999} for item in batch()]
    found = generate(client, changed)
    assert found[1][0][1:7] == plain[1][0][1:7]  # greedy has no noise
    assert found[0] != plain[0] and found[2] != plain[2]


def test_each_choice_is_reproduced_alone_by_its_reported_seed(
    client: Client, plain: list[Any]
) -> None:
    item = batch(1, n=4)[0]
    choices = generate(client, [item])[0]
    assert [choice[0] for choice in choices] == [0, 1, 2, 3]
    assert choices[:2] == plain[0] and len({choice[-1] for choice in choices}) == 4
    assert len({tuple(choice[1]) for choice in choices}) > 1
    alone = generate(client, [{**item, "n": 1, "seed": choices[2][-1]}])[0][0]
    assert alone[1:] == choices[2][1:]
