"""Exports: each layout reads back to the same drafter, an engine serves it, misfits are named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.gpu_engine import bits, drafting, request
from tests.engine.pushing import Pushable, perturbed
from tests.engine.tiny import HIDDEN, VOCAB, write_target
from tlt_server.__main__ import main
from tlt_server.bench.recording import recorded
from tlt_server.bench.replaying.names import parse_policy
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.drafter import export as export_command
from tlt_server.drafter.evaluate import loaded
from tlt_server.drafter.out import new_directory
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.draft_networks import ARCHITECTURES, NETWORKS, Layout
from tlt_server.speculation.drafters import drafter_in
from tlt_server.trainer.exporting import export as exporting
from tlt_server.trainer.exporting.export import Exported, export
from tlt_server.trainer.exporting.export_layouts import EXPORTS, Card
from tlt_server.trainer.exporting.initial import write_drafter

CARD = Card("v7", "12,000 responses of RL")
CALIBRATION = DRAFTER / "calibration.json"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    write_target(root / "target")
    for name, architecture in NETWORKS.items():
        (root / name).mkdir()
        write_drafter(
            root / name,
            root / "target",
            architecture,
            count_V=np.zeros(VOCAB, np.int64),
            draft_vocab_size=60,
        )
    shutil.copyfile(CALIBRATION, root / "eagle3" / "calibration.json")
    return root


def source(root: Path, layout: str) -> Path:
    return root / ARCHITECTURES[EXPORTS[layout].network].name


def exported(root: Path, layout: str, out: Path, drafter: Path | None = None) -> Exported:
    drafter = drafter or source(root, layout)
    with new_directory(out) as directory:
        return export(
            drafter,
            root / "target",
            layout,
            directory,
            base="org/target",
            card=CARD,
            replay=lambda *directories: "3.4 tokens per cycle",
        )


def changed(root: Path, tmp_path: Path, **changes: object) -> Path:
    """Return a copy of the drafter with other values in its config.json."""
    directory = shutil.copytree(root / "eagle3", tmp_path / "changed")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


def generated(root: Path, drafter: Path) -> tuple[object, int, int]:
    """Return the tokens of an engine with this drafter, and its drafted and accepted counts."""
    settings = EngineSettings(
        model=str(root / "target"), drafter=str(drafter), device="cpu", policy="off", pages=40
    )
    engine = Pushable(drafting(settings, drafter_in(drafter), 4, 3, 9))
    engine.submit(*(request(i, 5 + i, max_tokens=16) for i in range(3)))
    drafted = accepted = 0
    while not engine.engine.idle:
        engine.step()
        if cycle := engine.engine.last_cycle:
            drafted, accepted = drafted + cycle.drafted, accepted + sum(cycle.accepted)
    return bits(engine, ["r0", "r1", "r2"]), drafted, accepted


@pytest.mark.parametrize("layout", EXPORTS)
def test_engine_drafts_alike_with_the_exported_drafter(
    root: Path, tmp_path: Path, layout: str
) -> None:
    done = exported(root, layout, tmp_path / "out")
    drafted = 60 if ARCHITECTURES[EXPORTS[layout].network].own_head else VOCAB
    assert done.compared == 40 * (HIDDEN + drafted), "states and logits"
    assert generated(root, tmp_path / "out") == generated(root, source(root, layout))
    has_calibration = (source(root, layout) / "calibration.json").exists()
    assert (tmp_path / "out" / "calibration.json").exists() == has_calibration
    card = (tmp_path / "out" / "README.md").read_text()
    said = ("org/target", layout, "v7", "12,000 responses", "3.4 tokens", done.sha256)
    assert all(words in card for words in said)


def test_speculators_export_has_the_fields_of_vllm(root: Path, tmp_path: Path) -> None:
    exported(root, "speculators", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    assert config["transformer_layer_config"]["hidden_size"] == 64
    assert (config["draft_vocab_size"], config["norm_before_residual"]) == (60, False)
    assert {"layers.0.hidden_norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    assert not any(name.startswith("midlayer.") for name in names)


def test_eagle1_export_satisfies_strict_loaders(root: Path, tmp_path: Path) -> None:
    exported(root, "eagle1", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    target = load_file(root / "target" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert not tensors["fc.bias"].any()


def test_exported_drafter_can_be_exported_in_a_different_layout(root: Path, tmp_path: Path) -> None:
    exported(root, "speculators", tmp_path / "first")
    exported(root, "sglang", tmp_path / "second", tmp_path / "first")
    before, after = (
        load_file(path / "model.safetensors") for path in (root / "eagle3", tmp_path / "second")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_norm_before_residual_is_served_and_exported(root: Path, tmp_path: Path) -> None:
    drafter = changed(root, tmp_path, norm_before_residual=True)
    exported(root, "speculators", tmp_path / "out", drafter)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["norm_before_residual"] is True
    said = generated(root, tmp_path / "out")
    assert said == generated(root, drafter)
    assert said[0] == generated(root, root / "eagle3")[0], "no draft changes a token"
    for layout in ("eagle3", "sglang"):
        with pytest.raises(StartupError, match="'norm_before_residual' is true"):
            exported(root, layout, tmp_path / "other", drafter)


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ("sglang", {"hidden_size": 48}, ("'hidden_size' is 48", "64")),
        ("sglang", {"vocab_size": 90}, ("'vocab_size' is 90", "97")),
        ("sglang", {"draft_vocab_size": 59}, ("[60", "[59")),
        ("sglang", {"num_attention_heads": 4}, ("q_proj", "[64, 128]", "[128, 128]")),
        ("sglang", {"rope_parameters": {"rope_theta": 500.0}}, ("rope theta is 500.0", "10000.0")),
        (
            "speculators",
            {"max_position_embeddings": 512, "rope_parameters": {"rope_theta": 500.0}},
            ("max_position_embeddings is 512", "1024", "rope theta is 500.0"),
        ),
        (
            "sglang",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            ("rope kind is 'linear'", "'default'", "rope factor is 2.0"),
        ),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, ("(1, 2, 4)", "(2, 3, 3)")),
        ("sglang", {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, ("[1, 2, 6]", "6 layers")),
        ("eagle1", {}, ("LlamaForCausalLMEagle3", "eagle3 or sglang or speculators")),
    ],
)
def test_export_misfits_are_named_with_both_values(root, tmp_path, layout, changes, words) -> None:
    with pytest.raises(StartupError) as caught:
        exported(root, layout, tmp_path / "out", changed(root, tmp_path, **changes))
    assert all(word in caught.value.message for word in words), caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_stale_vocabulary_map_is_refused(root: Path, tmp_path: Path) -> None:
    directory = changed(root, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["d2t"] = tensors["d2t"].roll(1)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(StartupError, match="'d2t' and 't2d' contradict"):
        exported(root, "sglang", tmp_path / "out", directory)


def test_export_failing_its_read_back_leaves_no_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(tensors, path, **kwargs) -> None:
        name = "midlayer.self_attn.v_proj.weight"
        tensors = {**tensors, name: tensors[name].clone()}
        tensors[name][0, 0] += 1e-3
        save_file(tensors, path, **kwargs)

    monkeypatch.setattr(exporting, "save_file", damaged)
    with pytest.raises(StartupError, match="read back differently in"):
        exported(root, "sglang", tmp_path / "out")
    assert not [*tmp_path.iterdir()]


def test_export_command_writes_its_reported_tensors(root: Path, tmp_path: Path, capsys) -> None:
    assert get_args(Layout) == tuple(EXPORTS)
    flags = ["--target", str(root / "target"), "--drafter", str(root / "eagle3")]
    out = tmp_path / "out"
    command = ["drafter", "export", *flags, "--layout", "sglang", "--out", str(out)]
    assert main([*command, "--base", "org/target", "--data", "chats"]) == 0
    assert "15 tensors" in capsys.readouterr().out
    assert "Data: chats" in (out / "README.md").read_text()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(command) == 2 and "not an empty directory" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = EngineSettings(
        model=TARGET, drafter=str(DRAFTER), policy="off", device="cpu", pages=100, max_model_len=200
    )
    asked = problems_as_requests(TARGET, 4, group=2, seed=3, max_tokens=32)
    path = tmp_path_factory.mktemp("record") / "record.safetensors"
    recorded(settings, asked, [parse_policy("fixed:eagle:2x1x3")], []).save(path)
    return path


def test_exported_drafter_is_replayed_over_a_record(
    record: Path, tmp_path: Path, monkeypatch
) -> None:
    pair = ["--target", str(TARGET), "--drafter", str(DRAFTER), "--record", str(record)]
    command = ["drafter", "export", *pair, "--layout", "speculators", "--out"]
    assert main([*command, str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    found = re.search(r"([\d.]+) tokens per cycle over 4 recorded responses", card)
    assert found and 2 < float(found[1]) <= 8

    other = perturbed(DRAFTER, tmp_path / "other", 1, scale=0.2)

    def loaded_another(arguments, record, directories, device):
        return loaded(arguments, record, [directories[0], other], device)

    monkeypatch.setattr(export_command, "loaded", loaded_another)
    assert main([*command, str(tmp_path / "second")]) == 2
    assert not (tmp_path / "second").exists()
