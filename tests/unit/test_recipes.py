"""The hard recipe keeps prompts and answers, knows no words that the tokenizer lacks, and is as
unpredictable as it says.
"""

import json
import sys
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

import tlt_server
from tlt_server.demo import task
from tlt_server.demo.workload import TARGET
from tlt_server.speculation.calibration import Calibration

EXAMPLES = Path(tlt_server.__file__).parents[1] / "examples" / "arith"
SEEDS = range(300)


@pytest.fixture
def recipes(monkeypatch):
    if not EXAMPLES.exists():
        pytest.skip("the recipes lie in the repository only, not in an installed package")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import recipes

    yield recipes
    sys.modules.pop("recipes", None)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def test_hard_recipe_keeps_answers_and_varies_the_solution_path(recipes):
    for seed in SEEDS:
        problem = task.problem(seed)
        plain = recipes.RECIPES["demo"](problem, Random(seed))
        hard = recipes.RECIPES["hard"](problem, Random(seed))
        assert hard == recipes.RECIPES["hard"](problem, Random(seed))
        assert hard.split("\n")[-1] == plain.split("\n")[-1]
        assert task.reward(problem, hard) == task.reward(problem, plain)


def test_words_of_remarks_are_single_tokens(recipes, tokenizer):
    for name, words in recipes.SLOTS.items():
        for word in words[1].split():
            spelled = word if name == "opening" else f" {word}"
            assert len(tokenizer.encode(spelled).ids) == 1, spelled


def test_hard_recipe_adds_half_a_nat_per_token(recipes, tokenizer):
    """The figure leaves out what the task itself leaves open: 0.15 nats per token of its text."""
    nats = tokens = longest = 0
    for seed in SEEDS:
        rng = Random(seed)
        solution = task.solution(task.problem(seed), rng)
        writer = recipes.Writer(rng)
        length = len(tokenizer.encode(recipes.wandering(solution, writer)).ids)
        nats, tokens, longest = nats + writer.nats, tokens + length, max(longest, length)
    assert 0.42 < nats / tokens < 0.52
    assert longest > 1000


def test_the_hard_pair_has_the_demo_pairs_shapes_and_prompts():
    hard = EXAMPLES.parents[1] / "benchmarks" / "pairs" / "hard"
    if not hard.exists():
        pytest.skip("the pair lies in the repository only, not in an installed package")
    for file in ("target/config.json", "target/tokenizer.json", "drafter/config.json"):
        assert (hard / file).read_bytes() == (TARGET.parent / file).read_bytes(), file
    assert sum(path.stat().st_size for path in hard.rglob("*") if path.is_file()) <= 16 * 2**20
    figures = json.loads((hard / "figures.json").read_text())["evaluation"]["T=1"]
    assert figures["entropy_per_token"] >= 0.5
    assert figures["tokens"]["p99"] > 1000
    assert Calibration.load(hard / "drafter").source != "default"
