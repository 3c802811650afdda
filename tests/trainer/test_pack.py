"""Packs: windows, full budgets, and losses and gradients that are the sums over documents."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.tiny import Documents, document, frozen, network
from tlt_server.errors import InvalidRequest
from tlt_server.trainer.learning.objectives import make_objective
from tlt_server.trainer.learning.pack import (
    Cursor,
    Packer,
    PacksAhead,
    Placed,
    assemble,
    fit,
    windows,
)
from tlt_server.trainer.learning.unroll import Sums, accumulate, chunks, weights_of


@given(length=st.integers(0, 400), budget=st.integers(16, 64), steps=st.integers(1, 7))
def test_every_root_is_in_one_window_with_all_its_steps(length, budget, steps):
    seen = []
    for window in windows(0, length, budget, steps):
        assert 0 <= window.start < window.first <= window.end <= window.stop <= length
        assert window.slots <= budget
        # A root is no deeper cut off than by the document's own end.
        assert window.stop == length or window.end - 1 + steps < window.stop
        context = window.first - window.start - 1
        assert window.start == 0 or context >= budget // 4
        seen += range(window.first, window.end)
    assert seen == (list(range(1, length)) if length > 2 else [])


def test_token_budget_below_one_window_is_refused():
    with pytest.raises(InvalidRequest, match="use at least 28"):
        list(windows(0, 100, 9, 7))


@given(lengths=st.lists(st.integers(3, 65), min_size=1, max_size=60))
def test_packs_hold_every_window_once_within_the_budget(lengths):
    pieces = [w for d, n in enumerate(lengths) for w in windows(d, n, 64, 3)]
    packs = fit(pieces, 64)
    assert all(sum(placed.width for placed in pack) <= 64 for pack in packs)
    assert sorted(placed.window for pack in packs for placed in pack) == sorted(pieces)
    # No two packs would fit into one.
    used = sorted(sum(placed.width for placed in pack) for pack in packs)
    assert len(used) < 2 or used[0] + used[1] > 64


def gradients(drafter, fixed, objective, packs):
    """Unnormalised losses by step, and all gradients."""
    for weight in drafter.weights.values():
        weight.requires_grad_().grad = None
    sums = Sums.zero(objective.steps, torch.device("cpu"))
    factor = 0.8 ** torch.arange(objective.steps)
    for pack in packs:
        for _ in accumulate(drafter, fixed, objective, pack, factor, sums):
            pass
    grads = {
        name: torch.zeros_like(w) if w.grad is None else w.grad.clone()
        for name, w in drafter.weights.items()
    }
    return sums, grads


@settings(max_examples=15)
@given(
    shapes=st.lists(st.tuples(st.integers(3, 12), st.integers(0, 6)), min_size=1, max_size=5),
    name=st.sampled_from(["eagle", "hass", "eagle3"]),
    acceptance=st.sampled_from(["none", "total-variation", "shared-noise"]),
    spare=st.integers(0, 9),
)
def test_pack_loss_and_gradients_sum_over_its_documents(shapes, name, acceptance, spare):
    drafter, objective = network(), make_objective(name, acceptance)
    fixed = frozen(drafter)
    source = Documents(*(document(n, p, seed) for seed, (n, p) in enumerate(shapes)))
    pieces = [w for d, (n, _) in enumerate(shapes) for w in windows(d, n, 100, objective.steps)]
    wide = sum(w.slots for w in pieces) + spare
    (placed,) = fit(pieces, wide)
    whole = assemble(source, placed, wide)
    apart = [assemble(source, [one], one.width) for one in placed]
    together, packed = gradients(drafter, fixed, objective, [whole])
    alone, summed = gradients(drafter, fixed, objective, apart)
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    for key in packed:
        # float32 sums over at most 60 slots, in another order.
        torch.testing.assert_close(packed[key], summed[key], atol=2e-5, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_slots_before_the_first_root_need_only_keys_and_values(name):
    """The twin computes every slot: spans of roots from the first slot to the last leave none out,
    and those without weight add nothing.
    """
    drafter, objective = network(), make_objective(name)
    fixed, shapes = frozen(drafter), ((9, 0), (12, 7), (5, 5), (8, 3))  # the third has no root
    source = Documents(*(document(n, p, seed) for seed, (n, p) in enumerate(shapes)))
    pieces = [w for d, (n, _) in enumerate(shapes) for w in windows(d, n, 60, 7)]
    pack = assemble(source, fit(pieces, 40)[0], 40)
    assert pack.first_queries() == (0, 8 + 6, 8 + 11 + 3, 8 + 11 + 4 + 2, 39)
    every = replace(pack, roots=((0, 40),))
    assert every.first_queries() == pack.bounds[:-1]
    for ours, twin in zip(
        *(gradients(drafter, fixed, objective, [each]) for each in (pack, every)), strict=True
    ):
        ours, twin = (dict(x._asdict()) if isinstance(x, Sums) else x for x in (ours, twin))
        for key in twin:
            torch.testing.assert_close(ours[key], twin[key], atol=2e-5, rtol=1e-3, msg=key)


def test_a_padded_batch_has_the_gradients_of_a_pack():
    drafter, objective = network(), make_objective("eagle3")
    fixed, lengths = frozen(drafter), (5, 9, 12)
    source = Documents(*(document(n, 2, seed) for seed, n in enumerate(lengths)))
    pieces = [w for d, n in enumerate(lengths) for w in windows(d, n, 64, 7)]
    batches = [[Placed(window, 11) for window in batch] for batch in (pieces[:2], pieces[2:])]
    found = [
        gradients(drafter, fixed, objective, [assemble(source, p, s) for p, s in laid])[1]
        for laid in ([(fit(pieces, 64)[0], 64)], [(batch, 11 * len(batch)) for batch in batches])
    ]
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], atol=2e-5, rtol=1e-3, msg=key)


def test_prompt_and_out_of_vocabulary_tokens_have_no_weight():
    drafter = network()
    source = Documents(document(12, 5, seed=1))
    (window,) = windows(0, 12, 20, 2)
    pack = assemble(source, fit([window], 20)[0], 20)
    tokens, drafted = source.pieces[0].tokens_T, set(drafter.target_ids_C.tolist())
    for step, weights in enumerate(weights_of(frozen(drafter), pack, 2).tolist()):
        for slot, weight in enumerate(weights):
            root, ahead = slot + 1, slot + 2 + step
            counts = root >= 5 and ahead < 12 and int(tokens[ahead]) in drafted
            assert weight == float(counts)


def test_epoch_order_depends_only_on_seed_and_number():
    source = Documents(*(document(5 + n % 9, 2, n) for n in range(20)))
    first, second = (Packer(source, 32, 3, seed=4) for _ in range(2))
    cursor = Cursor()
    for _ in range(9):
        pack, after = first.next(cursor)
        assert torch.equal(pack.token_N, second.next(cursor)[0].token_N) and len(pack) == 32
        cursor = after
    assert cursor.epoch > 0 and first.plan(0) != first.plan(1)
    assert Packer(source, 32, 3, seed=5).plan(0) != second.plan(0)


@pytest.mark.parametrize("ahead", [False, True])
def test_prefetched_packs_equal_the_packers_packs(ahead):
    source = Documents(*(document(5 + n % 9, 2, n) for n in range(20)))
    plain, cpu = Packer(source, 32, 3), torch.device("cpu")
    cursors = [Cursor()]
    with PacksAhead(Packer(source, 32, 3), cpu, torch.float32, ahead=ahead) as packs:
        for _ in range(2 * len(plain.plan(0))):
            pack, after = packs.next(cursors[-1])
            expected, place = plain.next(cursors[-1])
            assert after == place and pack.bounds == expected.bounds
            assert torch.equal(pack.feature_NF, expected.feature_NF)
            cursors.append(after)
        again, _ = packs.next(cursors[3])  # another one than comes next
        assert torch.equal(again.token_N, plain.next(cursors[3])[0].token_N)
    assert cursors[-1].epoch > 0


def test_prefetch_fault_is_raised_when_its_pack_is_read():
    class Lost(Documents):
        def read(self, document, start, stop):
            if document == lost[0].window.document:
                raise OSError("gone")
            return super().read(document, start, stop)

    source = Lost(*(document(9, 2, n) for n in range(12)))
    packer, cursor = Packer(source, 32, 3), Cursor()
    lost = packer.plan(0)[1]
    with PacksAhead(packer, torch.device("cpu"), torch.float32, ahead=True) as packs:
        _, cursor = packs.next(cursor)
        with pytest.raises(OSError, match="gone"):
            packs.next(cursor)


def test_documents_without_a_root_are_refused():
    with pytest.raises(InvalidRequest, match="all 2 documents have fewer than three tokens"):
        Packer(Documents(document(2, 0, 1), document(1, 0, 2)), 32, 3)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=8), st.integers(1, 12))
def test_chunks_hold_every_slot_of_the_spans_once_and_in_order(lengths, size):
    spans, at = [], 0
    for length, gap in lengths:
        spans.append((at, at + length))
        at += length + gap
    found = list(chunks(spans, size))
    slots = [slot for chunk in found for span in chunk for slot in range(*span)]
    assert slots == [slot for span in spans for slot in range(*span)]
    counts = [sum(stop - start for start, stop in chunk) for chunk in found]
    assert counts[:-1] == [size] * (len(counts) - 1) and all(0 < n <= size for n in counts[-1:])
