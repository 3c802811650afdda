"""Pairing and losses of drafter training, against brute-force twins at tiny sizes."""

import pytest
import torch

from tlt_server.trainer import losses

B, T, H, V = 2, 9, 3, 7


def numbered() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, features and teacher whose values name their (sequence, position)."""
    name = torch.arange(B)[:, None] * 100 + torch.arange(T)
    return name, name[..., None].expand(B, T, H) + 0.25, name[..., None].expand(B, T, V) + 0.5


@pytest.mark.parametrize("step", range(T - 2))
def test_pairing_equals_its_brute_force_twin(step):
    tokens, features, teacher = numbered()
    pairs = losses.pair(tokens, features, teacher, step)
    roots = [r for r in range(1, T) if r + step + 1 <= T - 1]
    assert pairs.inputs_BN.shape == (B, len(roots))
    for b in range(B):
        for n, root in enumerate(roots):
            drafted = root + step
            assert pairs.inputs_BN[b, n] == tokens[b, drafted]
            assert pairs.features_BNH[b, n].equal(features[b, root - 1])
            assert pairs.next_features_BNH[b, n].equal(features[b, drafted])
            assert pairs.teacher_BNV[b, n].equal(teacher[b, drafted])
            assert pairs.labels_BN[b, n] == tokens[b, drafted + 1]


def test_a_step_further_than_the_sequence_is_refused():
    with pytest.raises(ValueError, match="at least"):
        losses.pair(*numbered(), step=T - 2)


def test_slot_weights_count_root_and_prediction():
    counted = torch.tensor([[False, False, True, True, True, False]])
    assert losses.slot_weights(counted, 0).tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert losses.slot_weights(counted, 1).tolist() == [[0.0, 1.0, 0.0]]


def test_restricting_renormalises_and_marks_what_is_covered():
    kept = torch.tensor([1, 4, 6])
    d2t, t2d = kept - torch.arange(3), torch.zeros(V, dtype=torch.bool).index_fill(0, kept, True)
    logits = torch.randn(
        (5, V), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).float()
    teacher = losses.restrict(logits, d2t, t2d)
    whole = logits.softmax(-1)
    torch.testing.assert_close(
        teacher.probabilities, whole[:, kept] / whole[:, kept].sum(-1, keepdim=True)
    )
    assert teacher.covered.tolist() == [float(int(row.argmax()) in (1, 4, 6)) for row in logits]


def test_soft_cross_entropy_is_least_at_the_teacher_and_ignores_zero_weights():
    teacher = torch.tensor([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0]])
    weights = torch.tensor([1.0, 0.0])
    entropy = -(teacher[0] * teacher[0].log()).sum()
    matched = torch.stack([teacher[0].log(), torch.tensor([9.0, -9.0, 0.0])])
    torch.testing.assert_close(losses.soft_cross_entropy(matched, teacher, weights), entropy)
    assert losses.soft_cross_entropy(torch.zeros(2, 3), teacher, weights) > entropy


def test_total_variation_is_one_minus_the_overlap():
    teacher, logits = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.2, 0.3, 0.5]]).log()
    torch.testing.assert_close(
        losses.total_variation(logits, teacher, torch.ones(1)), torch.tensor(0.5)
    )


def test_steps_are_weighted_by_decay():
    torch.testing.assert_close(
        losses.over_steps([torch.tensor(1.0), torch.tensor(4.0)], decay=0.5), torch.tensor(2.0)
    )


def test_no_weight_at_all_gives_a_zero_with_a_gradient():
    logits = torch.zeros((2, 3), requires_grad=True)
    losses.soft_cross_entropy(logits, torch.full((2, 3), 1 / 3), torch.zeros(2)).backward()
    assert logits.grad.abs().max() == 0
