"""History matching: earlier occurrences of a request's last tokens, and their continuations, as a
counted trie.

A pool is one flat int32 array of token segments (prompts, outputs of a group). The scan is brute
force: equality of the last token over whole blocks (vectorised), then a walk backwards. Slow twin:
`tests/unit/test_history.py`.

Legend: T pool tokens, G segments, K matches kept, M running members, N trie nodes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tlt_kernels.cpu.compiled import kernel

BLOCK = 128  # tokens compared at once


@njit(cache=True)
def longest_matches(pool_T, start_G, length_G, suffix, shortest, end_K, stop_K, match_K):
    """Keep the K occurrences that share the longest ends with `suffix`, longest first; of equal
    ones the latest first.

    end_K: index of the token after the occurrence. stop_K: end of its segment. match_K: common
    tokens (shortest .. len(suffix)). Return their number. An occurrence without a next token does
    not count.
    """
    limit = len(suffix)
    capacity = len(end_K)
    found = 0
    if limit == 0:
        return 0
    last = suffix[limit - 1]
    for g in range(len(start_G)):
        first, stop = start_G[g], start_G[g] + length_G[g]
        for block in range(first, stop - 1, BLOCK):
            block_stop = min(block + BLOCK, stop - 1)
            part = pool_T[block:block_stop]
            hits = np.int32(0)
            for i in range(
                len(part)
            ):  # no index can be negative here, which lets the compiler vectorise
                hits += np.int32(part[i] == last)
            if hits == 0:
                continue
            for i in range(block, block_stop):
                if pool_T[i] != last:
                    continue
                length = 1
                while (
                    length < limit
                    and i - length >= first
                    and pool_T[i - length] == suffix[limit - 1 - length]
                ):
                    length += 1
                if length < shortest or (found == capacity and length < match_K[capacity - 1]):
                    continue
                if found < capacity:
                    found += 1
                at = found - 1
                while at > 0 and match_K[at - 1] <= length:
                    end_K[at], stop_K[at], match_K[at] = (
                        end_K[at - 1],
                        stop_K[at - 1],
                        match_K[at - 1],
                    )
                    at -= 1
                end_K[at], stop_K[at], match_K[at] = i + 1, stop, length
    return found


@njit(cache=True)
def length_bucket(length):
    """Return the bucket of a match length: 2, 3, 4-5, 6-8, 9-12, 13-15, 16 or more."""
    if length <= 3:
        return max(length, 2) - 2
    if length <= 5:
        return 2
    if length <= 8:
        return 3
    if length <= 12:
        return 4
    return 5 if length <= 15 else 6


@njit(cache=True)
def match_cell(length, count, total, depth, shares, depths):
    """Return the index into the flattened [lengths, shares, depths] table; share bucket =
    ceil(share * shares) - 1.
    """
    share = (count * shares + total - 1) // total - 1
    return (length_bucket(length) * shares + share) * depths + min(depth, depths) - 1


@njit(cache=True)
def _continuations(pool_T, end_K, level, node_K, first, done_K, token_K, count_K, kind_K):
    """Count the tokens that continue the matches at the node of match `first`, mark those matches
    as done, and return (matches, distinct tokens).
    """
    total = 0
    kinds = 0
    for j in range(first, len(node_K)):
        if node_K[j] != node_K[first] or done_K[j]:
            continue
        done_K[j] = True
        total += 1
        token = pool_T[end_K[j] + level]
        for i in range(kinds):
            if token_K[i] == token:
                count_K[i] += 1
                break
        else:
            token_K[kinds], count_K[kinds], kind_K[kinds] = token, 1, j
            kinds += 1
    return total, kinds


@njit(cache=True)
def _follow(pool_T, end_K, level, node_K, parent_N, token_N, first, stop):
    """Move each match to the node of its next token among nodes [first, stop)."""
    for k in range(len(node_K)):
        if node_K[k] == -2:
            continue
        token = pool_T[end_K[k] + level]
        reached = -2
        for n in range(first, stop):
            if parent_N[n] == node_K[k] and token_N[n] == token:
                reached = n
        node_K[k] = reached


@njit(cache=True)
def plant_trie(
    pool_T,
    end_K,
    stop_K,
    match_K,
    found,
    depth,
    width,
    acceptance_table,
    shares,
    depths,
    request,
    first,
    request_N,
    parent_N,
    token_N,
    depth_N,
    rank_N,
    acceptance_N,
    cell_N,
):
    """Merge the continuations of `found` matches into a trie from node `first` on; return the index
    after the last node.

    A node keeps its parent's `width` commonest continuations (ties: the longer, then the earlier
    match); its match length is that of its longest match. Nodes are breadth first, so parents
    precede children. The trie stops when the arrays are full.
    """
    node_K = np.full(found, -1, np.int32)  # the node that each match has reached; -2 = out
    token_K = np.empty(found, np.int32)
    count_K = np.empty(found, np.int32)
    kind_K = np.empty(found, np.int32)  # first match of each kind of continuation
    at = first
    for level in range(depth):
        level_first = at
        for k in range(found):
            if end_K[k] + level >= stop_K[k]:
                node_K[k] = -2
        done_K = np.zeros(found, np.bool_)
        for k in range(found):
            if done_K[k] or node_K[k] == -2:
                continue
            parent = node_K[k]
            total, kinds = _continuations(
                pool_T, end_K, level, node_K, k, done_K, token_K, count_K, kind_K
            )
            for rank in range(min(width, kinds)):
                best = np.argmax(count_K[:kinds])  # the first of the commonest
                if at == len(request_N):
                    return at
                request_N[at] = request
                parent_N[at] = parent
                token_N[at] = token_K[best]
                depth_N[at] = level + 1
                rank_N[at] = rank
                length = match_K[kind_K[best]] + level
                cell_N[at] = match_cell(length, count_K[best], total, level + 1, shares, depths)
                acceptance_N[at] = acceptance_table[cell_N[at]] * (
                    acceptance_N[parent] if parent >= 0 else np.float32(1)
                )
                count_K[best] = 0
                at += 1
        _follow(pool_T, end_K, level, node_K, parent_N, token_N, level_first, at)
    return at


@kernel(
    "(i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i8, i8, i8, i8, f4[::1], i8, i8, "
    "i8, i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], f4[::1], i4[::1])"
)
def match_pool(
    pool_T,
    start_G,
    length_G,
    member_M,
    request_M,
    depth_M,
    most,
    shortest,
    matches,
    width,
    acceptance_table,
    shares,
    depths,
    first,
    request_N,
    parent_N,
    token_N,
    depth_N,
    rank_N,
    acceptance_N,
    cell_N,
):
    """Add the tries of the running members of one pool; return the index after the last node.

    member_M: the segment of each member, whose last `most` tokens are the suffix.
    """
    end_K, stop_K, match_K = (
        np.empty(matches, np.int32),
        np.empty(matches, np.int32),
        np.empty(matches, np.int32),
    )
    for m in range(len(member_M)):
        stop = start_G[member_M[m]] + length_G[member_M[m]]
        suffix = pool_T[max(start_G[member_M[m]], stop - most) : stop]
        found = longest_matches(pool_T, start_G, length_G, suffix, shortest, end_K, stop_K, match_K)
        half = 0
        while (
            half < found and 2 * match_K[half] >= match_K[0]
        ):  # much shorter matches only blur the shares
            half += 1
        if half:
            first = plant_trie(
                pool_T,
                end_K,
                stop_K,
                match_K,
                half,
                depth_M[m],
                width,
                acceptance_table,
                shares,
                depths,
                request_M[m],
                first,
                request_N,
                parent_N,
                token_N,
                depth_N,
                rank_N,
                acceptance_N,
                cell_N,
            )
    return first
