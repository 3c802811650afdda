"""The shipped pair: its files, its card, its tokenizer and template, its task, and its target
against Hugging Face's.
"""

import ast
import json
import operator
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import tlt_server
from tlt_server.demo import chat, task
from tlt_server.demo.expressions import parse, render
from tlt_server.speculation.calibration import Calibration

ROOT = Path(tlt_server.__file__).parent
PAIR = ROOT / "demo" / "pair"
HARD = ROOT.parent / "benchmarks" / "pairs" / "hard"
EXAMPLES = ROOT.parent / "examples" / "arith"


@pytest.fixture
def recipe(monkeypatch):
    """Make the recipe's modules importable as the scripts import them."""
    if not EXAMPLES.exists():
        pytest.skip("the recipe lies in the repository only, not in an installed package")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name, module in list(sys.modules.items()):
        if EXAMPLES == Path(getattr(module, "__file__", None) or "").parent:
            del sys.modules[name]


def test_demo_pair_is_small_and_has_the_published_tensor_names():
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= 16 * 2**20
    state = load_file(PAIR / "drafter" / "model.safetensors")
    config = json.loads((PAIR / "drafter" / "config.json").read_text())
    assert state["fc.weight"].shape == (256, 768)
    assert state["midlayer.self_attn.q_proj.weight"].shape == (256, 512)
    kept = state["d2t"] + torch.arange(config["draft_vocab_size"])
    assert state["t2d"].nonzero()[:, 0].equal(kept) and len(state["lm_head.weight"]) == len(kept)
    assert not any("bias" in name or "embed" in name for name in state)


def test_demo_calibration_is_a_table_of_probabilities():
    table = Calibration.load(PAIR / "drafter")
    assert table.source != "default" and ((table.acceptance > 0) & (table.acceptance < 1)).all()
    assert (table.acceptance[:, 0, -1] > table.acceptance[:, 0, 0]).all()


@pytest.mark.parametrize("pair", [PAIR, HARD], ids=["demo", "hard"])
def test_model_card_is_written_from_the_figures(recipe, pair):
    if not pair.exists():
        pytest.skip("the hard pair lies in the repository only")
    import card

    figures = json.loads((pair / "figures.json").read_text())
    assert card.model_card(figures) == (pair / "README.md").read_text()


TARGET = Path(tlt_server.__file__).parent / "demo" / "pair" / "target"
ALPHABETS = (
    "0123456789",
    "abcXYZ'",
    " \t\n\r",
    "+-*/=().,:!?",
    "éßñ\u00e9e\u0301",
    "漢字かな",
    "\U0001f600\u200d\u00a0",
    "٣४Ⅷ½",
)


@pytest.fixture(scope="module")
def raw() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@pytest.fixture(scope="module")
def auto():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


def generated_strings(count: int) -> list[str]:
    rng = Random(0)
    mixed = [
        "".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(rng.randint(0, 40)))
        for _ in range(count // 2)
    ]
    solved = [task.solution(task.problem(seed), Random(seed)) for seed in range(count - len(mixed))]
    return mixed + solved


@pytest.mark.slow
def test_auto_tokenizer_gives_the_ids_of_the_file(raw, auto):
    for text in generated_strings(1_000):
        assert auto(text, add_special_tokens=False)["input_ids"] == raw.encode(text).ids, repr(text)


def test_tokenizer_makes_each_digit_one_token(raw):
    assert raw.encode("1234567890").tokens == list("1234567890")


def test_decoding_gives_the_normalised_text_back(raw, auto):
    for text in generated_strings(200)[100:]:
        assert auto.decode(raw.encode(text).ids) == text


def test_chat_template_equals_the_training_format(raw, auto):
    message = [{"role": "user", "content": "What is 2+3?"}]
    assert auto.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
    ) == chat.render_prompt("What is 2+3?")
    assert auto.eos_token == chat.END and auto.pad_token == chat.PAD


def test_special_tokens_have_the_last_ids(raw):
    assert [raw.token_to_id(token) for token in chat.SPECIALS] == [509, 510, 511]
    assert raw.get_vocab_size() == 512


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


def test_problem_is_seeded_and_splits_are_disjoint():
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


def test_task_writers_solve_a_part_of_the_problems():
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


def test_only_the_last_answer_of_a_text_is_rewarded():
    problem = task.Exercise("What is 2+3?", "5", "expression", 1.0, "2+3")
    assert task.reward(problem, "answer: 6\nanswer: 5<|im_end|>") == 1.0
    assert task.reward(problem, "answer: 5\nanswer: 6") == 0.0
    assert task.reward(problem, "5") == 0.0


@pytest.mark.parametrize("text", ["1+", "a", "(1", "1)", "2**3", "1 + 2", "9" * 300])
def test_malformed_expression_is_refused(text):
    with pytest.raises(ValueError):
        parse(text)


def test_written_lengths_have_a_heavy_tail():
    lengths = sorted(len(task.solution(task.problem(seed), Random(seed))) for seed in range(2_000))
    assert lengths[1980] >= 10 * lengths[1000]
