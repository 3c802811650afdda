"""The demo task: arithmetic with a written-out chain of thought and an answer that can be checked.

Three kinds of problem: `expression` (reduce step by step), `column` (column addition and long
multiplication), `countdown` (make a number from all of the given ones, written as a search of
tries). Difficulty is heavy-tailed, so response lengths have the long tail of reasoning RL.
`solution` imitates a crowd of writers: phrasing and order vary, and some writers are hasty (left to
right, forgotten carries, giving up), so a model of the crowd solves part of the problems and
reinforcement learning has something to find. No torch; everything follows from the seed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from random import Random

from tlt_server.demo.expressions import Tree, apply, evaluate, parse, render

EVAL_SEEDS = range(0, 100_000)
TRAIN_SEEDS = range(1_000_000, 1_000_000_000)
RESPONSE_TOKEN_CAP = 2_560

HASTY_SHARE = 0.5
GIVE_UP_PER_TRY = 0.018


@dataclass(frozen=True)
class Exercise:
    """One task. `body` is the expression, or the countdown numbers separated by commas;
    `difficulty` counts expected steps or tries.
    """

    prompt_text: str
    answer: str
    kind: str
    difficulty: float
    body: str


def problem(seed: int) -> Exercise:
    """Return the problem of this seed; the same on every machine and Python version from 3.11."""
    rng = Random(f"arith-{seed}")
    kind = rng.choices(("expression", "column", "countdown"), (46, 30, 24))[0]
    return {
        "expression": _expression_problem,
        "column": _column_problem,
        "countdown": _countdown_problem,
    }[kind](rng)


def solution(task: Exercise, rng: Random) -> str:
    """A written chain of thought by one random writer, ending in `answer: ...`; not always right
    (see the module docstring).
    """
    return {
        "expression": _solve_expression,
        "column": _solve_column,
        "countdown": _solve_countdown,
    }[task.kind](task, rng)


def reward(task: Exercise, response_text: str) -> float:
    """Return 1.0 if the last `answer:` line is right, else 0.0. A countdown answer is an expression
    that uses every number once.
    """
    found = re.findall(r"answer:[ ]*([^\n<]*)", response_text)
    if not found:
        return 0.0
    given = found[-1].strip().rstrip(".")
    if task.kind != "countdown":
        return float(given == task.answer)
    try:
        value = evaluate(parse(given))
    except (ValueError, ZeroDivisionError):
        return 0.0
    used = sorted(re.findall(r"\d+", given))
    return float(value == int(task.answer) and used == sorted(task.body.split(",")))


# A tree is an int, or (operator, left, right).
def _say(rng: Random, *choices: str) -> str:
    """Return one phrasing; earlier ones are more common."""
    return rng.choices(choices, [1 / (i + 1) for i in range(len(choices))])[0]


def _expression_problem(rng: Random) -> Exercise:
    operators = min(2 + int(rng.paretovariate(1.5)), 9)
    while True:
        tree = _random_tree(rng, operators)
        value = _bounded_value(tree)
        if value is not None:
            break
    body = render(tree)
    text = _say(rng, "Compute {}.", "What is {}?", "Work out {}.", "Evaluate {}.").format(body)
    return Exercise(text, str(value), "expression", float(operators), body)


def _random_tree(rng: Random, operators: int) -> Tree:
    if operators == 0:
        return rng.randint(2, 99) if rng.random() < 0.5 else rng.randint(2, 12)
    left = rng.randint(0, operators - 1)
    return (rng.choice("++-**"), _random_tree(rng, left), _random_tree(rng, operators - 1 - left))


def _bounded_value(tree: Tree) -> int | None:
    """Return the value if all intermediates lie in 0..999 and products have a factor up to 12."""
    if isinstance(tree, int):
        return tree
    a, b = _bounded_value(tree[1]), _bounded_value(tree[2])
    if a is None or b is None or (tree[0] == "*" and min(a, b) > 12):
        return None
    value = apply(tree[0], a, b)
    return value if 0 <= value <= 999 else None


def _reducible(tree: Tree, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if isinstance(tree, int):
        return []
    if isinstance(tree[1], int) and isinstance(tree[2], int):
        return [path]
    return _reducible(tree[1], (*path, 1)) + _reducible(tree[2], (*path, 2))


def _reduce_at(tree: Tree, path: tuple[int, ...]) -> tuple[Tree, Tree]:
    """Return the tree with the node at `path` replaced by its value, and that node."""
    if not path:
        return evaluate(tree), tree
    assert not isinstance(tree, int)
    child, node = _reduce_at(tree[path[0]], path[1:])
    return (*tree[: path[0]], child, *tree[path[0] + 1 :]), node


def _solve_expression(task: Exercise, rng: Random) -> str:
    if rng.random() < HASTY_SHARE:
        hasty = _left_to_right(task.body, rng)
        if hasty:
            return hasty
    tree = parse(task.body)
    lines = [
        _say(
            rng,
            "Step by step.",
            "I will do it carefully.",
            "Let me work inside out.",
            "Brackets first, then products.",
        )
    ]
    link = _say(rng, ", leaving ", ", so now ", " gives ")
    while not isinstance(tree, int):
        options = _reducible(tree)
        path = options[0] if rng.random() < 0.7 else rng.choice(options)
        tree, node = _reduce_at(tree, path)
        opening = _say(rng, "", "first ", "then ") if len(lines) > 1 else _say(rng, "", "first ")
        lines.append(f"{opening}{render(node)}={evaluate(node)}{link}{render(tree)}.")
    return "\n".join([*lines, _closing(rng) + str(tree)])


def _left_to_right(body: str, rng: Random) -> str | None:
    """Solve hastily, without precedence or brackets. None if a value would leave 0..2000."""
    pieces = re.findall(r"\d+|[+\-*]", body)
    value = int(pieces[0])
    lines = [_say(rng, "Quick: left to right.", "Just go left to right.", "In one go.")]
    for operator, operand in zip(pieces[1::2], pieces[2::2], strict=True):
        result = apply(operator, value, int(operand))
        if not 0 <= result <= 2000:
            return None
        lines.append(f"{_say(rng, '', 'then ')}{value}{operator}{operand}={result}.")
        value = result
    return "\n".join([*lines, f"{_closing(rng)}{value}"])


def _closing(rng: Random) -> str:
    return _say(rng, "", "", "So the ", "That gives the ", "The final ") + "answer: "


def _column_problem(rng: Random) -> Exercise:
    if rng.random() < 0.7:
        digits = min(3 + int(rng.paretovariate(1.3)), 14)
        a, b = (
            rng.randint(10 ** (n - 1), 10**n - 1)
            for n in (digits, rng.randint(max(2, digits - 2), digits))
        )
        operator, steps = "+", float(digits)
    else:
        long, short = (
            min(2 + int(rng.paretovariate(1.4) - 0.2), 6),
            min(1 + int(rng.paretovariate(1.4) - 0.5), 4),
        )
        a, b = (rng.randint(10 ** (n - 1) + (n == 1), 10**n - 1) for n in (long, short))
        operator, steps = "*", float(long * short)
    body = f"{a}{operator}{b}"
    text = _say(rng, "Compute {}.", "What is {}?", "Work out {}.", "Do {} by hand.").format(body)
    return Exercise(text, str(apply(operator, a, b)), "column", steps, body)


@dataclass(frozen=True)
class _Hand:
    """One writer's habits in column work."""

    rng: Random
    write: str
    carry: str
    forgets: bool

    def digit(self, sum_text: str, total: int, last: bool) -> tuple[str, int]:
        """Return the line of one column, and the carry."""
        if last:
            return f"{sum_text}={total}, {self.write} {total}.", 0
        carry = total // 10
        said = f", {self.carry} {carry}" if carry or self.rng.random() < 0.6 else ", no carry"
        if self.forgets:
            said, carry = "", 0
        return f"{sum_text}={total}, {self.write} {total % 10}{said}.", carry


