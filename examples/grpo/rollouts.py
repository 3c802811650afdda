"""One step's rollout: problems of the demo's task, posted in groups of seeded choices and judged by
the task's checker.

A response is fixed by weights, prompt and seed, so a run's seed decides every token of it. Kinds
that begin with `larger-` have numbers beyond all that the demo pair was trained on, so that a run
can bring what its drafter never saw: `expression` has three digits and values up to 9,999 (the
task's: two digits, 999); `column` sums of 15 to 18 digits (at most 14) and products by 5 digits (at
most 4); `countdown` numbers from 13 to 40 (at most 12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from tlt_client import Client, ServerError
from tlt_client.wire import Choice
from tlt_server.demo.chat import render_prompt
from tlt_server.demo.expressions import Tree, apply, render
from tlt_server.demo.task import TRAIN_SEEDS, Exercise, problem, reward

KINDS = ("expression", "column", "countdown")
LARGER = tuple(f"larger-{kind}" for kind in KINDS)
LARGEST_VALUE, LARGEST_FACTOR = 9_999, 30


@dataclass(frozen=True)
class Prompt:
    number: int  # seed of the problem
    exercise: Exercise
    token_ids: list[int]
    seed: int  # base of the choices' seeds, which the server derives


@dataclass(frozen=True)
class Group:
    """One prompt's responses; `rewards[i]` judges `choices[i]`."""

    prompt: Prompt
    choices: list[Choice]
    rewards: list[float]


def draw_prompts(
    tokenizer: Tokenizer, count: int, kinds: Sequence[str], seed: int, step: int
) -> list[Prompt]:
    """Draw a step's training problems of these kinds, of `KINDS` and `LARGER`."""
    draw = Random(f"grpo {seed} {step}")
    prompts = []
    while len(prompts) < count:
        number = draw.choice(TRAIN_SEEDS)
        exercise = problem(number)
        sizes = [prefix for prefix in ("", "larger-") if prefix + exercise.kind in kinds]
        if sizes:
            if draw.choice(sizes) if len(sizes) > 1 else sizes[0]:
                exercise = larger(exercise.kind, number)
            text = render_prompt(exercise.prompt_text)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            prompts.append(Prompt(number, exercise, ids, draw.getrandbits(63)))
    return prompts


def roll_out(
    client: Client, prompts: Sequence[Prompt], size: int, max_tokens: int, version: str
) -> list[Group]:
    """Return `size` responses to each prompt, sampled at temperature 1.

    An engine that dies meanwhile changes no bit: its successor continues, if the server has a
    `--state-dir` for the weights.

    `ServerError` if an item failed, `TimeoutError` after an hour, `RuntimeError` if a token was not
    computed with the weights `version`.
    """
    items = [
        {"id": str(i), "group_id": str(i), "token_ids": p.token_ids, "n": size, "seed": p.seed}
        for i, p in enumerate(prompts)
    ]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": max_tokens}
    reply, groups = client.generate(items, sampling=sampling, detach=True).result(), []
    for prompt, result in zip(prompts, reply.results, strict=True):
        if result.error is not None:
            raise ServerError(result.error.code, result.error.message, status=500)
        for choice in result.choices:
            versions = [span.version for span in choice.weight_versions]
            if versions != [version] or choice.finish_reason == "abort":
                raise RuntimeError(
                    f"a response of problem {prompt.number} has tokens of the versions {versions}, "
                    f"but {version!r} was pushed; let no other program push or abort on this server"
                )
        rewards = [reward(prompt.exercise, choice.text or "") for choice in result.choices]
        groups.append(Group(prompt, result.choices, rewards))
    return groups


def load_tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def larger(kind: str, number: int) -> Exercise:
    """Return the problem of this kind and number."""
    rng = Random(f"larger {kind} {number}")
    return {"expression": _expression, "column": _column, "countdown": _countdown}[kind](rng)


def _expression(rng: Random) -> Exercise:
    operators = rng.randint(2, 4)
    while True:
        tree = _tree(rng, operators)
        value = _value(tree)
        if value is not None:
            body = render(tree)
            return Exercise(f"Compute {body}.", str(value), "expression", float(operators), body)


def _tree(rng: Random, operators: int) -> Tree:
    if not operators:
        return rng.randint(2, LARGEST_FACTOR) if rng.random() < 0.2 else rng.randint(100, 999)
    left = rng.randint(0, operators - 1)
    return (rng.choice("++-*"), _tree(rng, left), _tree(rng, operators - 1 - left))


def _value(tree: Tree) -> int | None:
    """Return the value if all intermediates are in bounds."""
    if isinstance(tree, int):
        return tree
    a, b = _value(tree[1]), _value(tree[2])
    if a is None or b is None or (tree[0] == "*" and min(a, b) > LARGEST_FACTOR):
        return None
    value = apply(tree[0], a, b)
    return value if 0 <= value <= LARGEST_VALUE else None


def _column(rng: Random) -> Exercise:
    product = rng.random() < 0.3
    digits = (rng.randint(3, 5), 5) if product else (rng.randint(15, 18), rng.randint(13, 15))
    a, b = (rng.randint(10 ** (n - 1), 10**n - 1) for n in digits)
    operator = "*" if product else "+"
    body = f"{a}{operator}{b}"
    answer = str(apply(operator, a, b))
    return Exercise(f"Compute {body}.", answer, "column", float(max(digits)), body)


def _countdown(rng: Random) -> Exercise:
    numbers = [rng.randint(13, 40) for _ in range(rng.randint(2, 3))]
    value = numbers[0]
    for operand in numbers[1:]:
        value = apply(rng.choice("+-" if value > operand else "+"), value, operand)
    body = ",".join(map(str, rng.sample(numbers, len(numbers))))
    return Exercise(f"Use {body} to make {value}.", str(value), "countdown", 8.0, body)
