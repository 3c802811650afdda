"""The share of a key in what is bounded for all keys together."""

from __future__ import annotations

from collections.abc import Mapping


def over_share(held: Mapping[str, float], asking: str, asked: float, limit: float) -> str | None:
    """Return the owner that has to make room for what `asking` asks: the one that holds most, if
    that is more than its share and `asking` stays within its own. `held`: by owner. A share is the
    limit divided by the owners that hold or ask for something.
    """
    share = limit / len(held.keys() | {asking})
    owner = max(held, key=held.__getitem__, default=asking)
    return owner if held.get(asking, 0) + asked <= share < held.get(owner, 0) else None
