"""min_p, top_k and top_p as one threshold per row: a token is kept if z > cut, or if z == cut and
its id is <= last.

Each filter keeps the head of the row sorted by descending z, ties by ascending id, so the three of
them are one cut in that order. There is no sort. Every group of tokens is reduced to its maximum
and mass. These give a floor below which the cut cannot lie; the few tokens above it are listed; and
the list is bisected over the values of z. If top_p may keep too many tokens (nearly even rows),
`nucleus.py` first brackets the cut, and only the tokens of the bracket are listed. If still too
many remain, the whole row is bisected, which costs passes over the row. Masses of tokens are
integers, so neither the order of a list nor its tiles matter.

Legend: S sampled rows, V vocabulary, G groups of `GROUP` tokens, L listed tokens, N thresholds, Q
batch slots, F filters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tlt_kernels.filters import FILTERS
from tlt_kernels.gpu.noise import fast_exp, log
from tlt_kernels.gpu.nucleus import (
    ONE,
    SAMPLED,
    THRESHOLDS,
    WEIGH_WARPS,
    WEIGHED,
    bracket,
    measured,
    place_thresholds,
    shorten,
    tile_of,
    weigh,
)
from tlt_kernels.gpu.nucleus import TILE as WEIGHED_TILE
from tlt_kernels.gpu.ordering import key_of, value_of
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.temperature import GREEDY_BELOW, divided
from tlt_kernels.gpu.tensors import BatchSlots, RowTable

F = tl.constexpr(len(FILTERS))
GROUP = 128  # tokens that share a maximum and a mass
GROUPS = 8  # groups per program
BLOCK = 1024  # tokens per listing program
TILE = 4096  # tokens that a bisection reads at once
CAPACITY = 16384  # listed tokens
FLOOR_WARPS, CUT_WARPS = 8, 16
REFINEMENTS = tl.constexpr(12)  # halvings on the way to the floor
SLACK = tl.constexpr(1.0 - 1e-3)  # covers the rounding of a mass where only a bound is wanted


@triton.jit
def _parameters(row_S, batch_slot_R, temperature_Q, filters_QF, s, V):
    """Return (whether any filter cuts, temperature, top_k or V, top_p, min_p) of sampled row s."""
    row = tl.load(row_S + s)
    batch_slot = tl.load(batch_slot_R + tl.maximum(row, 0))
    temperature = tl.load(temperature_Q + batch_slot)
    min_p = tl.load(filters_QF + batch_slot * F).to(tl.float32, bitcast=True)
    top_k = tl.load(filters_QF + batch_slot * F + 1)
    top_p = tl.load(filters_QF + batch_slot * F + 2).to(tl.float32, bitcast=True)
    top_k = tl.where((top_k <= 0) | (top_k > V), V, top_k)
    cutting = (
        (row >= 0) & (temperature >= GREEDY_BELOW) & ((top_k < V) | (top_p < 1.0) | (min_p > 0.0))
    )
    return cutting, temperature, top_k, top_p, min_p


@triton.jit
def _measure_groups(
    logits_SV, row_S, batch_slot_R, temperature_Q, filters_QF, top_SG, mass_SG,
    V, G, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Find the maximum of every group, and its sum of exponentials below that maximum."""
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    pdl_wait()
    logits = tl.load(logits_SV + s * V + tokens, mask=tokens < V, other=-float("inf"))
    cutting, temperature, _, _, _ = _parameters(
        row_S, batch_slot_R, temperature_Q, filters_QF, s, V
    )
    if not cutting:
        return
    z = divided(logits, temperature)
    top = tl.max(z, axis=1)
    mass = tl.sum(fast_exp(z - tl.where(top == -float("inf"), 0.0, top)[:, None]), axis=1)
    tl.store(top_SG + s * G + groups, top, mask=groups < G)
    tl.store(mass_SG + s * G + groups, mass, mask=groups < G)


@triton.jit
def _target(mass, top_p):
    return tl.maximum((mass * top_p).to(tl.int64), 1)


