"""The comparisons of `tlt bench exact` on each kind of device: arms, batches, pages, chunks, and
the kinds of requests. No torch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from tlt_server.settings.server import PolicyName
from tlt_server.wire.records import GenerateRequest, Grammar, Strategy

STARTED, PUSHED = "initial", "pushed"  # the engine's own name for the version at its start
VERSIONS = (STARTED, PUSHED)

Configuration = dict[str, object]
Arms = Mapping[str, tuple[PolicyName, Strategy | None]]  # name -> policy, its one strategy
Factors = Mapping[str, tuple[object, ...]]


class ExactSize(NamedTuple):
    requests: int
    max_tokens: int
    long: int  # requests that may take long_tokens
    long_tokens: int
    alone: int  # requests at batch 1


class Plan(NamedTuple):
    """The comparisons made on a kind of device."""

    arms: Arms
    factors: Factors
    reference: Configuration
    full: ExactSize
    quick: ExactSize
    max_model_len: int  # 0: the model's own
    starts: PolicyName  # policy of the engines' start, which compiles all that it may choose

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Return the strategies of the arms that have one."""
        return tuple(strategy for _, strategy in self.arms.values() if strategy is not None)

    @property
    def max_rows(self) -> int:
        """Return the rows of the largest chunk."""
        return max(int(str(chunk)) for chunk in self.factors["chunk"])

    def in_order(self, configurations: list[Configuration]) -> list[Configuration]:
        """Return the configurations by batch, those of the reference's batch first, so that one
        engine runs all of a batch. One push suffices: after the runs of the starting version or, at
        other batches, before them, which then need a rollback. `goodput` comes last within a
        version, when most is known of steps and drafts.
        """
        first = self.reference["batch"]

        def place(c: Configuration) -> tuple[bool, object, bool, bool]:
            later = (c.get("version") == PUSHED) == (c["batch"] == first)
            return c["batch"] != first, c["batch"], later, c["arm"] == "goodput"

        return sorted(configurations, key=place)


ON_CPU: Arms = {
    "off": ("off", None),
    "eagle small": ("fixed", Strategy("eagle", 3, 2, 4)),
    "eagle medium": ("fixed", Strategy("eagle", 7, 4, 16)),
    "eagle large": ("fixed", Strategy("eagle", 10, 6, 48)),
    "history": ("fixed", Strategy("history", 8, 3, 12)),
    "beg": ("beg", None),
    "goodput": ("goodput", None),
}
ON_GPU: Arms = {
    "off": ("off", None),
    "eagle chain": ("fixed", Strategy("eagle", 7, 1, 8)),
    "eagle tree": ("fixed", Strategy("eagle", 7, 4, 32)),
    "eagle large": ("fixed", Strategy("eagle", 10, 8, 64)),
    "history": ("fixed", Strategy("history", 12, 2, 16)),
    "beg": ("beg", None),
    "goodput": ("goodput", None),
}
PLANS = {
    "cpu": Plan(
        ON_CPU,
        {
            "arm": tuple(ON_CPU),
            "batch": (1, 7, 64),
            "pages": ("ample", "scarce"),
            "chunk": (16, 512),
        },
        {"arm": "off", "batch": 64, "pages": "ample", "chunk": 512},
        ExactSize(512, 256, 16, 2000, 32),
        ExactSize(48, 48, 2, 256, 6),
        0,
        "off",
    ),
    # The smaller chunk leaves 16 prompt rows next to a full batch; the full size takes minutes
    # for a 7B model.
    "cuda": Plan(
        ON_GPU,
        {
            "arm": tuple(ON_GPU),
            "batch": (1, 7, 64),
            "pages": ("ample", "scarce"),
            "chunk": (80, 1024),
        },
        {"arm": "off", "batch": 64, "pages": "ample", "chunk": 1024},
        ExactSize(192, 128, 4, 600, 12),
        ExactSize(48, 48, 2, 256, 6),
        2048,
        "goodput",
    ),
}
PLANS["interpreter"] = PLANS["cuda"]


