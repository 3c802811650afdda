"""The demo's rounds: the same seeded batch under one policy after another, posted over HTTP and
streamed back.

Each round has its own salt, so no round profits from an earlier one's KV or text, and every policy
starts without experience.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tlt_client import Client, ItemResult, ServerError
from tlt_client.wire import Choice, Token
from tlt_server.demo.task import EVAL_SEEDS, Exercise, problem, reward

# Evaluation problem of seed 0: one of the four from here on takes long, as in a reasoning rollout.
FIRST = 439
LOOK_S = 0.25  # between two looks at the server's metrics


class Round(NamedTuple):
    name: str
    policy: str
    strategy: str | None = None
    needs: str = ""  # drafter


ROUNDS = (
    Round("off", "off"),
    Round("eagle", "fixed", "eagle:7x4x16", "eagle"),
    Round("history", "fixed", "history:8x2x9", "history"),
    Round("goodput", "goodput"),
)


class DemoSize(NamedTuple):
    problems: int
    responses: int  # per problem
    max_tokens: int


FULL = DemoSize(8, 8, 2000)
QUICK = DemoSize(4, 6, 400)


class DemoEngine(NamedTuple):
    """The server's metrics at one moment."""

    running: int
    open: int  # running or waiting
    strategy: str
    accept_length: float  # last step's; 0 without drafts
    passes: int  # target forward passes since start


class Moment(NamedTuple):
    """The state of a round while it runs."""

    tokens: int
    seconds: float
    engine: DemoEngine


class RoundOutcome(NamedTuple):
    """The result of a round; `choices[i]` are the responses to problem i."""

    round: Round
    choices: list[list[Choice]]
    seconds: float
    passes: int
    rewards: list[float]

    @property
    def lengths(self) -> list[int]:
        return sorted(len(choice.token_ids) for choices in self.choices for choice in choices)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def accept_length(self) -> float | None:
        """Tokens per request and pass that had a draft, the bonus token included."""
        drafting = [
            choice.sd
            for choices in self.choices
            for choice in choices
            if choice.sd.mean_accept_length is not None
        ]
        steps = sum(sd.draft_steps for sd in drafting)
        return (
            sum((sd.mean_accept_length or 0.0) * sd.draft_steps for sd in drafting) / steps
            if steps
            else None
        )

    def differing(self, reference: RoundOutcome) -> int:
        """Responses that differ from the reference's in any token."""
        return sum(
            mine.token_ids != theirs.token_ids
            for ours, others in zip(self.choices, reference.choices, strict=True)
            for mine, theirs in zip(ours, others, strict=True)
        )


def chosen_problems(size: DemoSize, seed: int) -> list[Exercise]:
    return [problem(EVAL_SEEDS[(FIRST + seed + i) % len(EVAL_SEEDS)]) for i in range(size.problems)]


def batch(
    problems: Sequence[Exercise], size: DemoSize, seed: int, salt: str
) -> list[dict[str, Any]]:
    """Return the items of a round; only rounds of one salt share cached prefixes and texts."""
    return [
        {
            "id": str(i),
            "messages": [{"role": "user", "content": task.prompt_text}],
            "n": size.responses,
            "seed": seed + i,
            "salt": salt,
        }
        for i, task in enumerate(problems)
    ]


def play(
    client: Client,
    turn: Round,
    problems: Sequence[Exercise],
    size: DemoSize,
    seed: int,
    show: Callable[[Moment], None],
) -> RoundOutcome:
    """Set the policy, post the batch, stream it to its end."""
    client.set_strategy(turn.policy, turn.strategy)
    items = batch(problems, size, seed, turn.name)
    choices: dict[int, list[Choice]] = {}
    tokens, before, started = 0, look(client), time.perf_counter()
    looked = started
    for event in client.stream(items, sampling={"max_tokens": size.max_tokens}):
        if isinstance(event, Token):
            tokens += len(event.token_ids)
        elif isinstance(event, ItemResult):
            if event.error is not None:
                raise ServerError(
                    event.error.code, f"problem {event.id}: {event.error.message}", status=500
                )
            choices[int(event.id)] = event.choices
        now = time.perf_counter()
        if now - looked >= LOOK_S:
            looked = now
            show(Moment(tokens, now - started, look(client)))
    seconds = time.perf_counter() - started
    found = [choices[i] for i in range(len(problems))]
    rewards = [
        reward(task, choice.text or "")
        for task, group in zip(problems, found, strict=True)
        for choice in group
    ]
    return RoundOutcome(turn, found, seconds, look(client).passes - before.passes, rewards)


def look(client: Client) -> DemoEngine:
    values = {
        (sample.name, sample.labels.get("strategy", "")): sample.value
        for family in text_string_to_metric_families(client.metrics())
        for sample in family.samples
    }
    strategy = next(
        (
            label
            for (name, label), value in values.items()
            if name == "tlt_strategy_in_force" and value
        ),
        "",
    )
    return DemoEngine(
        running=int(values.get(("tlt_running_sequences", ""), 0)),
        open=int(values[("tlt_open_sequences", "")]),
        strategy=strategy,
        accept_length=values.get(("tlt_accept_length", strategy), 0.0)
        if strategy != "off"
        else 0.0,
        passes=int(sum(value for (name, _), value in values.items() if name == "tlt_cycles_total")),
    )
