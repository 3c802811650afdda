"""The grown tree against a twin without KV cache, lazy catch-up against always-on, page reuse, and
the children kernel.
"""

import numpy as np
import pytest
import torch

from tests.unit.fake_eagle import PAGE_SIZE, VOCABULARY, FakeEngine, FakeNetwork
from tlt_kernels.cpu.growth import children
from tlt_kernels.cpu.noise import gumbel
from tlt_server.speculation.calibration import Calibration
from tlt_server.speculation.drafters.cpu import DraftSetup, DraftWeights
from tlt_server.speculation.drafters.eagle import Eagle
from tlt_server.speculation.tree import select
from tlt_server.wire.records import Strategy


def children_slowly(logits, target_ids, seed, position, temperature, count):
    def perturbed(q, v):
        return np.float32(q) / np.float32(temperature) + gumbel(seed, int(v), position)

    pairs = zip(logits, target_ids, strict=True)
    z = [float(perturbed(q, v) if temperature else q) for q, v in pairs]
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))[:count]
    return [int(target_ids[i]) for i in order], [z[i] for i in order]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("vocabulary", [3, 60, 5000])
def test_draft_children_have_the_best_perturbed_logits(temperature, vocabulary):
    random = np.random.default_rng(vocabulary)
    logits = random.standard_normal((6, vocabulary)) * random.uniform(0.1, 12, (6, 1))
    logits = logits.astype(np.float32)
    ids = np.sort(random.choice(3 * vocabulary, vocabulary, replace=False)).astype(np.int64)
    seeds = random.integers(0, 2**64, 6, dtype=np.uint64)
    positions = random.integers(0, 10000, 6)
    token_RW, z_RW = np.zeros((6, 4), np.int64), np.zeros((6, 4), np.float32)
    children(logits, ids, seeds, positions, np.full(6, temperature, np.float32), token_RW, z_RW)
    for r in range(6):
        tokens, z = children_slowly(logits[r], ids, seeds[r], positions[r], temperature, 4)
        assert token_RW[r, : len(tokens)].tolist() == tokens
        np.testing.assert_allclose(z_RW[r, : len(z)], z, rtol=1e-5, atol=1e-5)
        assert (token_RW[r, len(tokens) :] == -1).all()


def tree_slowly(network, calibration, tokens, features, seed, temperature, depth, width, floor):
    """Best-first growth, every hidden state from scratch: {path of tokens: (rank, survival)}."""
    nodes = {}

    def plant(path):
        acceptance = nodes[path][1] if path else 1.0
        logits = network.logits(network.hidden_of(tokens, features, path)[None])[0].numpy()
        ids, at = network.target_ids.numpy(), len(tokens) + len(path)
        names, z = children_slowly(logits, ids, seed, at, temperature, max(width, 2))
        for rank in range(width):
            cell = calibration.cell(0 if not path else 1, rank, z[0] - z[max(rank, 1)])
            nodes[(*path, names[rank])] = (rank, acceptance * calibration.acceptance_K[cell])

    plant(())
    expanded = set()
    for _ in range(depth - 1):
        open_ones = [path for path in nodes if path not in expanded and len(path) < depth]
        ready = [path for path in open_ones if nodes[path][1] > floor]
        for path in sorted(ready, key=lambda path: -nodes[path][1])[:width]:
            expanded.add(path)
            plant(path)
    return nodes


def as_paths(candidates, request):
    paths, out = {}, {}
    for n in np.flatnonzero(candidates.request_N == request):
        parent = candidates.parent_N[n]
        paths[n] = (*(paths[parent] if parent >= 0 else ()), int(candidates.token_N[n]))
        assert len(paths[n]) == candidates.depth_N[n]
        out[paths[n]] = (int(candidates.rank_N[n]), float(candidates.acceptance_N[n]))
    return out


def assert_same_tree(found, expected):
    assert found.keys() == expected.keys()
    for path, (rank, acceptance) in expected.items():
        assert found[path][0] == rank
        # Float32 products of eight factors.
        assert found[path][1] == pytest.approx(acceptance, rel=1e-4)


def build(engine, network, max_rows=256, **options):
    weights = DraftWeights(network, Calibration())
    setup = DraftSetup("eagle", engine.cache, weights, max_requests=4, max_rows=max_rows)
    return Eagle(setup, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("depth", "width"), [(1, 3), (3, 1), (4, 2), (5, 4)])
def test_draft_tree_equals_that_of_the_twin_without_a_cache(temperature, depth, width):
    engine, network = FakeEngine(), FakeNetwork(draft_vocabulary=VOCABULARY - 3)
    eagle = build(engine, network)
    random = np.random.default_rng(depth)
    names = ["a", "b", "c"]
    for name, length in zip(names, (2, 9, 40), strict=True):
        engine.extend(name, random.integers(0, VOCABULARY, length).tolist())
    for _ in range(3):
        batch = engine.batch(names, temperature=temperature)
        candidates = eagle.propose(batch, Strategy("eagle", depth, width, 999))
        for b, name in enumerate(names):
            text, how = engine.tokens[name], (temperature, depth, width, eagle.floor)
            read = text, engine.features(text), batch.seed_B[b]
            expected = tree_slowly(network, eagle.calibration, *read, *how)
            assert_same_tree(as_paths(candidates, b), expected)
            engine.extend(name, random.integers(0, VOCABULARY, int(random.integers(1, 7))).tolist())


