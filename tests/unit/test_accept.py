"""The accept walk against a recursive twin, and the theorem on a keyed toy target."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.speculation.accept import accept, accepted_drafts, on_path
from tlt_server.speculation.batch import Candidates


def accept_slowly(start, count, parent, token, sampled):
    rows, lengths, tokens = [], [], []
    for first, size in zip(start, count, strict=True):
        at, length = first, 0
        while True:
            tokens.append(sampled[at])
            children = [
                r
                for r in range(first + 1, first + size)
                if parent[r] == at and token[r] == sampled[at]
            ]
            if not children:
                break
            at = children[0]
            rows.append(at)
            length += 1
        lengths.append(length)
    return rows, lengths, tokens


@st.composite
def verified(draw, vocabulary=3):
    start, count, parent, token = [], [], [], []
    for _ in range(draw(st.integers(1, 4))):
        first, size = len(token), draw(st.integers(1, 12))
        start.append(first)
        count.append(size)
        for r in range(size):
            parent.append(-1 if r == 0 else first + draw(st.integers(0, r - 1)))
            token.append(draw(st.integers(0, vocabulary - 1)))
    return start, count, parent, token


@given(verified(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_accept_equals_the_recursive_walk(rows, random):
    start, count, parent, token = rows
    sampled = [random.randrange(3) for _ in token]
    walk = accept(*arrays(start, count, parent, token, sampled))
    assert (walk.row_A.tolist(), walk.length_B.tolist(), walk.token_E.tolist()) == accept_slowly(
        start, count, parent, token, sampled
    )


@given(verified(vocabulary=9), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_acceptance_on_known_responses_equals_the_walk(rows, random):
    """Nodes are rows without roots; no two siblings have the same token."""
    start, count, parent, token = rows
    taken, kept = set(), set(start)
    for row, (above, own) in enumerate(zip(parent, token, strict=True)):
        if row not in kept and above in kept and (above, own) not in taken:
            taken.add((above, own))
            kept.add(row)
    drafts = [row for row in sorted(kept) if row not in start]
    node = {row: n for n, row in enumerate(drafts)}
    depth = dict.fromkeys(start, 0)
    for row in drafts:
        depth[row] = depth[parent[row]] + 1
    owner = [int(np.searchsorted(start, row, "right")) - 1 for row in drafts]
    above = [node.get(parent[row], -1) for row in drafts]
    values = owner, above, [token[row] for row in drafts], [depth[row] for row in drafts]
    int_N = [np.array(each, np.int32) for each in values]
    candidates = Candidates(*int_N, int_N[3], np.ones(len(drafts), np.float32))
    follow = [[random.randrange(9) for _ in range(random.randrange(1, 7))] for _ in start]
    longest = max(map(len, follow))
    follow_BD = np.array([[*text, *[-1] * (longest - len(text))] for text in follow], np.int32)
    chosen, verifies = set(start), []
    for row in drafts:
        if parent[row] in chosen and random.random() < 0.8:
            chosen.add(row)
            verifies.append(node[row])
    sampled = [0] * len(token)
    for row in kept:
        b = int(np.searchsorted(start, row, "right")) - 1
        sampled[row] = follow[b][depth[row]] if depth[row] < len(follow[b]) else -1
    # The others are their own parents, so that no walk gets there.
    parent = [above if row in chosen else row for row, above in enumerate(parent)]
    walk = accept(*arrays(start, count, parent, token, sampled))
    own_N = on_path(candidates, follow_BD)
    found = accepted_drafts(candidates, np.array(verifies, np.int32), own_N, len(start))
    assert found.tolist() == walk.length_B.tolist()


def arrays(*lists):
    types = np.int32, np.int32, np.int32, np.int64, np.int32
    return [np.array(values, dtype) for values, dtype in zip(lists, types, strict=True)]


def target(prefix):
    """The next token as a pure function of the prefix."""
    return hash(tuple(prefix)) % 3


@given(verified())
@settings(max_examples=300, deadline=None)
def test_any_draft_tree_emits_the_tokens_of_plain_decoding(rows):
    start, count, parent, token = rows
    prefix = {}
    for r, above in enumerate(parent):
        prefix[r] = [7, r] if above < 0 else [*prefix[above], token[r]]
    sampled = [target(prefix[r]) for r in range(len(token))]
    walk = accept(*arrays(start, count, parent, token, sampled))
    emitted = iter(walk.token_E.tolist())
    for first, length in zip(start, walk.length_B, strict=True):
        text = list(prefix[first])
        for _ in range(length + 1):
            plain = target(text)
            assert next(emitted) == plain
            text.append(plain)
    assert next(emitted, None) is None
