"""One step's rollout: problems of the demo's task, posted in groups of seeded choices and judged by
the task's checker.

A response is fixed by weights, prompt and seed, so a run's seed decides every token of it.
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
from tlt_server.demo.task import TRAIN_SEEDS, Exercise, problem, reward

KINDS = ("expression", "column", "countdown")


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
    """Draw a step's training problems of these kinds."""
    draw = Random(f"grpo {seed} {step}")
    prompts = []
    while len(prompts) < count:
        number = draw.choice(TRAIN_SEEDS)
        exercise = problem(number)
        if exercise.kind in kinds:
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