def test_pruning_to_the_verify_budget_keeps_verified_tokens():
    engine, network = FakeEngine(), FakeNetwork()
    for name, length in (("a", 5), ("b", 21), ("c", 8)):
        engine.extend(name, np.random.default_rng(length).integers(0, VOCABULARY, length).tolist())
    batch = engine.batch(["a", "b", "c"])
    full = build(engine, network, floor=0.0).propose(batch, Strategy("eagle", 6, 4, 999))
    for rows in (2, 4, 8, 16):
        cut = build(engine, network, floor=0.0).propose(batch, Strategy("eagle", 6, 4, rows))
        assert len(cut) < len(full)
        wanted, got = (
            {(b, path) for b in range(3) for path in paths(candidates, b, 3 * (rows - 1))}
            for candidates in (full, cut)
        )
        assert wanted == got


def paths(candidates, request, budget):
    kept = set(select(candidates, 3, budget).node_M.tolist())
    tree, names = set(), {}
    for n in np.flatnonzero(candidates.request_N == request):
        parent = candidates.parent_N[n]
        names[n] = (*(names[parent] if parent >= 0 else ()), int(candidates.token_N[n]))
        if n in kept:
            tree.add(names[n])
    return tree


def test_drafter_enabled_late_equals_one_always_enabled():
    random = np.random.default_rng(5)
    engine, strategy = FakeEngine(pages=400), Strategy("eagle", 4, 3, 16)
    network = FakeNetwork()
    always, late = build(engine, network), build(engine, FakeNetwork())
    names = ["a", "b"]
    for name in names:
        engine.extend(name, random.integers(0, VOCABULARY, 3).tolist())
    for _ in range(12):
        always.propose(engine.batch(names), strategy)
        for name in names:
            more = int(random.integers(1, 90))  # over one chunk in all
            engine.extend(name, random.integers(0, VOCABULARY, more).tolist())
    batch = engine.batch(names)
    first, second = always.propose(batch, strategy), late.propose(batch, strategy)
    for b in range(2):
        assert_same_tree(as_paths(first, b), as_paths(second, b))
    certain = [(b, p) for b, p in late.network.stored if p < len(engine.tokens[names[b]])]
    each = [(b, p) for b in range(2) for p in range(1, len(engine.tokens[names[b]]))]
    assert sorted(certain) == each, "each slot once"


def test_shared_prefix_pages_are_computed_once_by_the_drafter():
    engine, network = FakeEngine(), FakeNetwork()
    prompt = list(range(3 * PAGE_SIZE))
    engine.extend("a", [*prompt, 1, 2])
    engine.extend("b", [*prompt, 5, 6, 7], shared=engine.pages["a"][:3])
    build(engine, network).propose(engine.batch(["a", "b"]), Strategy("eagle", 1, 2, 3))
    assert len(network.stored) == len(prompt) - 1 + 2 + 3


def test_reused_page_is_computed_again_by_the_drafter():
    engine, strategy = FakeEngine(pages=4), Strategy("eagle", 3, 2, 8)
    reused = build(engine, FakeNetwork())
    engine.extend("old", list(range(14)))
    reused.propose(engine.batch(["old"]), strategy)
    reused.pages_freed(engine.release("old"))
    engine.extend("new", list(range(30, 16, -1)))
    fresh = build(engine, FakeNetwork())
    batch = engine.batch(["new"])
    assert_same_tree(*(as_paths(e.propose(batch, strategy), 0) for e in (reused, fresh)))


def test_new_drafter_weights_discard_cached_states():
    engine, strategy = FakeEngine(), Strategy("eagle", 3, 2, 8)
    engine.extend("a", list(range(20)))
    batch = engine.batch(["a"])
    eagle = build(engine, FakeNetwork(seed=0))
    eagle.propose(batch, strategy)
    other = FakeNetwork(seed=1)
    eagle.install(DraftWeights(other, Calibration()))
    fresh = build(engine, other)
    assert_same_tree(*(as_paths(e.propose(batch, strategy), 0) for e in (eagle, fresh)))


def test_small_scratch_memory_limits_the_tree():
    engine, network = FakeEngine(), FakeNetwork()
    for name in "abcd":
        engine.extend(name, [1, 2, 3])
    for max_rows in (0, 1, 5, 13):
        eagle = build(engine, network, max_rows=max_rows)
        candidates = eagle.propose(engine.batch([*"abcd"]), Strategy("eagle", 6, 4, 99))
        assert candidates.depth_N.max() <= 1 + max_rows // 4
        assert np.isfinite(candidates.acceptance_N).all()


def test_verification_updates_the_calibration():
    engine, network = FakeEngine(), FakeNetwork()
    engine.extend("a", [1, 2, 3])
    eagle = build(engine, network)
    batch = engine.batch(["a"], temperature=0.0)
    before = eagle.calibration.acceptance.copy()
    for _ in range(40):
        candidates = eagle.propose(batch, Strategy("eagle", 2, 2, 8))
        eagle.observe(batch, candidates, np.where(candidates.rank_N == 1, 1, 0).astype(np.int8))
    after = eagle.calibration.acceptance
    assert (after[0, 0] < before[0, 0]).any() and (after[0, 1] > before[0, 1]).any()


def test_drafter_with_non_finite_logits_still_proposes():
    engine, network = FakeEngine(), FakeNetwork()
    engine.extend("a", [1, 2, 3])
    network.head = torch.full_like(network.head, float("nan"))
    candidates = build(engine, network).propose(engine.batch(["a"]), Strategy("eagle", 3, 2, 8))
    assert np.isfinite(candidates.acceptance_N).all()