SCHEMA = Grammar(
    kind="json_schema",
    text='{"type":"object","properties":{"steps":{"type":"array","items":{"type":"integer"}},'
    '"answer":{"type":"string"}},"required":["steps","answer"],"additionalProperties":false}',
)
LINES = Grammar(kind="lark", text='start: line+\nline: /[0-9+*() -]{1,12}/ "=" /[0-9]{1,4}/ "\\n"')
WORDS = Grammar(kind="regex", text="([a-z]{2,8}[ ,.]){3,60}")
# The requests take these in turn. They are eleven, so that long requests are of different kinds.
KINDS: tuple[dict[str, object], ...] = (
    {},
    {"repetition_penalty": 1.05, "presence_penalty": 0.1},
    {"prompt_logprobs": 0},
    {"allowed_token_ids": tuple(range(40)), "bad_words": ((7,), (5, 6))},
    {"frequency_penalty": 0.2, "temperature": 0.0, "bad_words": ((5,), (9,))},
    {"logit_bias": dict.fromkeys(range(8), 0.5), "min_tokens": 24},
    {"presence_penalty": -0.3, "top_p": 0.95, "min_tokens": 12, "prompt_logprobs": 2},
    {"structured_outputs": SCHEMA, "ignore_eos": False},
    {"structured_outputs": LINES, "ignore_eos": False, "temperature": 0.0},
    {"structured_outputs": WORDS, "ignore_eos": False, "top_p": 0.9, "presence_penalty": 0.2},
    {"structured_outputs": WORDS, "ignore_eos": False, "prompt_logprobs": 1},
)


ADAPTERS = ("", "one", "two")  # names of LoRA adapters, likewise; empty: none


def with_length(request: GenerateRequest, i: int, size: ExactSize) -> GenerateRequest:
    """Return the request. One in requests / long generates all of `long_tokens`, so that long ones
    run together and exhaust the pages.
    """
    is_long = i % (size.requests // size.long) == 0
    changed = msgspec.structs.replace(
        request.sampling,
        max_tokens=size.long_tokens if is_long else size.max_tokens,
        ignore_eos=is_long,
    )
    return msgspec.structs.replace(request, sampling=changed)


def varied(request: GenerateRequest, i: int, *, adapters: bool = True) -> GenerateRequest:
    """Return the request with the logit edits, scores and adapter of its turn."""
    changed = msgspec.structs.replace(request.sampling, **KINDS[i % len(KINDS)])
    return msgspec.structs.replace(
        request, sampling=changed, lora=ADAPTERS[i % len(ADAPTERS)] if adapters else ""
    )


def pages_for(
    configuration: Configuration, requests: list[GenerateRequest], size: ExactSize, page_size: int
) -> int | None:
    """Return the number of pages. Ample: None, the engine's own choice. Scarce: the longest request
    fits, but those that may run at once do not.
    """
    if configuration["pages"] == "ample":
        return None
    longest = -(-max(len(r.token_ids) + r.sampling.max_tokens for r in requests) // page_size)
    usual = -(-(max(len(r.token_ids) for r in requests) + size.max_tokens // 4) // page_size)
    at_once = min(len(requests), int(str(configuration["batch"])))
    return max(longest, usual * at_once // 5)


def pairs(configuration: Mapping[str, object]) -> set[tuple[tuple[str, object], ...]]:
    """Return every pair of (factor, level) in one configuration."""
    return set(itertools.combinations(configuration.items(), 2))


def covering_array(factors: Mapping[str, Sequence[object]], seed: int) -> list[Configuration]:
    """Cover all pairs greedily and seeded: take, of 50 random configurations, the one that covers
    most uncovered pairs, until none is left.
    """
    draw = random.Random(seed)
    levels = [[(name, level) for level in choices] for name, choices in factors.items()]
    missing = {
        pair
        for one, other in itertools.combinations(levels, 2)
        for pair in itertools.product(one, other)
    }
    chosen: list[Configuration] = []
    while missing:
        must = dict(draw.choice(sorted(missing, key=repr)))
        tries = [
            {name: must.get(name, draw.choice(list(choices))) for name, choices in factors.items()}
            for _ in range(50)
        ]
        best = max(tries, key=lambda configuration: len(pairs(configuration) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen
