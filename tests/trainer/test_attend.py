"""Attention over trunk and branch against a dense twin with a mask over the whole pack."""

import pytest
import torch

from tests.trainer.tiny import random
from tlt_server.trainer.learning import attend as attend_module
from tlt_server.trainer.learning.attend import Blocks, attend

A, K, D = 4, 2, 8


def attend_densely(bounds, queries, q, k, v, branch_k, branch_v):
    """One softmax over an N x N mask of the trunk and the branch's own keys."""
    slots = len(k)
    document = torch.bucketize(torch.arange(slots), torch.tensor(bounds[1:-1]), right=True)
    seen = (document[:, None] == document) & torch.ones(slots, slots, dtype=torch.bool).tril()
    seen = seen[queries]
    k, v, *branch = (x.repeat_interleave(A // K, 1) for x in (k, v, *branch_k, *branch_v))
    scores = [torch.einsum("nad,mad->nam", q, k).masked_fill(~seen[:, None], float("-inf"))]
    scores += [(q * key).sum(-1, keepdim=True) for key in branch[: len(branch_k)]]
    weights = (torch.cat(scores, -1) * D**-0.5).softmax(-1)
    out = torch.einsum("nam,mad->nad", weights[..., :slots], v)
    for step, value in enumerate(branch[len(branch_k) :]):
        out = out + weights[..., slots + step, None] * value
    return out


@pytest.mark.parametrize("first", [None, (0, 4, 12, 13)])
@pytest.mark.parametrize("block", [3, 256])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_outputs_and_gradients_equal_the_dense_twin(monkeypatch, steps, block, first):
    monkeypatch.setattr(attend_module, "BLOCK", block)
    bounds = (0, 1, 8, 13, 20)
    parts = zip(first or bounds, bounds[1:], strict=False)
    queries = torch.cat([torch.arange(start, end) for start, end in parts])
    inputs = [random(len(queries), A, D, seed=1)]
    inputs += [random(20, K, D, seed=2 + i) for i in range(2)]
    inputs += [random(len(queries), K, D, seed=4 + i) for i in range(2 * steps)]
    grad = random(len(queries), A, D, seed=99)
    found = []
    for function in (attend_densely, attend):
        q, k, v, *branch = leaves = [x.clone().requires_grad_() for x in inputs]
        branches = branch[:steps], branch[steps:]
        if function is attend:
            out = attend(Blocks(bounds, first), torch.float32, q, k, v, *branches)
        else:
            out = attend_densely(bounds, queries, q, k, v, *branches)
        out.backward(grad)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, dense in zip(*found, strict=True):
        # Sums of at most 20 float32 products in another order.
        torch.testing.assert_close(ours, dense, atol=2e-6, rtol=1e-4)


def test_leaking_mask_is_detected():
    """The control of the test above: one bound too few changes the keys visible to a slot."""
    q, k, v = random(8, A, D, seed=1), random(8, K, D, seed=2), random(8, K, D, seed=3)
    apart = attend(Blocks((0, 4, 8)), torch.float32, q, k, v)
    leaking = attend(Blocks((0, 8)), torch.float32, q, k, v)
    # Matmuls of other sizes may round otherwise.
    torch.testing.assert_close(apart[:4], leaking[:4], atol=2e-6, rtol=1e-4)
    assert (apart[4:] - leaking[4:]).abs().max() > 0.1
