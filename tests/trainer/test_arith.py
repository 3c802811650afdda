"""The steps of `examples/arith` from a target to a measured pair, at a tiny size."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tlt_server
from tlt_server.__main__ import main
from tlt_server.demo.workload import PAIR, TARGET
from tlt_server.speculation.calibration import Calibration

EXAMPLES = Path(tlt_server.__file__).parents[1] / "examples" / "arith"


@pytest.fixture
def script(monkeypatch):
    """Run a script of the recipe as its command line does, in this process."""
    if not EXAMPLES.exists():
        pytest.skip("the recipe lies in the repository only, not in an installed package")
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, *flags: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *flags])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    yield run
    for name, module in list(sys.modules.items()):
        if EXAMPLES == Path(getattr(module, "__file__", None) or "").parent:
            del sys.modules[name]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A pair without a drafter."""
    pair = tmp_path / "pair"
    shutil.copytree(TARGET, pair / "target")
    figures = json.loads((PAIR / "figures.json").read_text())
    kept = {"target_training": figures["target_training"]}
    (pair / "figures.json").write_text(json.dumps(kept))
    return pair


@pytest.mark.slow
def test_arith_pair_is_sampled_trained_and_measured(
    script: Callable[..., None], pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = ["--target", str(pair / "target")], ["--out", str(pair / "drafter")]
    few = ["--cap", "24", "--device", "cpu"]
    samples, held_out, start = (str(tmp_path / n) for n in ("s.safetensors", "h.safetensors", "st"))
    script("sample.py", *target, *few, "--samples", "6", "--out", samples)
    assert "6 samples, solved" in capsys.readouterr().out
    other = ["--samples", "4", "--first-seed", "600000000", "--out", held_out]
    script("sample.py", *target, *few, *other)

    began = ["--start-from", str(PAIR / "drafter"), "--draft-vocab", "200", "--out", start]
    assert main(["drafter", "init", *target, "--data", samples, *began]) == 0
    small = ["--budget", "128", "--unroll", "3", "--device", "cpu", "--steps", "3"]
    stop = ["--record", held_out, "--stop-at", "1.5", "--check-every", "1"]
    trained = ["--drafter", start, "--data", samples, *drafter, *small, *stop]
    assert main(["drafter", "train", *target, *trained]) == 0
    assert "trained for 1 steps" in capsys.readouterr().err

    sizes = [
        "--samples",
        "4",
        "--calibration-samples",
        "2",
        "--replayed",
        "2",
        "--trees",
        "16",
        "32",
    ]
    script("evaluate.py", "--pair", str(pair), *few, *sizes, "--greedy-samples", "4")
    found = json.loads((pair / "figures.json").read_text())["evaluation"]
    assert found["T=1"]["samples"] == found["T=0"]["samples"] == 4 and found["draft_vocab"] == 200
    assert 1 < found["T=1"]["accept"]["16"]["accept_length"] <= 8
    assert found["T=1"]["entropy_per_token"] > 0
    assert "draft vocabulary 200; trained by" in (pair / "README.md").read_text()
    assert Calibration.load(pair / "drafter").source != "default"

    weak = tmp_path / "weak" / "drafter"
    script("weaken.py", "--pair", str(pair), "--keep", "0", "--out", str(weak))
    back, shipped = (load_file(where / "model.safetensors") for where in (weak, PAIR / "drafter"))
    assert (back["fc.weight"] == shipped["fc.weight"]).all()