@triton.jit
def _find_floors(
    logits_SV, row_S, batch_slot_R, temperature_Q, filters_QF, top_SG, mass_SG,
    floor_S, top_S, total_S, temperature_S, listed_S, narrowed_S, target_S, threshold_SN, mass_SN,
    V, G, GROUP: tl.constexpr, G_TILE: tl.constexpr, N: tl.constexpr, SAMPLED: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Find floor, maximum and mass of every row. The mass is 0 if nothing is cut or the row is
    broken; the floor is -inf if no bound was found. Place thresholds in rows that only top_p cuts
    and that may have more tokens than can be listed.
    """
    pdl_launch()
    s = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, G_TILE)
    pdl_wait()
    tl.store(listed_S + s, 0)
    cutting, temperature, top_k, top_p, min_p = _parameters(
        row_S, batch_slot_R, temperature_Q, filters_QF, s, V
    )
    inside = groups < tl.where(cutting, G, 0)
    top_G = tl.load(top_SG + s * G + groups, mask=inside, other=-float("inf"))
    mass_G = tl.load(mass_SG + s * G + groups, mask=inside, other=0.0)
    top = tl.max(top_G)
    best_G = fast_exp(top_G - top)
    mass_G = mass_G * best_G
    total = tl.sum(mass_G)
    if not (cutting & (total >= 1.0) & (top < float("inf"))):
        tl.store(floor_S + s, float("inf"))
        tl.store(total_S + s, 0.0)
        tl.store(narrowed_S + s, 0)
        return

    # No token that min_p and top_k keep lies below the floor; without both, those below it weigh
    # less than top_p leaves out.
    restricted = (min_p > 0.0) | (top_k < V)
    leftover = tl.maximum((1.0 - top_p) * total * SLACK, 2.0**-60)
    allowed = tl.where(restricted, -top_k.to(tl.float32), leftover)
    # The deepest bound: the lowest maximum of a group, or where all tokens weigh too little.
    middle = tl.where(
        restricted,
        top - tl.min(tl.where(top_G > -float("inf"), top_G, top)),
        log(GROUP * (G / leftover)) + 1e-2,  # G is a plain 1 where there is one group
    )
    near, far, depth = tl.zeros_like(middle), middle, tl.full((), float("inf"), tl.float32)
    for _ in range(REFINEMENTS):
        rest_G = tl.minimum(GROUP * fast_exp(0.0 - middle), mass_G - best_G)
        reached = top_G >= top - middle
        enough = (
            tl.sum(
                tl.where(
                    restricted, tl.where(reached, -1.0, 0.0), tl.where(reached, rest_G, mass_G)
                )
            )
            <= allowed
        )
        depth = tl.where(enough, middle, depth)
        near, far = tl.where(enough, near, middle), tl.where(enough, middle, far)
        middle = 0.5 * (near + far)
    floor = top - depth
    if min_p > 0.0:
        floor = tl.maximum(floor, top + log(tl.minimum(min_p, 1.0)))
    tl.store(floor_S + s, floor)
    tl.store(top_S + s, top)
    tl.store(total_S + s, total)
    tl.store(temperature_S + s, temperature)
    # A token above the floor weighs at least exp(-depth), so a group's mass bounds their number.
    most_G = tl.minimum(mass_G / fast_exp(0.0 - depth), GROUP)
    most = tl.sum(tl.where(inside & (top_G >= floor), most_G, 0.0))
    narrowed = tl.where(restricted | (most <= CAPACITY), 0, 1)
    tl.store(narrowed_S + s, narrowed)
    if narrowed != 0:
        at_N = s * N + tl.arange(0, N)
        threshold_N = place_thresholds(
            logits_SV + s * V, temperature, top, floor, (1.0 - top_p) * total, V, N, SAMPLED
        )
        tl.store(threshold_SN + at_N, threshold_N)
        tl.store(mass_SN + at_N, tl.zeros((N,), tl.int64))
        tl.store(target_S + s, _target(total.to(tl.float64) * ONE, top_p))


@triton.jit
def _listing(floor_S, narrowed_S, target_S, threshold_SN, mass_SN, s, N: tl.constexpr):
    """Return (low, high, mass of the tokens at or above high): row s is cut at low <= z < high."""
    low, high, above = (
        tl.load(floor_S + s),
        tl.full((), float("inf"), tl.float32),
        tl.zeros((), tl.int64),
    )
    if tl.load(narrowed_S + s) != 0:
        low, high, above = bracket(threshold_SN, mass_SN, low, tl.load(target_S + s), s, N)
    return low, high, above


@triton.jit
def _list_tokens(
    logits_SV, top_SG, floor_S, temperature_S, listed_S, z_SL, token_SL,
    narrowed_S, target_S, threshold_SN, mass_SN,
    V, G, GROUP: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """List the tokens that may be at the cut, in any order. listed_S counts them; a count above the
    capacity means that not all fit.
    """
    pdl_launch()
    s = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait()
    temperature, listed = tl.load(temperature_S + s), tl.load(listed_S + s)
    low, high, _ = _listing(floor_S, narrowed_S, target_S, threshold_SN, mass_SN, s, N)
    top = tl.load(top_SG + s * G + tokens // GROUP, mask=tokens < V, other=-float("inf"))
    if not ((low > -float("inf")) & (low < float("inf")) & (listed <= CAPACITY)):
        return
    wanted = (tokens < V) & (top >= low)
    z = divided(tl.load(logits_SV + s * V + tokens, mask=wanted, other=-float("inf")), temperature)
    wanted &= (z >= low) & (z < high)
    at = tl.atomic_add(listed_S + s + tl.zeros((BLOCK,), tl.int32), 1, mask=wanted, sem="relaxed")
    wanted &= at < CAPACITY
    tl.store(z_SL + s * CAPACITY + at, z, mask=wanted)
    tl.store(token_SL + s * CAPACITY + at, tokens, mask=wanted)


@triton.jit
def _cut_rows(
    logits_SV, row_S, batch_slot_R, temperature_Q, filters_QF,
    floor_S, top_S, total_S, listed_S, z_SL, token_SL,
    narrowed_S, target_S, threshold_SN, mass_SN, cut_S, last_S,
    V, TILE: tl.constexpr, N: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    pdl_launch()
    s = tl.program_id(0).to(tl.int64)
    pdl_wait()
    total = tl.load(total_S + s)
    if total == 0.0:
        tl.store(cut_S + s, -float("inf"))
        tl.store(last_S + s, V)
        return
    _, temperature, top_k, top_p, min_p = _parameters(
        row_S, batch_slot_R, temperature_Q, filters_QF, s, V
    )
    low, high, above = _listing(floor_S, narrowed_S, target_S, threshold_SN, mass_SN, s, N)
    top, size = tl.load(top_S + s), tl.load(listed_S + s)
    listed = (low > -float("inf")) & (size <= CAPACITY)
    size = tl.where(listed, size, V)
    logits_V, z_L, token_L = logits_SV + s * V, z_SL + s * CAPACITY, token_SL + s * CAPACITY
    first_key_T, first_token_T, first_mass_T = tile_of(
        logits_V, z_L, token_L, size, listed, temperature, top, 0, TILE
    )
    key, last = key_of(low), tl.full((), V, tl.int32)
    high_key = key_of(tl.minimum(high, top)) + tl.where(high > top, 1, 0)
    if top_k < V:
        count = measured(
            first_key_T, first_token_T, first_mass_T,
            logits_V, z_L, token_L, size, listed, temperature, top, key, last, False, TILE,
        )[0]  # fmt: skip
        if count > top_k:
            key, last = shorten(
                first_key_T, first_token_T, first_mass_T,
                logits_V, z_L, token_L, size, listed, temperature, top,
                key, last, high_key, top_k, V, False, TILE,
            )  # fmt: skip
    if top_p < 1.0:
        whole = total.to(tl.float64) * ONE
        if (min_p > 0.0) | (top_k < V):
            whole = measured(
                first_key_T, first_token_T, first_mass_T,
                logits_V, z_L, token_L, size, listed, temperature, top, key, last, True, TILE,
            )[1].to(tl.float64)  # fmt: skip
        target = _target(whole, top_p) - tl.where(listed, above, 0)
        key, last = shorten(
            first_key_T, first_token_T, first_mass_T,
            logits_V, z_L, token_L, size, listed, temperature, top,
            key, last, high_key, target, V, True, TILE,
        )  # fmt: skip
    tl.store(cut_S + s, value_of(key))
    tl.store(last_S + s, last)


def cuts(
    logits_SV: torch.Tensor,
    row_S: torch.Tensor,  # int32, -1 dead
    rows: RowTable,
    batch_slots: BatchSlots,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cut_S float32, last_S int32) per sampled row: -inf and V where nothing is cut."""
    S, V = logits_SV.shape
    G = triton.cdiv(V, GROUP)
    # Two allocations: each is aligned for any S, so the kernels are compiled once.
    top_SG, mass_SG = (logits_SV.new_empty(S, G) for _ in range(2))
    floor_S, top_S, total_S, temperature_S, cut_S = (logits_SV.new_empty(S) for _ in range(5))
    listed_S, last_S = (row_S.new_empty(S) for _ in range(2))
    # Of rows that top_p alone cuts, if they may have more tokens than are listed.
    narrowed_S, target_S = row_S.new_empty(S), row_S.new_empty(S, dtype=torch.int64)
    threshold_SN = logits_SV.new_empty((S, THRESHOLDS))
    mass_SN = row_S.new_empty((S, THRESHOLDS), dtype=torch.int64)
    brackets = (narrowed_S, target_S, threshold_SN, mass_SN)
    z_SL, token_SL = logits_SV.new_empty((S, CAPACITY)), row_S.new_empty((S, CAPACITY))
    parameters = (row_S, rows.batch_slot_R, batch_slots.temperature_Q, batch_slots.filters_QF)
    _measure_groups[(triton.cdiv(G, GROUPS), S)](
        logits_SV,
        *parameters,
        top_SG,
        mass_SG,
        V,
        G,
        GROUP=GROUP,
        GROUPS=GROUPS,
        num_warps=4,
        **PDL,
    )
    _find_floors[(S,)](
        logits_SV, *parameters, top_SG, mass_SG,
        floor_S, top_S, total_S, temperature_S, listed_S, *brackets,
        V, G, GROUP=GROUP, G_TILE=triton.next_power_of_2(G), N=THRESHOLDS, SAMPLED=SAMPLED,
        CAPACITY=CAPACITY, num_warps=FLOOR_WARPS, **PDL,
    )  # fmt: skip
    weigh[(triton.cdiv(V, WEIGHED), S)](
        logits_SV, narrowed_S, top_S, temperature_S, threshold_SN, mass_SN,
        V, N=THRESHOLDS, WEIGHED=WEIGHED, TILE=WEIGHED_TILE, num_warps=WEIGH_WARPS, **PDL,
    )  # fmt: skip
    _list_tokens[(triton.cdiv(V, BLOCK), S)](
        logits_SV, top_SG, floor_S, temperature_S, listed_S, z_SL, token_SL, *brackets,
        V, G, GROUP=GROUP, BLOCK=BLOCK, N=THRESHOLDS, CAPACITY=CAPACITY, num_warps=4, **PDL,
    )  # fmt: skip
    _cut_rows[(S,)](
        logits_SV, *parameters, floor_S, top_S, total_S, listed_S, z_SL, token_SL, *brackets,
        cut_S, last_S, V, TILE=TILE, N=THRESHOLDS, CAPACITY=CAPACITY, num_warps=CUT_WARPS, **PDL,
    )  # fmt: skip
    return cut_S, last_S
