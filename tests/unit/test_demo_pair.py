"""The shipped pair: what is in it, and that the training modules agree with Hugging Face and with a
slow twin.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tlt_server
from tlt_server.speculation.survival import Calibration

ROOT = Path(tlt_server.__file__).parent
PAIR = ROOT / "demo" / "pair"
EXAMPLES = ROOT.parent / "examples" / "arith"


@pytest.fixture
def recipe(monkeypatch):
    """The recipe's modules, importable as the scripts import them."""
    if not EXAMPLES.exists():
        pytest.skip("the recipe lies in the repository only, not in an installed package")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import drafter_model
    import noise
    import target_model

    yield target_model, drafter_model, noise
    for name, module in list(sys.modules.items()):
        if EXAMPLES == Path(getattr(module, "__file__", None) or "").parent:
            del sys.modules[name]


def test_the_pair_is_small_and_has_the_published_names():
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= 16 * 2**20
    state = load_file(PAIR / "drafter" / "model.safetensors")
    config = json.loads((PAIR / "drafter" / "config.json").read_text())
    assert state["fc.weight"].shape == (256, 768)
    assert state["midlayer.self_attn.q_proj.weight"].shape == (256, 512)
    kept = state["d2t"] + torch.arange(config["draft_vocab_size"])
    assert state["t2d"].nonzero()[:, 0].equal(kept) and len(state["lm_head.weight"]) == len(kept)
    assert not any("bias" in name or "embed" in name for name in state)


def test_the_calibration_table_is_a_table_of_chances():
    table = Calibration.load(PAIR / "drafter")
    assert table.source != "default" and ((table.survival > 0) & (table.survival < 1)).all()
    assert (table.survival[:, 0, -1] > table.survival[:, 0, 0]).all()


def test_the_recipe_writes_a_table_that_the_server_reads(recipe, tmp_path):
    import tree

    survival = torch.rand((2, 8, 16), generator=torch.Generator().manual_seed(0))
    tree.export_calibration(tree.Calibration(survival, torch.tensor(tree.GAP_EDGES)), tmp_path)
    table = Calibration.load(tmp_path)
    # Seven decimals are written.
    assert abs(table.survival - survival.numpy()).max() < 1e-6
    assert table.gap_edges.tolist() == torch.tensor(tree.GAP_EDGES).tolist()


def test_the_card_states_the_figures_of_the_measurement():
    figures = json.loads((PAIR / "figures.json").read_text())["evaluation"]["T=1"]
    card = (PAIR / "README.md").read_text()
    assert str(figures["accept"]["16"]["accept_length"]) in card and str(figures["solved"]) in card


def test_philox_gives_the_published_answers(recipe):
    *_, noise = recipe
    zero, ones = (torch.full((1, 1), word, dtype=torch.int64) for word in (0, 0xFFFFFFFF))
    assert [int(w) for w in noise.philox_4x32([zero] * 4, zero, zero)] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    assert [int(w) for w in noise.philox_4x32([ones] * 4, ones, ones)] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


@pytest.mark.slow
def test_the_target_is_hugging_faces_qwen2(recipe):
    from transformers import AutoModelForCausalLM

    target_model, *_ = recipe
    ours = target_model.load_target(PAIR / "target", "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs(ids, output_hidden_states=True)
        states = ours.hidden_states(ids)
        # Two float32 implementations of the same sums: a few ulp of logits of size 20.
        torch.testing.assert_close(ours.logits(states[-1]), expected.logits, atol=2e-4, rtol=1e-4)
        for layer in ours.config.aux_layers:
            torch.testing.assert_close(
                states[layer], expected.hidden_states[layer], atol=2e-4, rtol=1e-4
            )


@pytest.mark.slow
def test_unrolled_training_equals_drafting_slot_by_slot(recipe):
    """Each branch drafted alone, its keys gathered one by one, gives the outputs of the batched
    unroll.
    """
    target_model, drafter_model, _ = recipe
    target = target_model.load_target(PAIR / "target", "cpu")
    drafter = drafter_model.load_drafter(PAIR / "drafter", target.config, "cpu")
    ids = torch.randint(0, 512, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = target.hidden_states(ids)
        embeds, g = states[0], drafter.fuse(states)
        outputs = list(drafter.unroll(embeds, g, 4))
        attention, midlayer = drafter.midlayer.self_attn, drafter.midlayer

        def project(slot: int, feature: torch.Tensor):
            joined = midlayer.join(embeds[0, slot : slot + 1], feature)
            return attention.project(
                joined, drafter.cos[slot : slot + 1], drafter.sin[slot : slot + 1]
            )

        for step, output in enumerate(outputs):
            for n in range(output.shape[1]):
                root = n + 1
                seen = [project(slot, g[0, slot - 1 : slot])[1:] for slot in range(1, root)]
                feature = g[0, root - 1 : root]
                for slot in range(root, root + step + 1):
                    q, k, v = project(slot, feature)
                    seen.append((k, v))
                    keys, values = (torch.cat(parts)[:, 0] for parts in zip(*seen, strict=True))
                    attended = ((q[0] @ keys.T) * attention.head_dim**-0.5).softmax(-1) @ values
                    feature = midlayer.finish(feature, attended.flatten()[None])
                torch.testing.assert_close(output[0, n], feature[0], atol=1e-3, rtol=1e-3)