def _add(a: int, b: int, hand: _Hand, lines: list[str]) -> int:
    top, bottom = str(a)[::-1], str(b)[::-1]
    width, carry, written = max(len(top), len(bottom)), 0, ""
    for i in range(width):
        terms = [n[i] for n in (top, bottom) if i < len(n)]
        if carry:
            terms.append(str(carry))
        total = sum(map(int, terms))
        last = i == width - 1
        line, carry = hand.digit("+".join(terms), total, last)
        written = (str(total) if last else str(total % 10)) + written
        lines.append(line)
    return int(written)


def _times_digit(a: int, digit: int, hand: _Hand, lines: list[str]) -> int:
    carry, written = 0, ""
    for i, d in enumerate(reversed(str(a))):
        total = int(d) * digit + carry
        last = i == len(str(a)) - 1
        text = f"{d}*{digit}" + (f"+{carry}" if carry else "")
        line, carry = hand.digit(text, total, last)
        written = (str(total) if last else str(total % 10)) + written
        lines.append(line)
    return int(written)


def _solve_column(task: Exercise, rng: Random) -> str:
    hasty = rng.random() < HASTY_SHARE
    hand = _Hand(rng, _say(rng, "write", "put", "note"), _say(rng, "carry", "keep"), hasty)
    a, operator, b = re.split(r"([+*])", task.body)
    if hasty:
        lines = [_say(rng, "Quick: digit by digit.", "Just the digits.", "In one go.")]
    else:
        lines = [
            _say(
                rng, "Column by column.", "From the right, with carries.", "I will do it carefully."
            )
        ]
    if operator == "+":
        value = _add(int(a), int(b), hand, lines)
        return "\n".join([*lines, f"{_closing(rng)}{value}"])
    rows = []
    for shift, digit in enumerate(reversed(b)):
        if len(b) > 1:
            lines.append(_say(rng, "row ", "times ", "now ") + f"{digit}:")
        row = _times_digit(int(a), int(digit), hand, lines) * 10**shift
        if len(b) > 1:
            lines.append(f"{_say(rng, 'that is', 'row is')} {row}.")
        rows.append(row)
    value = rows[0]
    for row in rows[1:]:
        lines.append(f"{_say(rng, 'add', 'sum')} {value}+{row}:")
        value = _add(value, row, hand, lines)
        lines.append(f"{_say(rng, 'so far', 'total')} {value}.")
    return "\n".join([*lines, f"{_closing(rng)}{value}"])


