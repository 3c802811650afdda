"""Some dozens of steps of an untrained head raise its agreement with the shipped target on text
that was held out; two runs have the same bits.
"""

import numpy as np
import pytest
import torch

from tests.trainer.samples import demo_target, solutions
from tlt_server.demo.workload import TARGET
from tlt_server.models.draft_networks import EAGLE3
from tlt_server.trainer.exporting.initial import write_drafter
from tlt_server.trainer.learning.attend import Blocks
from tlt_server.trainer.learning.network import load_trainable
from tlt_server.trainer.learning.objectives import make_objective, teacher_probabilities
from tlt_server.trainer.learning.pack import Cursor, Packer
from tlt_server.trainer.learning.step import AdamWSettings, Trainer
from tlt_server.trainer.learning.unroll import forward, weights_of
from tlt_server.trainer.target.prefill import CpuPrefill
from tlt_server.trainer.target.recompute import Recomputed

BUDGET, UNROLLED = 384, 2


@pytest.fixture(scope="module")
def target():
    return demo_target()


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    directory = tmp_path_factory.mktemp("head")
    count_V = np.zeros(512, np.int64)
    for token_T, counted_T in solutions(0, 60, 96):
        np.add.at(count_V, token_T[counted_T], 1)
    write_drafter(
        directory, TARGET, EAGLE3, count_V=count_V, draft_vocab_size=128, intermediate_size=128
    )
    return directory


@pytest.fixture(scope="module")
def source(target):
    return Recomputed(CpuPrefill(target), solutions(0, 60, 96))


def build(target, head, name="eagle3", acceptance="none"):
    network = load_trainable(head, target.config)
    frozen = network.frozen(target.embedding_VH, CpuPrefill(target).head_rows(network.target_ids_C))
    objective = make_objective(name, acceptance, steps=UNROLLED)
    return Trainer(network, frozen, objective, AdamWSettings(lr=2e-3, warmup_steps=5))


def train(trainer, source, steps):
    packer, cursor = Packer(source, BUDGET, UNROLLED), Cursor()
    for _ in range(steps):
        pack, cursor = packer.next(cursor)
        assert trainer.step([pack]).applied
    return trainer


@torch.no_grad()
def agreement(trainer, source):
    """Return how often the first drafted token is the target's most likely one."""
    network, packer = trainer.network, Packer(source, BUDGET, UNROLLED)
    agreed = total = 0.0
    cursor = Cursor()
    while cursor.epoch == 0:
        pack, cursor = packer.next(cursor)
        output = forward(network, trainer.frozen, pack, Blocks(pack.bounds), [])
        teacher_NC = teacher_probabilities(pack.teacher_NH, trainer.frozen.head_CH)
        weight_N = weights_of(trainer.frozen, pack, 1)[0]
        same_N = network.logits(output.h_RH, trainer.frozen).argmax(-1) == teacher_NC.argmax(-1)
        agreed, total = agreed + float((same_N * weight_N).sum()), total + float(weight_N.sum())
    return agreed / total


def test_new_drafter_learns_to_agree_with_its_target(target, head, source):
    unseen = Recomputed(CpuPrefill(target), solutions(1000, 10, 96))
    trainer = build(target, head)
    before = agreement(trainer, unseen)
    after = agreement(train(trainer, source, 40), unseen)
    assert before < 0.1 and after > 0.3, (before, after)


@pytest.mark.parametrize(
    ("name", "acceptance"),
    [("eagle", "none"), ("hass", "total-variation"), ("eagle3", "shared-noise")],
)
def test_two_runs_of_an_objective_have_the_same_bits(target, head, source, name, acceptance):
    first, second = (train(build(target, head, name, acceptance), source, 2) for _ in range(2))
    assert torch.equal(first.state.weight_P, second.state.weight_P)
    assert not torch.equal(first.state.weight_P, build(target, head).state.weight_P)
