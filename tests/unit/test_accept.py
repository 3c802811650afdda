"""The accept walk against a recursive twin, and the theorem on a keyed toy target."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.speculation.accept import accept


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
def test_accept_is_the_recursive_walk(rows, random):
    start, count, parent, token = rows
    sampled = [random.randrange(3) for _ in token]
    walk = accept(*arrays(start, count, parent, token, sampled))
    assert (walk.row_A.tolist(), walk.length_B.tolist(), walk.token_E.tolist()) == accept_slowly(
        start, count, parent, token, sampled
    )


def arrays(*lists):
    types = np.int32, np.int32, np.int32, np.int64, np.int32
    return [np.array(values, dtype) for values, dtype in zip(lists, types, strict=True)]


def target(prefix):
    """The next token as a pure function of the prefix."""
    return hash(tuple(prefix)) % 3


@given(verified())
@settings(max_examples=300, deadline=None)
def test_any_tree_emits_what_plain_decoding_emits(rows):
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
