"""min_p, top_k and top_p as one threshold per row: a token is kept if z > cut, or z == cut and its id is <= last.

Each filter keeps the head of the row sorted by falling z, ties by rising id, so the three of them are one cut in that order. No sort:
the first launch takes the maximum and the mass of every group of tokens; the second, one program a row, derives from them a value that
the cut cannot lie below, lists the few tokens above it, and bisects over the bits of z. Where too many tokens remain (nearly flat
rows) it bisects over the whole row instead, slower by the passes over the row. All sums are in an order that the row alone determines.

Legend: S sampled rows, V vocabulary, G groups of `GROUP` tokens, L listed tokens, Q places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlt_kernels.gpu.noise import fast_exp, log
from tlt_kernels.gpu.ordering import key_of, value_of
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import GREEDY_BELOW, divided

GROUP = 128  # tokens that share a maximum and a mass
GROUPS = 8  # of one program of the first launch
TILE = 2048  # tokens that the second launch handles at once
CAPACITY = 8192  # listed tokens
WARPS = 8
SLACK = tl.constexpr(1.0 - 1e-3)  # covers the rounding of masses where only a bound is wanted
REFINEMENTS = tl.constexpr(14)  # halvings on the way to the value that the cut cannot lie below


@triton.jit
def _parameters(row_S, place_R, temperature_Q, top_k_Q, top_p_Q, min_p_Q, s, V):
    """(whether any filter cuts, temperature, top_k or V, top_p, min_p) of sampled row s."""
    row = tl.load(row_S + s)
    place = tl.load(place_R + tl.maximum(row, 0))
    temperature = tl.load(temperature_Q + place)
    top_k, top_p, min_p = tl.load(top_k_Q + place), tl.load(top_p_Q + place), tl.load(min_p_Q + place)
    top_k = tl.where((top_k <= 0) | (top_k > V), V, top_k)
    cutting = (row >= 0) & (temperature >= GREEDY_BELOW) & ((top_k < V) | (top_p < 1.0) | (min_p > 0.0))
    return cutting, temperature, top_k, top_p, min_p


@triton.jit
def _measure_groups(
    logits_SV, row_S, place_R, temperature_Q, top_k_Q, top_p_Q, min_p_Q, top_SG, mass_SG,
    V, G, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Maximum of every group, and its sum of exponentials below that maximum."""
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    pdl_wait()
    cutting, temperature, _, _, _ = _parameters(row_S, place_R, temperature_Q, top_k_Q, top_p_Q, min_p_Q, s, V)
    if not cutting:
        return
    z = divided(tl.load(logits_SV + s * V + tokens, mask=tokens < V, other=-float("inf")), temperature)
    top = tl.max(z, axis=1)
    mass = tl.sum(fast_exp(z - tl.where(top == -float("inf"), 0.0, top)[:, None]), axis=1)
    tl.store(top_SG + s * G + groups, top, mask=groups < G)
    tl.store(mass_SG + s * G + groups, mass, mask=groups < G)


@triton.jit
def _tokens_of(list_L, start, size, listed, TILE: tl.constexpr):
    """A tile of listed tokens, or of the row itself where nothing is listed, and which of its lanes hold one."""
    lanes = start + tl.arange(0, TILE)
    inside = lanes < size
    return tl.where(listed, tl.load(list_L + lanes, mask=lanes < tl.where(listed, size, 0), other=0), lanes), inside


@triton.jit
def _measured(logits_V, list_L, size, listed, temperature, top, key, last, MASS: tl.constexpr, TILE: tl.constexpr):
    """Mass (relative to the maximum) or number of the tokens whose key is larger, or equal with an id up to `last`."""
    total = tl.zeros((TILE,), tl.float32) if MASS else tl.zeros((TILE,), tl.int32)
    for start in range(0, size, TILE):
        tokens, inside = _tokens_of(list_L, start, size, listed, TILE)
        z = divided(tl.load(logits_V + tokens, mask=inside, other=-float("inf")), temperature)
        keys = key_of(z)
        kept = inside & ((keys > key) | ((keys == key) & (tokens <= last)))
        total += tl.where(kept, fast_exp(z - top), 0.0) if MASS else kept.to(tl.int32)
    return tl.sum(total)


@triton.jit
def _cut(logits_V, list_L, size, listed, temperature, top, low_key, low_last, target, MASS: tl.constexpr, TILE: tl.constexpr, V):
    """(key, last) of the shortest head that measures `target`; the head that ends at (low_key, low_last) is known to."""
    low, high = low_key.to(tl.int64), key_of(top).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        reached = _measured(logits_V, list_L, size, listed, temperature, top, middle.to(tl.int32), V, MASS, TILE) >= target
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
    key = low.to(tl.int32)
    last = tl.where(key == low_key, low_last, V)
    ties = _measured(logits_V, list_L, size, listed, temperature, top, key, last, False, TILE)
    ties -= _measured(logits_V, list_L, size, listed, temperature, top, key, -1, False, TILE)
    if ties > 1:
        first = tl.full((), -1, tl.int32)
        last = tl.minimum(last, V - 1)
        while last - first > 1:
            middle_id = (first + last) >> 1
            reached = _measured(logits_V, list_L, size, listed, temperature, top, key, middle_id, MASS, TILE) >= target
            first, last = tl.where(reached, first, middle_id), tl.where(reached, middle_id, last)
    return key, last


