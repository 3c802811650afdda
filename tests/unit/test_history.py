"""Matching against a slow twin, the pool's bookkeeping, and what the history drafter makes of
siblings and repetition.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_kernels.cpu.match import match_cell, match_pool
from tlt_server.speculation.batch import DraftBatch
from tlt_server.speculation.drafters.history import (
    DEPTHS,
    PROMPTS,
    SHARES,
    History,
    HistorySettings,
    prior,
)
from tlt_server.speculation.drafters.token_pool import SEGMENTS, TokenPool
from tlt_server.wire.records import Strategy

STRATEGY = Strategy("history", 4, 2, 9)


def batch_of(requests, group="g", prompt_len=1, max_depth=99):
    """requests: name -> tokens."""
    count = len(requests)
    return DraftBatch(
        ids=list(requests),
        group_ids=[group] * count,
        tokens=[np.array(tokens, np.int32) for tokens in requests.values()],
        prompt_len_B=np.full(count, prompt_len, np.int32),
        page_table_BP=np.zeros((count, 1), np.int32),
        seed_B=np.zeros(count, np.uint64),
        temperature_B=np.ones(count, np.float32),
        max_depth_B=np.full(count, max_depth, np.int32),
    )


def trie_slowly(segments, member, most, shortest, matches, depth, width, table):
    """[(path, rank, cell, survival)] breadth first, from plain lists."""
    suffix = segments[member][-most:]
    found = []
    for g, segment in enumerate(segments):
        for i in range(len(segment) - 1):
            longest = min(len(suffix), i + 1)
            same = (k for k in range(longest) if segment[i - k] != suffix[-1 - k])
            length = next(same, longest)
            if length >= shortest:
                found.append((length, (g, i), segment[i + 1 :]))
    found = sorted(found, key=lambda match: (match[0], match[1]), reverse=True)[:matches]
    found = [match for match in found if 2 * match[0] >= found[0][0]]
    nodes, level = [], [((), found, 1.0)]
    for d in range(1, depth + 1):
        below = []
        for path, group, acceptance in level:
            group = [match for match in group if len(match[2]) >= d]
            kinds = {}
            for match in group:
                kinds.setdefault(match[2][d - 1], []).append(match)
            # Stable: the longest match first among equals.
            best = sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:width]
            for rank, (token, members) in enumerate(best):
                length = members[0][0] + d - 1
                cell = match_cell(length, len(members), len(group), d, SHARES, DEPTHS)
                below.append(((*path, token), rank, cell, acceptance * table[cell], members))
        nodes += [node[:4] for node in below]
        level = [(path, members, acceptance) for path, _, _, acceptance, members in below]
    return nodes


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=90), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_history_index_equals_its_twin(segments, member, shortest, matches, depth, width):
    member %= len(segments)
    tokens_T = np.array([token for segment in segments for token in segment], np.int32)
    length_G = np.array([len(segment) for segment in segments], np.int32)
    start_G = (np.cumsum(length_G) - length_G).astype(np.int32)
    size = matches * depth
    kinds = [*[np.int32] * 5, np.float32, np.int32]
    arrays = [np.empty(size, kind) for kind in kinds]
    table = np.random.default_rng(0).random(len(prior())).astype(np.float32)
    asked = [np.array([each], np.int32) for each in (member, 7, depth)]
    bounds = (6, shortest, matches, width)
    count = match_pool(
        tokens_T, start_G, length_G, *asked, *bounds, table, SHARES, DEPTHS, 0, *arrays
    )
    request, parent, token, depths, rank, acceptance, cell = (a[:count] for a in arrays)
    expected = trie_slowly(segments, member, 6, shortest, matches, depth, width, table)
    paths = []
    for n in range(count):
        paths.append((*(paths[parent[n]] if parent[n] >= 0 else ()), int(token[n])))
    found = {path: (int(rank[n]), int(cell[n])) for n, path in enumerate(paths)}
    assert len(found) == count == len(expected) and (request == 7).all()
    for path, wanted_rank, wanted_cell, wanted_acceptance in expected:
        assert found[path] == (wanted_rank, wanted_cell)
        assert acceptance[paths.index(path)] == pytest.approx(wanted_acceptance, rel=1e-5)
    assert all(parent[n] < n and len(paths[n]) == depths[n] for n in range(count))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "append", "append", "append", "finish"]),
            st.integers(0, 10**6),
            st.integers(0, 400),
        ),
        max_size=60,
    )
)
@settings(max_examples=100, deadline=None)
def test_history_pool_keeps_every_token_of_running_requests(operations):
    pool, held = TokenPool(2000), {}
    for kind, which, count in operations:
        running = sorted(held)
        if kind == "open" or not running:
            held[pool.open()] = []
        elif kind == "append":
            tokens = [which % 97 + i for i in range(count)]
            if pool.append(running[which % len(running)], np.array(tokens, np.int32)):
                held[running[which % len(running)]] += tokens
        else:
            segment = running[which % len(running)]
            pool.finish(segment)
            del held[segment]
        pool.check()
        for segment, tokens in held.items():
            start = pool.start_G[segment]
            assert pool.tokens[start : start + pool.length_G[segment]].tolist() == tokens


def proposed(history, requests, request=0, **batch):
    """Return the best child at every level."""
    candidates, path, at = history.propose(batch_of(requests, **batch), STRATEGY), [], -1
    best_N = (candidates.request_N == request) & (candidates.rank_N == 0)
    while len(children := np.flatnonzero(best_N & (candidates.parent_N == at))):
        at = children[0]
        path.append(int(candidates.token_N[at]))
    return path


def test_history_continues_a_repetition_in_the_output():
    assert proposed(History(), {"a": [1, 2, 3, 4, 5, 6, 7, 2, 3, 4]}) == [5, 6, 7, 2]


def test_history_searches_the_prompt():
    tokens = [*range(10, 17), *range(40, 70), 99, 11, 12]
    assert proposed(History(), {"a": tokens}, prompt_len=37) == [13, 14, 15, 16]


def test_history_searches_running_and_finished_siblings():
    history = History()
    proposed(history, {"a": [1, 20, 21, 22, 23, 24], "b": [1, 30]})
    both = {"a": [1, 20, 21, 22, 23, 24, 25], "b": [1, 30, 21, 22]}
    assert proposed(history, both, 1) == [23, 24, 25]
    history.finish("a", "g", np.array([1, 20, 21, 22, 23, 24, 25, 26]), 1)
    assert proposed(history, {"b": [1, 30, 21, 22, 23]}) == [24, 25, 26]


def test_repeated_prompt_finds_responses_of_earlier_rollouts():
    history = History()
    history.finish("old", "step-1", np.array([5, 6, 7, 50, 51, 52, 53]), 3)
    found = proposed(history, {"new": [5, 6, 7, 50]}, group="step-2", prompt_len=3)
    assert found == [51, 52, 53]
    assert proposed(history, {"other": [5, 6, 8, 50]}, group="step-3", prompt_len=3) == []


def test_history_is_not_shared_between_salts():
    batch, text = batch_of({"new": [5, 6, 7, 50]}, prompt_len=3), [5, 6, 7, 50, 51, 52, 53]
    for salts, path in ((["two"], 0), ([""], 0), (["one"], 3)):
        history, sibling = History(), batch_of({"sibling": text}, prompt_len=3)
        history.propose(replace(sibling, salts=["one"]), STRATEGY)
        history.finish("old", "g", np.array(text), 3, "one")
        assert len(history.propose(replace(batch, salts=salts), STRATEGY)) == path


def test_history_prefers_the_token_of_most_siblings():
    history = History()
    for name, token in (("a", 8), ("b", 9), ("c", 9)):
        history.finish(name, "g", np.array([1, 2, 3, token, 4]), 1)
    candidates = history.propose(batch_of({"d": [1, 2, 3]}), Strategy("history", 1, 2, 3))
    assert candidates.token_N.tolist() == [9, 8]
    assert candidates.acceptance_N[0] > candidates.acceptance_N[1]


def test_history_memory_is_bounded():
    history = History(HistorySettings(pool_tokens=500, total_tokens=2000, pools=20))
    random = np.random.default_rng(0)
    for step in range(300):
        tokens = random.integers(0, 5, 60)
        tokens[0] = step
        history.propose(batch_of({"r": tokens}, group=str(step // 3)), STRATEGY)
        history.finish("r", str(step // 3), tokens, 1)
        history.check()
        assert history.gauges()["history_pool_tokens"] <= 2000
    assert not history._running and not history._by_group_id


def test_history_keeps_newest_responses_and_forgets_on_demand():
    history, prompt = History(HistorySettings(kept_tokens=60)), [5, 6, 7]
    for step in range(9):
        text = np.array([*prompt, 20 + step, *range(100 * step + 100, 100 * step + 115)])
        history.finish(f"r{step}", f"step-{step}", text, 3)
        history.check()

    def found(start):
        path = proposed(history, {"new": [*prompt, start]}, group=f"ask-{start}", prompt_len=3)
        history.finish("new", f"ask-{start}", np.array([*prompt, start]), 3)
        return path

    assert found(28) == [900, 901, 902, 903] and found(27) == [800, 801, 802, 803]
    assert found(20) == [], "an old response was kept"
    history.forget()
    history.check()
    assert found(28) == [] and history.gauges()["history_pool_tokens"] < 60


def test_history_drops_the_least_recently_used_prompts():
    history = History(HistorySettings(pools=2))
    for step, prompt in enumerate((1, 2, 1, 3)):
        history.finish(f"r{step}", f"g{step}", np.array([prompt, 7, 8, 9, 10]), 1)
        history.check()
    kept = [proposed(history, {f"q{p}": [p, 7, 8]}, group=f"q{p}") for p in (1, 3, 2)]
    assert list(map(bool, kept)) == [True, True, False]


def test_history_memory_is_bounded_while_requests_keep_running():
    history = History(HistorySettings(pool_tokens=500, total_tokens=2000, pools=20))
    random = np.random.default_rng(1)
    steady = {f"s{i}": np.array([900 + i, 1, 2, 3]) for i in range(7)}
    for name, tokens in steady.items():
        history.propose(batch_of({name: tokens}, group=name), STRATEGY)
    for step in range(200):
        tokens = np.concatenate([[step], random.integers(0, 5, 80)])
        history.propose(batch_of({"r": tokens}, group=f"g{step}"), STRATEGY)
        history.finish("r", f"g{step}", tokens, 1)
        history.check()
        assert history.gauges()["history_pool_tokens"] <= 2000


def test_busy_group_keeps_a_bounded_number_of_prompts():
    history = History()
    history.propose(batch_of({"anchor": [1, 2, 3]}, group="g"), STRATEGY)
    for step in range(PROMPTS + 300):
        history.finish("r", "g", np.array([step, 7, 8]), 2)
    history.check()
    (group,) = {id(group): group for group in history._groups.values()}.values()
    assert len(group.pool.start_G) <= 4 * SEGMENTS


def test_full_history_pool_stops_drafts_of_a_growing_request():
    history = History(HistorySettings(pool_tokens=40))
    tokens = [1, 2] * 15
    assert proposed(history, {"a": tokens})
    assert not proposed(history, {"a": tokens + [1, 2] * 10})
    history.finish("a", "g", np.array(tokens + [1, 2] * 10), 1)


def test_history_learns_its_acceptance():
    history = History()
    batch = batch_of({"a": [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]})
    first = history.propose(batch, STRATEGY)
    for _ in range(300):
        candidates = history.propose(batch, STRATEGY)
        history.observe(batch, candidates, np.zeros(len(candidates), np.int8))
    assert history.propose(batch, STRATEGY).acceptance_N[0] < 0.5 * first.acceptance_N[0]
    assert history.gauges()["history_hit_rate"] == 1.0
