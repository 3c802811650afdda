"""Rotary position tables: cos and sin of every position, computed once in float64 and rounded.

A row looks its position up, so its bits cannot depend on the batch. Sources: RoFormer (arXiv
2104.09864), YaRN (arXiv 2309.00071), Llama 3.1's frequency scaling.

Legend: P positions, D head width.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_server.models.config import Rope


class RotaryTable(NamedTuple):
    cos_PD2: Tensor
    sin_PD2: Tensor


@lru_cache(maxsize=8)
def rotary_table(rope: Rope, head_dim: int, max_position: int) -> RotaryTable:
    """Return cos and sin, float32 [P, D/2] each, multiplied by the scaling's attention factor."""
    frequency, factor = _frequencies(rope, head_dim)
    angle = torch.outer(torch.arange(max_position, dtype=torch.float64, device="cpu"), frequency)
    return RotaryTable((angle.cos() * factor).float(), (angle.sin() * factor).float())


def _frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    plain = rope.theta ** -(
        torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    )
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Stretch long waves by `factor`, keep short ones, interpolate between."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # within the trained context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(
        0, 1
    )
    return plain * kept + plain / rope.factor * (1 - kept)


def _yarn(plain: Tensor, rope: Rope, head_dim: int) -> Tensor:
    def pair_turning(turns: float) -> float:
        """Return the index of the pair that makes this many turns within the trained context."""
        return (
            head_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = (
        (torch.arange(head_dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)
    ).clamp(0, 1)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def _yarn_attention_factor(rope: Rope) -> float:
    def temperature(scale: float = 1.0) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature()
