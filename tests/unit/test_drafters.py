"""The promises that every drafter in the table must keep."""

import numpy as np
import pytest

from tests.unit.fake_eagle import VOCABULARY, FakeEngine, FakeNetwork
from tlt_server.models.draft_networks import ARCHITECTURES
from tlt_server.models.eagle import EagleNetwork
from tlt_server.registry import load_object
from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.calibration import Calibration
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.drafters.cpu import DraftSetup, DraftWeights
from tlt_server.speculation.tree import select
from tlt_server.wire.records import Strategy


def make(name, engine):
    known = DRAFTERS[name]
    weights = DraftWeights(FakeNetwork(), Calibration()) if known.needs_weights else None
    setup = DraftSetup(name, engine.cache, weights, max_requests=8, max_rows=200)
    return load_object(known.cpu.implementation).make(setup)


@pytest.fixture(params=list(DRAFTERS))
def drafted(request):
    """(drafter, engine, names) with three requests that repeat themselves, so that every drafter
    has something to say.
    """
    engine = FakeEngine()
    for name, length in (("a", 6), ("b", 23), ("c", 41)):
        engine.extend(name, [1 + i % 5 for i in range(length)])
    return make(request.param, engine), engine, ["a", "b", "c"]


def assert_well_formed(candidates, batch, strategy):
    for n in range(len(candidates)):
        b, parent = candidates.request_N[n], candidates.parent_N[n]
        assert 0 <= b < len(batch) and -1 <= parent < n
        assert 0 <= candidates.token_N[n] < VOCABULARY
        assert 1 <= candidates.depth_N[n] <= min(strategy.depth, batch.max_depth_B[b])
        assert 0 <= candidates.rank_N[n] < strategy.width
        above = 1.0 if parent < 0 else candidates.acceptance_N[parent]
        assert 0 <= candidates.acceptance_N[n] <= above
        if parent >= 0:
            assert candidates.request_N[parent] == b
            assert candidates.depth_N[parent] == candidates.depth_N[n] - 1
    *others, acceptance_N, cell_N = vars(candidates).values()
    assert acceptance_N.dtype == np.float32
    assert all(a.dtype == np.int32 for a in (*others, cell_N))
    assert all(len(a) == len(candidates) for a in vars(candidates).values())
    siblings = list(zip(candidates.request_N, candidates.parent_N, candidates.token_N, strict=True))
    assert len(set(siblings)) == len(siblings)


@pytest.mark.parametrize(
    "strategy",
    [Strategy("x", 1, 1, 2), Strategy("x", 5, 1, 6), Strategy("x", 6, 3, 12)],
    ids=lambda s: s.name,
)
def test_draft_candidates_are_well_formed(drafted, strategy):
    drafter, engine, names = drafted
    for _ in range(3):
        batch = engine.batch(names)
        candidates = drafter.propose(batch, strategy)
        assert len(candidates)
        assert_well_formed(candidates, batch, strategy)
        select(candidates, len(batch), 10)
        for name in names:
            engine.extend(name, [1 + len(engine.tokens[name]) % 5])


def test_drafter_proposes_well_while_requests_come_and_go(drafted):
    drafter, engine, _ = drafted
    random, strategy = np.random.default_rng(0), Strategy("x", 4, 2, 8)
    alive = ["a", "b", "c"]
    for step in range(40):
        batch = engine.batch(alive, temperature=float(random.integers(0, 2)))
        candidates = drafter.propose(batch, strategy)
        assert_well_formed(candidates, batch, strategy)
        drafter.observe(batch, candidates, random.integers(-1, 2, len(candidates)).astype(np.int8))
        for name in alive:
            engine.extend(name, random.integers(0, VOCABULARY, int(random.integers(1, 4))).tolist())
        if step % 5 == 4:
            gone = alive.pop(0)
            drafter.finish(gone, gone, np.array(engine.tokens[gone], np.int32), 1)
            engine.cache.reuse(engine.release(gone))
            alive.append(f"n{step}")
            engine.extend(alive[-1], random.integers(0, VOCABULARY, 7).tolist())
    assert all(isinstance(value, float) for value in drafter.gauges().values())


def test_drafter_proposes_no_draft_that_cannot_be_used(drafted):
    drafter, engine, names = drafted
    assert len(drafter.propose(engine.batch(names, max_depth=0), Strategy("x", 4, 2, 8))) == 0
    assert len(drafter.propose(engine.batch(names), Strategy("x", 0, 0, 1))) == 0


def test_draft_depth_limit_holds_per_request(drafted):
    drafter, engine, names = drafted
    batch = engine.batch(names)
    batch.max_depth_B[:] = [0, 2, 9]
    candidates = drafter.propose(batch, Strategy("x", 5, 2, 12))
    deepest = [candidates.depth_N[candidates.request_N == b].max(initial=0) for b in range(3)]
    assert deepest[0] == 0 and deepest[1] <= 2 and deepest[2] >= 1


@pytest.mark.parametrize("row", ["eagle", "of another name"])
def test_drafter_tables_and_gauges_have_the_registered_name(row):
    weights = DraftWeights(FakeNetwork(), Calibration())
    setup = DraftSetup(row, FakeEngine().cache, weights, max_requests=8, max_rows=200)
    drafter = load_object(DRAFTERS["eagle"].cpu.implementation).make(setup)
    assert list(drafter.tables) == [row] and f"{row}_forwards" in drafter.gauges()


def test_drafter_handles_a_request_of_one_token(drafted):
    drafter, engine, _ = drafted
    engine.extend("tiny", [3])
    batch, strategy = engine.batch(["tiny", "a"]), Strategy("x", 3, 2, 8)
    assert_well_formed(drafter.propose(batch, strategy), batch, strategy)


def test_empty_observation_does_not_change_the_drafter(drafted):
    drafter, engine, names = drafted
    before = drafter.gauges()
    drafter.observe(engine.batch(names), Candidates.empty(), np.zeros(0, np.int8))
    assert drafter.gauges() == before


def test_every_draft_architecture_names_a_drafter():
    assert set(ARCHITECTURES) <= {name for each in DRAFTERS.values() for name in each.architectures}
    for network in ARCHITECTURES.values():
        assert issubclass(load_object(network.cpu), EagleNetwork)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_registry_entry_names_implementation_and_ascending_rungs(name, device):
    half = DRAFTERS[name].half(device)
    assert callable(load_object(half.implementation).make)
    assert half.rungs and sorted(half.rungs, key=lambda rung: rung[2]) == list(half.rungs)
    assert all(depth >= 1 <= width and 2 <= rows for depth, width, rows in half.rungs)


def test_drafter_works_after_new_weights_and_a_sleep(drafted):
    drafter, engine, names = drafted
    strategy = Strategy("x", 4, 1, 5)
    before = drafter.propose(engine.batch(names), strategy)
    weights = getattr(drafter, "network", None) and DraftWeights(FakeNetwork(seed=1), Calibration())
    drafter.install(weights)
    for cache in drafter.caches:
        cache.free()
        cache.reclaim()
    engine.cache.reuse(range(engine.cache.pages))
    after = drafter.propose(engine.batch(names), strategy)
    assert len(before) and len(after)
    assert_well_formed(after, engine.batch(names), strategy)
