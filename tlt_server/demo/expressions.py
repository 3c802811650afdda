"""Arithmetic expressions of the demo task: parsed, computed in integers, and written with the
fewest parentheses.
"""

from __future__ import annotations

import re

Tree = int | tuple

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


def parse(text: str) -> Tree:
    """Parse + - * / with parentheses; ValueError on anything else (at most 200 characters)."""
    if len(text) > 200 or not re.fullmatch(r"[\d+\-*/()]+", text):
        raise ValueError(f"not an arithmetic expression: {text[:40]!r}")
    tokens = re.findall(r"\d+|[+\-*/()]", text)

    def climb(position: int, lowest: int) -> tuple[Tree, int]:
        if position >= len(tokens):
            raise ValueError("expression ends early")
        if tokens[position] == "(":
            left, position = climb(position + 1, 1)
            if position >= len(tokens) or tokens[position] != ")":
                raise ValueError("unbalanced parenthesis")
            position += 1
        elif tokens[position].isdigit():
            left, position = int(tokens[position]), position + 1
        else:
            raise ValueError(f"unexpected {tokens[position]!r}")
        while position < len(tokens) and PRECEDENCE.get(tokens[position], 0) >= lowest:
            operator = tokens[position]
            right, position = climb(position + 1, PRECEDENCE[operator] + 1)
            left = (operator, left, right)
        return left, position

    tree, end = climb(0, 1)
    if end != len(tokens):
        raise ValueError("trailing text after the expression")
    return tree


def evaluate(tree: Tree) -> int:
    """Return the integer value; ValueError if a division is not exact."""
    return tree if isinstance(tree, int) else apply(tree[0], evaluate(tree[1]), evaluate(tree[2]))


def render(tree: Tree) -> str:
    """Return the shortest text that `parse` reads back as the same tree."""
    if isinstance(tree, int):
        return str(tree)
    operator, left, right = tree
    left_text, right_text = render(left), render(right)
    if not isinstance(left, int) and PRECEDENCE[left[0]] < PRECEDENCE[operator]:
        left_text = f"({left_text})"
    if not isinstance(right, int) and PRECEDENCE[right[0]] <= PRECEDENCE[operator]:
        right_text = f"({right_text})"
    return f"{left_text}{operator}{right_text}"


def apply(operator: str, a: int, b: int) -> int:
    if operator == "/":
        if b == 0 or a % b:
            raise ValueError("inexact division")
        return a // b
    return a + b if operator == "+" else a - b if operator == "-" else a * b