@triton.jit
def _list_tokens(logits_V, top_G, group_G, list_L, temperature, floor, V, G,
                 GROUP: tl.constexpr, G_TILE: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """List the tokens with z >= floor by rising id, as far as there is room; returns how many there are."""
    groups = tl.arange(0, G_TILE)
    active = (tl.load(top_G + groups, mask=groups < G, other=-float("inf")) >= floor) & (groups < G)
    tl.store(group_G + tl.cumsum(active.to(tl.int32)) - 1, groups, mask=active)
    tl.debug_barrier()
    size = tl.sum(active.to(tl.int32)) * GROUP
    found = 0
    for start in range(0, size, TILE):
        lanes = start + tl.arange(0, TILE)
        tokens = tl.load(group_G + lanes // GROUP, mask=lanes < size, other=0) * GROUP + lanes % GROUP
        inside = (lanes < size) & (tokens < V)
        z = divided(tl.load(logits_V + tokens, mask=inside, other=-float("inf")), temperature)
        wanted = inside & (z >= floor)
        at = found + tl.cumsum(wanted.to(tl.int32)) - 1
        tl.store(list_L + at, tokens, mask=wanted & (at < CAPACITY))
        found += tl.sum(wanted.to(tl.int32))
    tl.debug_barrier()
    return found


@triton.jit
def _cut_rows(
    logits_SV, row_S, place_R, temperature_Q, top_k_Q, top_p_Q, min_p_Q, top_SG, mass_SG, group_SG, list_SL, cut_S, last_S,
    V, G, GROUP: tl.constexpr, G_TILE: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    pdl_launch()
    s = tl.program_id(0).to(tl.int64)
    pdl_wait()
    tl.store(cut_S + s, -float("inf"))
    tl.store(last_S + s, V)
    cutting, temperature, top_k, top_p, min_p = _parameters(row_S, place_R, temperature_Q, top_k_Q, top_p_Q, min_p_Q, s, V)
    if not cutting:
        return
    groups = tl.arange(0, G_TILE)
    top_G = tl.load(top_SG + s * G + groups, mask=groups < G, other=-float("inf"))
    mass_G = tl.load(mass_SG + s * G + groups, mask=groups < G, other=0.0)
    top = tl.max(top_G)
    mass_G = mass_G * fast_exp(top_G - top)
    total = tl.sum(mass_G)
    if not ((total >= 1.0) & (top < float("inf"))):
        return

    # A floor: no token that min_p and top_k keep lies below; without both, the tokens below weigh less than top_p leaves out.
    restricted = (min_p > 0.0) | (top_k < V)
    near = tl.full((), 0.0, tl.float32)
    far = top - tl.min(tl.where(top_G > -float("inf"), top_G, top))
    depth = tl.full((), float("inf"), tl.float32)
    for _ in range(REFINEMENTS):
        middle = tl.where(depth == float("inf"), far, 0.5 * (near + far))
        reached = top_G >= top - middle
        enough = tl.sum(reached.to(tl.int32)) >= top_k
        below = tl.sum(tl.where(reached, GROUP * fast_exp(0.0 - middle), mass_G))
        enough = tl.where(restricted, enough, below <= (1.0 - top_p) * total * SLACK)
        depth = tl.where(enough, middle, depth)
        near, far = tl.where(enough, near, middle), tl.where(enough, middle, far)
    floor = top - depth
    if min_p > 0.0:
        floor = tl.maximum(floor, top + log(tl.minimum(min_p, 1.0)))

    logits_V, list_L = logits_SV + s * V, list_SL + s * CAPACITY
    size = tl.full((), V, tl.int32)
    if floor > -float("inf"):
        size = _list_tokens(logits_V, top_SG + s * G, group_SG + s * G, list_L, temperature, floor, V, G, GROUP, G_TILE, TILE, CAPACITY)
    listed = (floor > -float("inf")) & (size <= CAPACITY)
    size = tl.where(listed, size, V)
    key = key_of(floor)
    last = tl.full((), V, tl.int32)
    if top_k < V:
        if _measured(logits_V, list_L, size, listed, temperature, top, key, last, False, TILE) > top_k:
            key, last = _cut(logits_V, list_L, size, listed, temperature, top, key, last, top_k, False, TILE, V)
    if top_p < 1.0:
        if restricted:
            total = _measured(logits_V, list_L, size, listed, temperature, top, key, last, True, TILE)
        key, last = _cut(logits_V, list_L, size, listed, temperature, top, key, last, top_p * total, True, TILE, V)
    tl.store(cut_S + s, value_of(key))
    tl.store(last_S + s, last)


def cuts(
    logits_SV: torch.Tensor,
    row_S: torch.Tensor,
    place_R: torch.Tensor,
    temperature_Q: torch.Tensor,
    top_k_Q: torch.Tensor,
    top_p_Q: torch.Tensor,
    min_p_Q: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cut_S float32, last_S int32) of every sampled row; -inf and V where nothing is cut."""
    S, V = logits_SV.shape
    G = triton.cdiv(V, GROUP)
    top_SG, mass_SG = logits_SV.new_empty((2, S, G)).unbind()
    group_SG, list_SL = row_S.new_empty((S, G)), row_S.new_empty((S, CAPACITY))
    cut_S, last_S = logits_SV.new_empty(S), torch.empty_like(row_S)
    parameters = (row_S, place_R, temperature_Q, top_k_Q, top_p_Q, min_p_Q)
    _measure_groups[(triton.cdiv(G, GROUPS), S)](
        logits_SV, *parameters, top_SG, mass_SG, V, G, GROUP=GROUP, GROUPS=GROUPS, num_warps=4, **PDL
    )
    _cut_rows[(S,)](
        logits_SV, *parameters, top_SG, mass_SG, group_SG, list_SL, cut_S, last_S,
        V, G, GROUP=GROUP, G_TILE=triton.next_power_of_2(G), TILE=TILE, CAPACITY=CAPACITY, num_warps=WARPS, **PDL,
    )  # fmt: skip
    return cut_S, last_S
