"""The shipped pair: its files, its card, and its target against Hugging Face's."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tlt_server
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


def test_pair_is_small_and_has_the_published_names():
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= 16 * 2**20
    state = load_file(PAIR / "drafter" / "model.safetensors")
    config = json.loads((PAIR / "drafter" / "config.json").read_text())
    assert state["fc.weight"].shape == (256, 768)
    assert state["midlayer.self_attn.q_proj.weight"].shape == (256, 512)
    kept = state["d2t"] + torch.arange(config["draft_vocab_size"])
    assert state["t2d"].nonzero()[:, 0].equal(kept) and len(state["lm_head.weight"]) == len(kept)
    assert not any("bias" in name or "embed" in name for name in state)


def test_calibration_is_a_table_of_chances():
    table = Calibration.load(PAIR / "drafter")
    assert table.source != "default" and ((table.acceptance > 0) & (table.acceptance < 1)).all()
    assert (table.acceptance[:, 0, -1] > table.acceptance[:, 0, 0]).all()


@pytest.mark.parametrize("pair", [PAIR, HARD], ids=["demo", "hard"])
def test_card_is_written_from_the_figures(recipe, pair):
    if not pair.exists():
        pytest.skip("the hard pair lies in the repository only")
    import card

    figures = json.loads((pair / "figures.json").read_text())
    assert card.model_card(figures) == (pair / "README.md").read_text()


@pytest.mark.slow
def test_target_is_hugging_faces_qwen2(recipe):
    import target_model
    from transformers import AutoModelForCausalLM

    ours = target_model.load_target(PAIR / "target", "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        # Two float32 implementations of the same sums: a few ulp of logits of size 20.
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=2e-4, rtol=1e-4)
