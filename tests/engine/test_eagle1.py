"""EAGLE-1 networks: their logits against plain PyTorch, and engines that draft with them on the CPU
and on the interpreter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import bits, drafting, interpreted, on_cpu, request
from tests.engine.pushing import Pushable, perturbed
from tests.engine.tiny import SMALLEST, write_eagle, write_eagle1, write_target
from tests.rows_of_one import Sequence, certain_rows
from tlt_server.bench.padding.recipe import pad
from tlt_server.bench.padding.shapes import SHAPES
from tlt_server.config import load
from tlt_server.doctor.model import drafter as check_drafter
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig, Rope
from tlt_server.models.draft_checkpoint import describe, feature_layers, fill_drafter
from tlt_server.models.eagle import Eagle1, Eagle3
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.eagle import GpuEagle3
from tlt_server.models.gpu.layers import RowTensors
from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.loader import fill, load_target
from tlt_server.models.numerics import Numerics
from tlt_server.models.rope import rotary_table
from tlt_server.trainer.exporting.export import export
from tlt_server.trainer.exporting.export_layouts import Card

D = SMALLEST.head_dim


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eagle1")
    write_target(root / "base", shape=SMALLEST)
    write_eagle1(root / "drafter", root / "base", shape=SMALLEST)
    perturbed(root / "base", root / "new", 1, scale=0.05)
    perturbed(root / "drafter", root / "new-drafter", 2, scale=0.05)
    return root


@pytest.fixture(scope="module")
def settings(root: Path) -> Iterator[EngineSettings]:
    with patched_once():
        yield replace(interpreted(root), max_rows=32)


def twin(w: dict[str, torch.Tensor], embedded_TH, state_TH) -> torch.Tensor:
    """Hidden states of the published network in one dense pass (SafeAILab/EAGLE, cnets1.py): the
    first row stands at position 1.
    """
    layer = {name.removeprefix("layers.0."): value for name, value in w.items()}
    both_TX = torch.cat([embedded_TH, state_TH], dim=1)
    x_TH = functional.linear(both_TX, w["fc.weight"], w.get("fc.bias"))
    table = rotary_table(Rope(), D, 64)
    cos, sin = (part[1 : len(x_TH) + 1, None] for part in table)

    def heads(part: str) -> torch.Tensor:
        return functional.linear(x_TH, layer[f"self_attn.{part}_proj.weight"]).unflatten(1, (-1, D))

    def rotated(x_TND: torch.Tensor) -> torch.Tensor:
        low, high = x_TND.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    each = rotated(heads("q")), rotated(heads("k")), heads("v")
    q, k, v = (x.transpose(0, 1)[None] for x in each)
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    joined_TX = attended[0].transpose(0, 1).flatten(1)
    h_TH = x_TH + functional.linear(joined_TX, layer["self_attn.o_proj.weight"])
    norm_H = layer["post_attention_layernorm.weight"]
    normed = functional.rms_norm(h_TH, h_TH.shape[1:], norm_H, eps=1e-6)
    gate, up = (functional.linear(normed, layer[f"mlp.{p}_proj.weight"]) for p in ("gate", "up"))
    return h_TH + functional.linear(functional.silu(gate) * up, layer["mlp.down_proj.weight"])


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_logits_equal_the_published_networks(root: Path, tmp_path: Path, bias: bool) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_eagle1(tmp_path, root / "base", seed=7, bias=bias, shape=SMALLEST)
    target = load_target(root / "base", numerics=Numerics("strict"), feature_layers=(2,))
    drafter = Eagle1.load(directory, target)
    tokens = torch.randint(0, SMALLEST.vocab, (40,), generator=torch.Generator().manual_seed(4))
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    with torch.no_grad():
        state_TH = model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
        embedded_TH = model.get_input_embeddings()(tokens)
        h_TH = twin(load_file(directory / "model.safetensors"), embedded_TH[1:], state_TH[:-1])
        expected_TV = model.lm_head(h_TH)
    features_RF = Sequence(target, capacity=40).extend(tokens).features_RF
    g_RH = drafter.fuse(features_RF[:-1])
    table_P = torch.randperm(3).to(torch.int32)
    cache = drafter.make_cache(3, 16, 4)
    drafter.store_only(certain_rows(tokens[1:30], 1, table_P, 16), g_RH[:29], cache)
    found_RH = drafter.forward(certain_rows(tokens[30:], 30, table_P, 16), g_RH[29:], cache)
    assert (found_RH - h_TH[29:]).norm() / h_TH[29:].norm() < 1e-5
    found_RV = drafter.logits(found_RH)
    assert (found_RV - expected_TV[29:]).norm() / expected_TV[29:].norm() < 1e-5


def test_eagle1_reads_normed_states_and_shares_target_weights(root: Path) -> None:
    layers = feature_layers(root / "drafter", ModelConfig.read(root / "base"))
    assert layers == (SMALLEST.layers,)
    target = load_target(root / "base", numerics=Numerics("strict"), feature_layers=layers)
    rows = Sequence(target, capacity=16).extend(torch.arange(9))
    assert torch.equal(rows.features_RF, rows.hidden_RH)
    drafter = Eagle1.load(root / "drafter", target)
    assert drafter.embedding_VH is target.embedding_VH and drafter.head_HV is target.head_HV
    assert not {"embed_tokens.weight", "lm_head.weight"} & drafter.parameters().keys()


def test_eagle1_ignores_copies_of_the_targets_tensors(root: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(root / "drafter", tmp_path / "drafter")
    tensors = load_file(directory / "model.safetensors")
    copies = {
        name: torch.zeros(SMALLEST.vocab, SMALLEST.hidden)
        for name in ("embed_tokens.weight", "lm_head.weight")
    }
    save_file({**tensors, **copies}, directory / "model.safetensors")
    target = load_target(root / "base", numerics=Numerics("strict"), feature_layers=(2,))
    assert Eagle1.load(directory, target).embedding_VH is target.embedding_VH


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ("LlamaForCausalLM", "LlamaForCausalLMEagle'")),
        ({"draft_vocab_size": 40}, ("draft_vocab_size", "40", "64")),
        ({"hidden_size": 64}, ("hidden_size", "64", "32")),
        ({"vocab_size": 65}, ("vocab_size", "65", "64")),
    ],
)
def test_drafter_of_a_different_target_is_refused(root, tmp_path, changes, words) -> None:
    directory = shutil.copytree(root / "drafter", tmp_path / "drafter")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    target = load_target(root / "base", numerics=Numerics("strict"), feature_layers=(2,))
    with pytest.raises(ModelError) as caught:
        Eagle1.load(directory, target)
    assert all(word in caught.value.message for word in words), caught.value.message


# -- engines ---------------------------------------------------------------------------------------


CPU = pytest.param(on_cpu, 20, id="cpu")  # device, tokens of a request
GPU = pytest.param(lambda settings: settings, 6, id="gpu", marks=pytest.mark.long)
DEVICES = pytest.mark.parametrize(("on_device", "tokens"), [CPU, GPU])


def generated(engine: Pushable, tokens: int) -> tuple[dict[str, tuple[object, ...]], int]:
    """Return everything said of tokens, and how many drafted ones were accepted."""
    asked = [
        request(0, 4, max_tokens=tokens),
        request(1, 9, max_tokens=tokens, temperature=0.0),
        request(2, 6, max_tokens=tokens, temperature=0.7, top_k=12),
    ]
    engine.said.clear()
    engine.submit(*asked)
    accepted = 0
    while not engine.engine.idle:
        engine.step()
        if cycle := engine.engine.last_cycle:
            accepted += sum(cycle.accepted)
    return bits(engine, [each.id for each in asked]), accepted


CHAIN, TREE = ("eagle", 3, 1, 4), ("eagle", 2, 2, 4)


@DEVICES
def test_speculation_changes_no_bit(settings: EngineSettings, on_device, tokens: int) -> None:
    here = on_device(settings)
    plain, accepted = generated(Pushable(here), tokens)
    assert not accepted
    for strategy in (CHAIN, TREE):
        drafted, accepted = generated(Pushable(drafting(here, *strategy)), tokens)
        assert drafted == plain
        assert accepted >= tokens, "a third of the tokens, as it learnt from its target"


def test_eagle1_drafts_alike_on_cpu_and_gpu(settings: EngineSettings) -> None:
    devices = drafting(on_cpu(settings), *CHAIN), drafting(settings, *CHAIN)
    (_, on_one), (_, on_other) = (generated(Pushable(device), 6) for device in devices)
    assert on_one == on_other


def live_target(engine: Pushable):
    runner = engine.engine.runner
    return runner.model if hasattr(runner, "model") else runner.state.model


def shared_head(network) -> torch.Tensor:
    """Return the head of a target or of its drafter: transposed on the CPU."""
    return network.head_HV if hasattr(network, "head_HV") else network.head.weight_WH


@DEVICES
def test_eagle1_engine_takes_pushes_and_rollbacks_of_both_roles(
    settings: EngineSettings, root: Path, on_device, tokens: int
) -> None:
    """The engine says after each step what one started with that target says, and drafts with the
    embedding and the head of the target in force.
    """

    def said_of(target: str) -> dict[str, tuple[object, ...]]:
        here = replace(on_device(settings), model=str(root / target))
        return generated(Pushable(here), tokens // 2)[0]

    old, new = said_of("base"), said_of("new")
    assert old != new
    engine = Pushable(drafting(on_device(settings), *CHAIN))
    runner = engine.engine.runner
    drafters = runner.passes.drafters if isinstance(runner, GpuRunner) else runner._drafters
    drafts = drafters["eagle"]
    both = str(root / "new-drafter")
    for act, expected in (
        (lambda: engine.push(root / "new", "v1"), new),
        (lambda: engine.push(root / "new-drafter", "d1", role="drafter"), new),
        (lambda: engine.roll_back(), new),
        (lambda: engine.push(root / "base", "v2", role="all", drafter_path=both), old),
        (lambda: engine.roll_back(), new),
    ):
        assert act().error is None
        said, accepted = generated(engine, tokens // 2)
        assert said == expected and accepted
        target, network = live_target(engine), drafts.network
        assert network.embedding_VH.data_ptr() == target.embedding_VH.data_ptr()
        head = shared_head(network)
        assert head.data_ptr() == shared_head(target).data_ptr()
        assert torch.equal(head, shared_head(target))


@pytest.mark.parametrize("layout", ["eagle1", "speculators"])
def test_a_restart_serves_the_pushed_drafter(root: Path, tmp_path: Path, layout: str) -> None:
    """Weights are pushed under the names of `models/names.py`, with the config of any layout."""
    drafter, pushed = root / "drafter", root / "new-drafter"
    if layout == "speculators":
        before = write_eagle(tmp_path / "eagle3", shape=replace(SMALLEST, features=(0, 1, 1)))
        pushed, drafter = perturbed(before, tmp_path / "pushed", 3), tmp_path / "drafter"
        drafter.mkdir()
        export(before, root / "base", layout, drafter, base="base", card=Card())
    settings = replace(
        on_cpu(interpreted(root)),
        drafter=str(drafter),
        weight_root=str(tmp_path if layout == "speculators" else root),
        state_dir=str(tmp_path / "state"),
    )
    engine = Pushable(drafting(settings, *CHAIN))
    assert engine.push(pushed, "d1", role="drafter").error is None
    said, sums = generated(engine, 20)[0], engine.checksums()
    again = Pushable(drafting(settings, *CHAIN))
    assert again.info.drafter_version == "d1" and again.checksums() == sums
    assert generated(again, 20)[0] == said


@pytest.mark.parametrize("norm_first", [False, True])
def test_gpu_and_cpu_form_the_same_drafter_input(
    settings: EngineSettings, root: Path, tmp_path: Path, norm_first: bool
) -> None:
    """The interpreter's EAGLE-3: the layer's input, and the start of the residual stream."""
    directory = write_eagle(tmp_path, shape=SMALLEST, draft_vocab=40)
    config = json.loads((directory / "config.json").read_text())
    config["norm_before_residual"] = norm_first
    (directory / "config.json").write_text(json.dumps(config))
    layers = SMALLEST.features
    target = load_target(root / "base", numerics=Numerics("strict"), feature_layers=layers)
    placement = Placement(torch.device("cpu"), torch.float32, StrictMatmuls())
    on_gpu = GpuDecoder(target.config, placement=placement, feature_layers=layers)
    fill(on_gpu.parameters(), root / "base")
    network = GpuEagle3(describe(directory, on_gpu), on_gpu)
    fill_drafter(network, directory)
    token_R, g_RH = torch.tensor([3, 9, 63]), torch.randn(3, SMALLEST.hidden)
    certain = certain_rows(token_R, 1, torch.zeros(1), 16)
    expected = Eagle3.load(directory, target).join(certain, g_RH)
    residual_RH = g_RH.clone()
    rows = RowTensors(token_R.int(), torch.arange(1, 4).int(), torch.arange(1, 4).int())
    torch.testing.assert_close(network.join(rows, residual_RH), expected.input_RX)
    torch.testing.assert_close(residual_RH, expected.residual_RH)
    assert torch.equal(residual_RH, g_RH) != norm_first


def test_eagle1_push_with_an_embedding_is_refused(settings: EngineSettings, root: Path) -> None:
    directory = shutil.copytree(root / "drafter", root / "with-embedding", dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    embedding = torch.zeros(SMALLEST.vocab, SMALLEST.hidden)
    save_file({**tensors, "embed_tokens.weight": embedding}, directory / "model.safetensors")
    report = Pushable(on_cpu(settings)).push(directory, "d1", role="drafter")
    assert report.error is not None and "leave it out of the push" in str(report.error)


def test_doctor_accepts_an_eagle1_drafter(root: Path) -> None:
    config = load({"model": str(root / "base"), "drafter": str(root / "drafter"), "device": "cpu"})
    finding = check_drafter(config.resolved())
    assert "fits the target" in finding.found


def test_step_times_of_a_different_network_are_not_reused(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    write_eagle(tmp_path / "eagle3", shape=SMALLEST, draft_vocab=40)
    made_by = [
        Pushable(replace(on_cpu(settings), drafter=drafter)).engine.choice.knowledge_file._made_by
        for drafter in (str(root / "drafter"), str(tmp_path / "eagle3"), "history")
    ]
    assert [each["drafters"] for each in made_by] == [
        "eagle+history (LlamaForCausalLMEagle, MLP 48, heads 2, draft vocab 64)",
        "eagle+history (LlamaForCausalLMEagle3, MLP 48, heads 2, draft vocab 40)",
        "history",
    ]


def test_padding_an_eagle1_drafter_is_refused(root: Path) -> None:
    with pytest.raises(ModelError, match="must be a LlamaForCausalLMEagle3"):
        pad(root / "base", root / "drafter", SHAPES["mid"], torch.float32, device="meta")
