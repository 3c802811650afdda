"""Matmuls and gates with float32 weights: values and gradients are those of plain autograd."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from tests.trainer.tiny import Documents, document, frozen, network
from tlt_server.trainer.learning.network import gated, linear
from tlt_server.trainer.learning.objectives import make_objective
from tlt_server.trainer.learning.pack import Cursor, Packer
from tlt_server.trainer.learning.step import Trainer


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).float() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_layer_gradients_equal_autograd(dtype, biased):
    x, weight, bias, grad = drawn((5, 8), (3, 8), (3,), (5, 3), dtype=dtype)
    leaves = [y.clone().requires_grad_() for y in (x, weight, bias)]
    found = linear(leaves[0].to(dtype), leaves[1], weight.to(dtype), leaves[2] if biased else None)
    found.backward(grad)
    plain = [y.clone().requires_grad_() for y in (x, weight, bias)]
    expected = functional.linear(plain[0], plain[1], plain[2] if biased else None)
    expected.backward(grad)
    exact = dtype == torch.float32
    torch.testing.assert_close(
        found, expected, rtol=0 if exact else 1e-2, atol=0 if exact else 2e-2
    )
    # The products of bfloat16 values are exact in float32, so only the way down is rounded.
    torch.testing.assert_close(leaves[1].grad, plain[1].grad, rtol=1e-6, atol=1e-6)
    tolerance = 1e-6 if exact else 2e-2
    torch.testing.assert_close(leaves[0].grad, plain[0].grad, rtol=tolerance, atol=tolerance)
    if biased:
        torch.testing.assert_close(leaves[2].grad, plain[2].grad)


def test_gate_saves_its_inputs_in_the_narrow_dtype():
    gate, up, grad = drawn((4, 6), (4, 6), (4, 6), dtype=torch.bfloat16)
    results = []
    for work in (lambda g, u: gated(g, u, torch.bfloat16), lambda g, u: functional.silu(g) * u):
        leaves = [y.clone().requires_grad_() for y in (gate, up)]
        value = work(*leaves)
        value.backward(grad)
        results.append((value, *(leaf.grad for leaf in leaves)))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_weights_are_cast_once_in_a_step():
    drafter = network()
    trainer = Trainer(drafter, frozen(drafter), make_objective("eagle3"))
    pack, _ = Packer(Documents(document(9, 2, 1)), 40, 7).next(Cursor())
    seen = []
    for _ in trainer.segments([pack]):
        seen.append(dict(drafter._cast))
    within = [cast for cast in seen if cast]
    assert len(within) >= 14 and not drafter._cast  # seven steps forward and backward
    assert all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in pairwise(within))
