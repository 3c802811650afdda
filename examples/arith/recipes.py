"""Recipes of training text: the wording of a written solution to a problem of the task.

`demo` is the task's own text. `hard` is the same work by writers who wander: they add remarks and
vary their words, and each writer has favourites, so the next token stays uncertain however long a
model is trained. These choices are worth 0.46 nats per token, those of the task itself 0.12.
Prompts and answers are the same in both, and the shipped tokenizer knows every word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from random import Random

from tlt_server.demo import task

REMARK_CHANCE = 0.6  # after each line of work
# A remark's slots in order: the chance that it is there, and its words.
SLOTS = {
    "opening": (1.0, "so now then first no yes that one"),
    "verb": (1.0, "try make keep do write put note give search stop"),
    "article": (0.6, "the some one it me not"),
    "kind": (0.7, "small big right left final first far"),
    "noun": (1.0, "digit step way column hand answer work carry"),
    "place": (0.5, "here now then out up inside carefully so"),
}
# The text that a choice replaces, and the choices.
REWORDINGS = {
    "link": (
        r", (?:leaving |so now )?(?=[\d(])| gives (?=[\d(])",
        (", leaving ", ", so now ", " gives ", ", then ", " so ", ", ", " now "),
    ),
    "equals": (r"=", ("=", " is ", " gives ")),
    "written": (
        r", (?:write|put|note) ",
        (", write ", ", put ", ", note ", " so give ", ", keep ", " now make "),
    ),
    "carried": (r", (?:carry|keep) ", (", carry ", ", keep ", " then note ", " so add ")),
    "against": (r" vs ", (" vs ", " not ", ", make ", " with ")),
    "missed": (
        r", (?:no|not it)(?=\.)",
        (", no", ", not it", " so not right", ", no way", ", too far", " so stop here"),
    ),
}
REWORDED = re.compile("|".join(f"(?P<{name}>{old})" for name, (old, _) in REWORDINGS.items()))
CHOICES = {name: words.split() for name, (_, words) in SLOTS.items()} | {
    name: list(new) for name, (_, new) in REWORDINGS.items()
}


class Writer:
    """One writer: weights of the choices in every group, drawn for this text. `nats`: minus the sum
    of the log-probabilities of its choices, given the weights.
    """

    def __init__(self, rng: Random) -> None:
        self.rng, self.nats = rng, 0.0
        self.weights = {
            name: [rng.gammavariate(1.5, 1) for _ in words] for name, words in CHOICES.items()
        }

    def happens(self, chance: float) -> bool:
        yes = self.rng.random() < chance
        self.nats -= math.log(chance if yes else 1 - chance)
        return yes

    def choose(self, group: str) -> str:
        weights = self.weights[group]
        index = self.rng.choices(range(len(weights)), weights)[0]
        self.nats -= math.log(weights[index] / sum(weights))
        return CHOICES[group][index]

    def remark(self) -> str:
        slots = [name for name, (chance, _) in SLOTS.items() if chance == 1 or self.happens(chance)]
        return " ".join(self.choose(name) for name in slots) + "."

    def reworded(self, line: str) -> str:
        return REWORDED.sub(lambda found: self.choose(str(found.lastgroup)), line)


def wandering(solution: str, writer: Writer) -> str:
    """Reword each line of work and add remarks after some; the last line, the answer, stays."""
    *work, answer = solution.split("\n")
    lines = []
    for line in work:
        lines.append(writer.reworded(line))
        if writer.happens(REMARK_CHANCE):
            lines.append(writer.remark())
    return "\n".join([*lines, answer])


RECIPES: dict[str, Callable[[task.Exercise, Random], str]] = {
    "demo": task.solution,
    "hard": lambda problem, rng: wandering(task.solution(problem, rng), Writer(rng)),
}
