"""The demo task is reproducible, its rewards are right, and its lengths have a tail."""

import ast
import operator
from random import Random

import pytest

from tlt_server.demo import task
from tlt_server.demo.expressions import parse, render

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


def python_value(text: str) -> int:
    def walk(node):
        return (
            node.value
            if isinstance(node, ast.Constant)
            else OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        )

    return walk(ast.parse(text, mode="eval").body)


def test_a_seed_gives_the_same_problem_and_the_splits_are_disjoint():
    assert task.problem(7) == task.problem(7)
    assert task.EVAL_SEEDS.stop <= task.TRAIN_SEEDS.start
    assert {task.problem(seed).kind for seed in range(50)} == {"expression", "column", "countdown"}


def test_answers_agree_with_python():
    for seed in range(300):
        problem = task.problem(seed)
        if problem.kind != "countdown":
            assert problem.answer == str(python_value(problem.body))
            assert task.reward(problem, f"anything\nanswer: {problem.answer}") == 1.0
            assert task.reward(problem, f"anything\nanswer: {problem.answer}1") == 0.0


def test_rendering_and_parsing_are_inverse():
    for seed in range(300):
        problem = task.problem(seed)
        if problem.kind == "expression":
            assert render(parse(problem.body)) == problem.body


def test_writers_solve_a_part_and_their_claims_hold():
    rewards = {"expression": [], "column": [], "countdown": []}
    for seed in range(400):
        problem = task.problem(seed)
        rewards[problem.kind].append(task.reward(problem, task.solution(problem, Random(seed))))
    for kind, values in rewards.items():
        assert 0.4 < sum(values) / len(values) < 0.95, kind


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("3*4+2", 1.0),
        ("2+4*3", 1.0),
        ("3*4+2+2", 0.0),
        ("14", 0.0),
        ("4*4-2", 0.0),
        ("none", 0.0),
        ("(3*4", 0.0),
        ("3/0*4+2", 0.0),
    ],
)
def test_countdown_answers_use_every_number_once(given, expected):
    problem = task.Exercise("Use 3,4,2 to make 14.", "14", "countdown", 3.0, "3,4,2")
    assert task.reward(problem, f"try\nanswer: {given}") == expected


def test_only_the_last_answer_counts():
    problem = task.Exercise("What is 2+3?", "5", "expression", 1.0, "2+3")
    assert task.reward(problem, "answer: 6\nanswer: 5<|im_end|>") == 1.0
    assert task.reward(problem, "answer: 5\nanswer: 6") == 0.0
    assert task.reward(problem, "5") == 0.0


@pytest.mark.parametrize("text", ["1+", "a", "(1", "1)", "2**3", "1 + 2", "9" * 300])
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ValueError):
        parse(text)


def test_written_lengths_have_a_heavy_tail():
    lengths = sorted(len(task.solution(task.problem(seed), Random(seed))) for seed in range(2_000))
    assert lengths[1980] >= 10 * lengths[1000]
