"""The trainer on a GPU: flash attention against plain blocks, bfloat16 against float32, and a copy
on a side stream that holds the state before the step next to it.
"""

import json

import pytest
import torch

from tests.trainer.samples import LAYERS, demo_target, solutions
from tests.trainer.tiny import random
from tlt_server.__main__ import main
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.trainer.learning.attend import Blocks, Flash, attend
from tlt_server.trainer.learning.checkpoint import Checkpoints, newest
from tlt_server.trainer.learning.network import load_trainable
from tlt_server.trainer.learning.objectives import make_objective
from tlt_server.trainer.learning.pack import Cursor, Packer, PacksAhead
from tlt_server.trainer.learning.step import AdamWSettings, Trainer
from tlt_server.trainer.learning.unroll import forward
from tlt_server.trainer.target.prefill import CpuPrefill
from tlt_server.trainer.target.recompute import Recomputed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUDGET = 512


def cosine(first, second) -> float:
    return float(torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), dim=0))


@pytest.mark.parametrize("first", [None, (2, 299, 300, 340), (4, 299, 300, 511)])
@pytest.mark.parametrize("steps", [0, 3])
def test_flash_attention_matches_plain_blocks(steps, first):
    bounds, slots, device = (0, 5, 300, 301, 512), 512, torch.device("cuda")
    parts = zip(first or bounds, bounds[1:], strict=False)
    queries = sum(end - start for start, end in parts)
    inputs = [random(queries, 4, 128, seed=1)]
    inputs += [random(slots, 2, 128, seed=2 + i) for i in range(2)]
    inputs += [random(queries, 2, 128, seed=4 + i) for i in range(2 * steps)]
    inputs = [x.to(device, torch.bfloat16).float() for x in inputs]
    found = []
    trunks = Blocks(bounds, first), Flash(bounds, device, first)
    for trunk, dtype in zip(trunks, (torch.float32, torch.bfloat16), strict=True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        q, k, v, *branch = leaves
        out = attend(trunk, dtype, q, k, v, branch[:steps], branch[steps:])
        out.backward(random(queries, 4, 128, seed=99).to(device))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for plain, flash in zip(*found, strict=True):
        # Weights and outputs are rounded to 8 bits; directions agree far better than any element.
        assert cosine(plain, flash) > 0.9999
        assert (plain - flash).norm() / plain.norm() < 0.02


@pytest.fixture(scope="module")
def target():
    return demo_target()


@pytest.fixture(scope="module")
def source(target):
    return Recomputed(CpuPrefill(target), solutions(0, 40, 96))


def build(target, device, dtype):
    network = load_trainable(DRAFTER, target.config, compute=dtype, device=device)
    frozen = network.frozen(target.embedding_VH, CpuPrefill(target).head_rows(network.target_ids_C))
    return Trainer(network, frozen, make_objective("eagle3"), AdamWSettings(lr=1e-4))


def test_bfloat16_logits_match_float32_logits_of_a_cpu(target, source):
    assert LAYERS == target.feature_layers
    pack, _ = Packer(source, BUDGET, 7).next(Cursor())
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        trainer = build(target, device, dtype)
        there, steps = pack.to(torch.device(device), dtype), []
        trunk = (
            Flash(pack.bounds, torch.device(device)) if device == "cuda" else Blocks(pack.bounds)
        )
        with torch.no_grad():
            for _ in range(7):
                steps.append(forward(trainer.network, trainer.frozen, there, trunk, steps))
            found.append(
                [trainer.network.logits(step.h_RH, trainer.frozen).cpu() for step in steps]
            )
    weighing = pack.root_N > 0
    for step, (exact, rounded) in enumerate(zip(*found, strict=True)):
        inside = weighing & (pack.left_N > step)
        same = (exact.argmax(-1) == rounded.argmax(-1))[inside].float().mean()
        assert same > 0.97, (step, float(same))
        assert cosine(exact[inside], rounded[inside]) > 0.999, step


def test_prefetched_packs_reach_the_gpu_whole(source):
    device, packer, cursor = torch.device("cuda"), Packer(source, BUDGET, 7), Cursor()
    with PacksAhead(Packer(source, BUDGET, 7), device, torch.bfloat16) as packs:
        for _ in range(4):
            expected, _ = packer.next(cursor)
            pack, cursor = packs.next(cursor)
            for name in ("feature_NF", "teacher_NH", "token_N", "root_N"):
                found, value = getattr(pack, name), getattr(expected, name)
                assert found.is_cuda and torch.equal(found, value.to(device, found.dtype)), name


def test_gpu_checkpoint_excludes_the_step_running_meanwhile(target, source, tmp_path):
    trainer, packer = build(target, "cuda", torch.bfloat16), Packer(source, BUDGET, 7)
    checkpoints = Checkpoints(tmp_path, trainer, {})
    losses, cursor = [], Cursor()
    for step in range(12):
        before = trainer.state.weight_P.clone()
        if step == 5:
            assert checkpoints.begin()
        pack, cursor = packer.next(cursor)
        outcome = trainer.step([pack.to(torch.device("cuda"), torch.bfloat16)])
        losses.append(outcome.loss)
        assert outcome.applied and not torch.equal(before, trainer.state.weight_P)
        if step == 5:
            saved = before.cpu()
    checkpoints.close()
    found, faults = newest(tmp_path, {})
    assert not faults and found.state.step == 5 and torch.equal(found.state.weight_P, saved)
    trainer.restore(found.state)
    assert torch.equal(trainer.state.weight_P.cpu(), saved)
    assert sum(losses[-4:]) < sum(losses[:4])


def test_drafter_command_replays_and_trains_on_a_gpu_record(tmp_path):
    record, trained = tmp_path / "record.safetensors", tmp_path / "trained"
    assert main(["bench", "record", "--quick", "--device", "cuda", "--out", str(record)]) == 0
    pair, given = ["--target", str(TARGET)], ["--drafter", str(DRAFTER)]
    found = tmp_path / "found.json"
    check = ["--record", str(record), "--self-check", "--json", str(found)]
    assert main(["drafter", "evaluate", *pair, *given, *check]) == 0
    checked = json.loads(found.read_text())["figures"]["self_check"]
    assert checked["different"] == 0 and checked["cycles"] > 100
    data = ["--data", str(record), "--steps", "2", "--out", str(trained)]
    assert main(["drafter", "train", *pair, *given, *data]) == 0
    assert (trained / "model.safetensors").exists()
