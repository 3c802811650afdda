"""Comparison of a replica with the fleet that it wants to join, and the sum of those that have.

Two servers give the same tokens and log-prob bits if nothing that these depend on differs, so a
fleet compares the descriptions of their engines. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tlt_server.wire.events import EngineInfo


def differences(mine: EngineInfo, other: EngineInfo) -> str:
    """Return the first difference that keeps the replica `other` out of the fleet of `mine`, with
    both values; empty if it may join. Comparing a replica with itself checks what no fleet takes.
    """
    if not other.numerics.startswith("strict"):
        return f"numerics is {other.numerics!r}; a fleet needs replicas with --numerics strict"
    if not other.stages:
        return "weight_staging is 'none'; a fleet needs replicas that stage what is pushed"
    if mine.model != other.model:
        return _differ("model", mine.model, other.model)
    if found := mine.fingerprint.difference(other.fingerprint):
        return f"fingerprint: {found}"
    for name in sorted(mine.libraries.keys() | other.libraries.keys()):
        ours, theirs = mine.libraries.get(name, "missing"), other.libraries.get(name, "missing")
        if ours != theirs:
            return f"{_differ(name, ours, theirs)}; install the same versions"
    for name in ("vocab_size", "eos_token_ids", "max_model_len"):
        if getattr(mine, name) != getattr(other, name):
            return _differ(name, getattr(mine, name), getattr(other, name))
    ours, theirs = mine.gpu.partition(",")[0], other.gpu.partition(",")[0]  # without its memory
    return _differ("gpu", ours, theirs) if ours != theirs else ""


def _differ(name: str, mine: object, other: object) -> str:
    return f"{name} is {mine!r} here and {other!r} there"


def together(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Describe the replicas of a fleet, at least one, as one engine."""
    adapters = set.intersection(*({*info.adapters.items()} for info in infos))
    return replace(
        infos[0],
        pages=sum(info.pages for info in infos),
        max_running=sum(info.max_running for info in infos),
        adapters=dict(sorted(adapters)),
        phases={},
        pid=0,
        rank_pids=[],
    )
