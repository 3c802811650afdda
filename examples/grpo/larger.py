"""Problems of the task's kinds with larger numbers than any that the demo pair was trained on, so
that a run can bring what its drafter never saw.

`expression`: numbers of three digits and values up to 9,999 (the task's: two digits, 999);
`column`: sums of 15 to 18 digits (at most 14), products by 5 digits (at most 4); `countdown`:
numbers from 13 to 40 (at most 12). Everything follows from the problem's number.
"""

from __future__ import annotations

from random import Random

from tlt_server.demo.expressions import Tree, apply, render
from tlt_server.demo.task import Exercise

LARGEST_VALUE, LARGEST_FACTOR = 9_999, 30


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
