"""The optimizer's step: parking, faults, AdamW's equations, checkpoints and resuming."""

import math
import threading
from dataclasses import replace

import pytest
import torch

from tests.trainer.tiny import Documents, document, frozen, network
from tlt_server.errors import StorageFailed
from tlt_server.trainer.learning import checkpoint
from tlt_server.trainer.learning import step as step_module
from tlt_server.trainer.learning import unroll as unroll_module
from tlt_server.trainer.learning.checkpoint import Checkpoints, newest
from tlt_server.trainer.learning.objectives import make_objective
from tlt_server.trainer.learning.pack import Cursor, Packer
from tlt_server.trainer.learning.step import AdamWSettings, State, Trainer

SETTINGS = AdamWSettings(lr=1e-2, warmup_steps=2, total_steps=20)
IDENTITY = {"objective": "eagle3"}


def build(settings=SETTINGS):
    drafter = network()
    return Trainer(drafter, frozen(drafter), make_objective("eagle3"), settings)


def packer():
    return Packer(Documents(*(document(6 + n % 11, 2, n) for n in range(12))), 40, 7)


def run(trainer, packs, steps, **kwargs):
    for _ in range(steps):
        pack, after = packs.next(Cursor(*trainer.state.cursor))
        outcome = trainer.step([pack], **kwargs)
        trainer.state.cursor = after
    return outcome


def bits(state: State):
    return [x.clone() for x in state.tensors()] + [torch.tensor([state.step, state.rate_scale])]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_repeated_steps_give_the_same_bits_and_lower_the_loss():
    runs = [build(), build()]
    first = run(runs[0], packer(), 1)
    last = run(runs[0], packer(), 15)
    run(runs[1], packer(), 16)
    assert same(bits(runs[0].state), bits(runs[1].state))
    assert last.loss < first.loss and last.applied and len(last.loss_S) == 7


def test_pausing_at_every_segment_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(step_module, "CHUNK", 1000)
    monkeypatch.setattr(unroll_module, "CHUNK_LOGITS", 200)
    plain, parked, other = build(), build(), build()
    run(plain, packer(), 3)
    pauses = []

    def park() -> None:
        """Use the processor as a server would: run another network's step in between."""
        pauses.append(1)
        if len(pauses) % 7 == 0:
            other.step([packer().next(Cursor())[0]])

    run(parked, packer(), 3, pause=park)
    assert same(bits(plain.state), bits(parked.state))
    kinds = list(plain.segments([packer().next(Cursor())[0]]))
    assert kinds.count("forward") == kinds.count("backward") == 7
    assert kinds.count("loss") > 1 and kinds.count("optimizer") > 2
    assert len(pauses) > 3 * 14


def test_abandoned_step_changes_no_later_bit():
    trainer, plain = build(), build()
    segments = trainer.segments([packer().next(Cursor())[0]])
    for _ in range(12):
        next(segments)
    segments.close()
    trainer.abandon()
    for each in (trainer, plain):
        run(each, packer(), 1)
    assert same(bits(trainer.state), bits(plain.state))


def test_optimizer_step_is_adamw_with_a_clipped_gradient():
    settings = replace(SETTINGS, clip=0.05)
    trainer, copy = build(settings), build()
    pack, _ = packer().next(Cursor())
    weights = {name: w.detach().clone() for name, w in trainer.network.weights.items()}
    matrices, vectors = ([w for w in weights.values() if (w.dim() > 1) is m] for m in (True, False))
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 1e-2}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    for number in range(3):
        for name, weight in copy.network.weights.items():
            weight.data.copy_(weights[name])
        segments = copy.segments([pack])
        for _ in range(7):
            while next(segments) != "backward":
                pass
        for name, weight in weights.items():
            weight.grad = copy.network.weights[name].grad.clone()
        copy.abandon()
        for group in reference.param_groups:
            group["lr"] = settings.rate(number)
        assert torch.nn.utils.clip_grad_norm_(weights.values(), settings.clip) > settings.clip
        reference.step()
        trainer.step([pack])
        for name, weight in trainer.network.weights.items():
            torch.testing.assert_close(weight, weights[name], atol=1e-6, rtol=1e-5, msg=name)


def poisoned(trainer):
    pack, _ = packer().next(Cursor())
    pack.feature_NF[pack.roots[0][0]] = math.nan
    return pack


