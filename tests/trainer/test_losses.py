"""Pairing and loss terms of drafter training, against brute-force twins at tiny sizes."""

import pytest
import torch

from tests.trainer.tiny import random
from tlt_server.trainer.learning import objectives

T = 9


def test_feature_pairing_equals_its_brute_force_twin():
    at = torch.arange(T)
    pairs = objectives.pair(at, at[:, None] + 0.25, at[:, None] + 0.5, at > 4)
    for n, slot in enumerate(range(1, T)):
        assert pairs.token_N[n] == slot  # x_r
        assert pairs.feature_NF[n] == slot - 1 + 0.25  # enters with the token before
        assert pairs.teacher_NH[n] == slot + 0.5  # says what follows x_r
        assert pairs.counted_N[n] == (slot > 4)


@pytest.mark.parametrize("step", range(4))
def test_loss_weights_stay_within_one_document(step):
    root = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    predicted = torch.tensor([False, True, True, False, True, True])
    left = torch.tensor([3, 2, 1, 0, 1, 0])  # two documents, of four and of two slots
    document = [0, 0, 0, 0, 1, 1]
    for n, weight in enumerate(objectives.slot_weights(root, predicted, left, step).tolist()):
        ahead = n + step + 1
        inside = ahead < 6 and document[ahead] == document[n] and bool(predicted[ahead])
        assert weight == float(root[n]) * inside


def test_soft_cross_entropy_is_minimal_at_the_teacher():
    teacher = torch.tensor([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0]])
    entropy = -(teacher[0] * teacher[0].log()).sum()
    matched = torch.stack([teacher[0].log(), torch.tensor([-9.0, 9.0, -9.0])])
    found = objectives.soft_cross_entropy(matched, teacher)
    torch.testing.assert_close(found, torch.stack([entropy, torch.tensor(0.0)]))
    assert (objectives.soft_cross_entropy(torch.zeros(2, 3), teacher) > found).all()


def test_total_variation_is_one_minus_the_overlap():
    teacher, logits = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.2, 0.3, 0.5]]).log()
    torch.testing.assert_close(objectives.total_variation(logits, teacher), torch.tensor([0.5]))


def test_hass_loss_counts_only_the_most_likely_tokens():
    teacher, logits = torch.tensor([[0.6, 0.3, 0.1]]), random(1, 3, seed=3)
    expected = -(teacher * logits.log_softmax(-1))[:, :2].sum(-1)
    torch.testing.assert_close(objectives.top_cross_entropy(logits, teacher, 2), expected)
    whole = objectives.soft_cross_entropy(logits, teacher)
    torch.testing.assert_close(objectives.top_cross_entropy(logits, teacher, 10), whole)


def refusal_slowly(q, p):
    """One minus sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), by its definition."""
    ratio_p, ratio_q = (x[..., None, :] / x[..., :, None] for x in (p, q))
    return 1 - (1 / torch.maximum(ratio_p, ratio_q).sum(-1)).sum(-1)


def test_shared_noise_by_sorting_equals_the_double_sum():
    p = (3 * random(50, 17, seed=1)).double().softmax(-1)
    slow = random(50, 17, seed=2).double().requires_grad_()
    fast = slow.detach().float().requires_grad_()
    expected = refusal_slowly(slow.softmax(-1), p)
    found = objectives.shared_noise_refusal(fast, p.float())
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(fast.grad.double(), slow.grad, atol=1e-5, rtol=1e-3)


def test_shared_noise_refusal_matches_simulated_choices():
    generator = torch.Generator().manual_seed(5)
    p, logits = random(6, seed=6).softmax(-1), random(6, seed=7)
    draws = torch.empty(400_000, 6).exponential_(generator=generator).log()
    same = (p.log() - draws).argmax(-1) == (logits - draws).argmax(-1)
    refused = objectives.shared_noise_refusal(logits[None], p[None])
    # The standard error of the simulated share is below 0.0008.
    assert abs(1 - float(same.double().mean()) - float(refused)) < 0.004
    assert float(refused) > float(objectives.total_variation(logits[None], p[None]))


@pytest.mark.parametrize("scale", [0.0, 200.0])
def test_shared_noise_is_finite_at_ties_and_at_certainty(scale):
    """Equal logits tie every ratio; scores of 200 nats underflow to probabilities of zero."""
    logits = (random(4, 9, seed=8) * scale).requires_grad_()
    teacher = (random(4, 9, seed=9) * scale).softmax(-1)
    refused = objectives.shared_noise_refusal(logits, teacher)
    refused.sum().backward()
    assert torch.isfinite(refused).all() and torch.isfinite(logits.grad).all()
    assert (refused > -1e-5).all() and (refused < 1 + 1e-5).all()
    same = objectives.shared_noise_refusal(teacher.clamp(min=1e-38).log(), teacher)
    torch.testing.assert_close(same, torch.zeros(4), atol=1e-5, rtol=0)