def _options(value: int, operand: int) -> list[str]:
    """Return the operators that a writer considers after `value`, given the next number."""
    options = ["+", "*"]
    if value >= operand:
        options.append("-")
    if operand > 1 and value and value % operand == 0:
        options.append("/")
    return options


@lru_cache(maxsize=4096)
def _hit_chances(numbers: tuple[int, ...]) -> dict[int, float]:
    """Return P(one random try ends at v) for each reachable v: order uniform, each operator uniform
    among `_options`.
    """
    chances: dict[int, float] = {}
    orders = list(permutations(numbers))
    for order in orders:
        level = {order[0]: 1.0 / len(orders)}
        for operand in order[1:]:
            after: dict[int, float] = {}
            for value, chance in level.items():
                options = _options(value, operand)
                for operator in options:
                    result = apply(operator, value, operand)
                    after[result] = after.get(result, 0.0) + chance / len(options)
            level = after
        for value, chance in level.items():
            chances[value] = chances.get(value, 0.0) + chance
    return chances


def _countdown_problem(rng: Random) -> Exercise:
    count = rng.choices((2, 3, 4), (2, 6, 3))[0]
    wanted_tries = min(1.6 * rng.paretovariate(0.75), 70.0)
    numbers = tuple(rng.randint(1, 12) for _ in range(count))
    chances = {v: c for v, c in _hit_chances(numbers).items() if 1 <= v <= 400 and c >= 1 / 80}
    if not chances:
        return _countdown_problem(rng)
    near = sorted(chances, key=lambda v: (abs(chances[v] * wanted_tries - 1), v))[:3]
    target = rng.choice(near)
    body = ",".join(map(str, numbers))
    text = _say(rng, "Use {} to make {}.", "Make {1} from {0}.", "Reach {1} with {0}.")
    text = text.replace("{}", "{0}", 1).replace("{}", "{1}", 1).format(body, target)
    return Exercise(text, str(target), "countdown", 1 / chances[target], body)


def _solve_countdown(task: Exercise, rng: Random) -> str:
    numbers, target = [int(n) for n in task.body.split(",")], int(task.answer)
    verb = _say(rng, "try ", "test ", "")
    misses = rng.choices([["no"], ["no", "not it"], ["too big", "too small"]], (6, 3, 2))[0]
    lines = [_say(rng, "Let me search.", "Search by tries.", "I will try some ways.")]
    while True:
        order = rng.sample(numbers, len(numbers))
        value, steps = order[0], []
        tree: Tree = order[0]
        for operand in order[1:]:
            operator = rng.choice(_options(value, operand))
            result = apply(operator, value, operand)
            steps.append(f"{value}{operator}{operand}={result}")
            value, tree = result, (operator, tree, operand)
        attempt = verb + ", ".join(steps)
        if value == target:
            return "\n".join(
                [
                    *lines,
                    f"{attempt} vs {target}, {_say(rng, 'yes', 'found')}!",
                    f"{_closing(rng)}{render(tree)}",
                ]
            )
        said = misses[value < target] if misses[0] == "too big" else rng.choice(misses)
        lines.append(f"{attempt} vs {target}, {said}.")
        if rng.random() < GIVE_UP_PER_TRY:
            return "\n".join(
                [*lines, _say(rng, "I give up.", "Enough, I stop here."), f"{_closing(rng)}none"]
            )