def test_non_finite_step_is_undone_and_a_second_restores_a_copy():
    trainer = build()
    run(trainer, packer(), 2)
    before = bits(trainer.state)
    outcome = trainer.step([poisoned(trainer)])
    assert not outcome.applied and trainer.undone == 1 and same(before, bits(trainer.state))
    run(trainer, packer(), 1)  # a good one between them: no row of two
    trainer.step([poisoned(trainer)])
    assert trainer.restored == 0
    trainer.step([poisoned(trainer)])
    assert trainer.restored == 1 and trainer.undone == 3
    assert trainer.state.step == 0 and trainer.state.rate_scale == 0.5
    assert torch.equal(trainer.state.weight_P, build().state.weight_P)
    assert trainer.state.cursor == (1, 0)  # the data goes on
    assert run(trainer, packer(), 1).applied


def test_pack_without_weighted_tokens_is_skipped_without_error():
    trainer = build()
    pack, _ = Packer(Documents(document(9, 9, 1)), 40, 7).next(Cursor())
    assert not pack.roots
    before = bits(trainer.state)
    outcome = trainer.step([pack])
    assert not outcome.applied and trainer.undone == 0 and same(before, bits(trainer.state))


def test_last_state_is_written_after_a_slow_checkpoint(tmp_path, monkeypatch):
    trainer, disk, write = build(), threading.Event(), checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *a: disk.wait(60) and write(*a))
    checkpoints = Checkpoints(tmp_path, trainer, IDENTITY)
    assert checkpoints.begin()
    run(trainer, packer(), 1)  # hands the copy to the writer
    ending = threading.Thread(target=checkpoints.finish)
    ending.start()
    ending.join(0.1)  # it waits for the disk
    disk.set()
    ending.join()
    assert checkpoints.written == 2 and not checkpoints.skipped
    assert newest(tmp_path, IDENTITY)[0].state.step == 1


def test_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path):
    whole, stopped, resumed = build(), build(), build()
    run(whole, packer(), 9)
    checkpoints = Checkpoints(tmp_path, stopped, IDENTITY)
    for _ in range(4):
        run(stopped, packer(), 1)
        assert checkpoints.begin()
        run(stopped, packer(), 1)  # the copy holds the state before this step
        checkpoints.close()
    assert checkpoints.written == 4 and not checkpoints.failure
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-0000000005.safetensors",
        "step-0000000007.safetensors",
    ]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    found, faults = newest(tmp_path, IDENTITY)
    assert not faults and found.state.step == 7
    resumed.restore(found.state)
    run(resumed, packer(), 2)
    assert same(bits(whole.state), bits(resumed.state))
    assert resumed.state.cursor == whole.state.cursor


def test_two_failed_steps_restore_the_last_checkpoint(tmp_path):
    trainer = build()
    checkpoints = Checkpoints(tmp_path, trainer, IDENTITY)
    run(trainer, packer(), 3)
    before = bits(trainer.state)
    checkpoints.begin()
    run(trainer, packer(), 2)
    for _ in range(2):
        trainer.step([poisoned(trainer)])
    assert same(before[:3], list(trainer.state.tensors())) and trainer.state.step == 3
    checkpoints.close()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_damaged_checkpoint_is_named_and_the_older_one_loaded(tmp_path, damage):
    trainer = build()
    for _ in range(2):
        run(trainer, packer(), 1)
        path = checkpoint.write(tmp_path, trainer.state, IDENTITY)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-100] ^= 1
    path.write_bytes(
        {"cut": content[:-10], "flipped": content, "empty": b"", "foreign": b"{}" * 40}[damage]
    )
    found, faults = newest(tmp_path, IDENTITY)
    assert found.state.step == 1 and len(faults) == 1 and str(path) in faults[0]


def test_checkpoint_of_a_different_run_is_refused_with_values(tmp_path):
    checkpoint.write(tmp_path, build().state, {"objective": "hass"})
    with pytest.raises(StorageFailed, match="objective is 'hass' there and 'eagle3' here"):
        newest(tmp_path, IDENTITY)
    assert newest(tmp_path / "none", IDENTITY) == (None, [])


def test_unwritable_directory_is_reported_and_training_continues(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = build()
    checkpoints = Checkpoints(tmp_path / "file" / "below", trainer, IDENTITY)
    checkpoints.begin()
    assert run(trainer, packer(), 1).applied
    checkpoints.close()
    assert "no checkpoint was written" in checkpoints.failure and checkpoints.written == 0
    assert checkpoints.begin()  # and it is tried again
