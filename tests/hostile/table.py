"""The figures of `python -m tests.hostile`, each next to the bound that it must keep."""

from typing import Any, NamedTuple

SCENARIOS = ("bodies", "parsing", "neighbours", "streams", "tenants", "connections")


class Figure(NamedTuple):
    """A figure and its bounds: at most, or with `least` at least."""

    what: str
    scenario: str
    figure: str
    must: float
    stretch: float | None = None
    unit: str = ""
    least: bool = False

    def keeps(self, value: float, bound: float | None) -> bool:
        return bound is not None and (value >= bound if self.least else value <= bound)


def rows(figures: dict[str, Any]) -> list[Figure]:
    mib = figures.get("bodies", {}).get("mib", 0.0)
    return [
        Figure("longest hold of the loop, any body", "bodies", "longest_hold_ms", 20, 10, "ms"),
        Figure(
            "memory over baseline, any body",
            "bodies",
            "memory_over_baseline_mib",
            64 + 4 * mib,
            2 * mib,
            "MiB",
        ),
        Figure("longest probe, any body", "bodies", "probe_max_ms", 50, None, "ms"),
        Figure(
            "small requests under a hostile key, p99 to idle", "neighbours", "ratio", 3, 1.5, "x"
        ),
        Figure("the largest stream: others' p99", "streams", "small_p99_ms_busy", 100, 50, "ms"),
        Figure("the largest stream: sent to own size", "streams", "ratio", 4, 2, "x"),
        Figure("silent connections: probes answered", "connections", "answered", 1, 1, "", True),
        Figure("silent connections: engine restarted", "connections", "restarted", 1, 1, "", True),
        Figure(
            "3x load: small keys' share of demand", "tenants", "small_share", 0.95, 0.99, "", True
        ),
        Figure("parsing of the largest batch", "parsing", "cpu_s", float("inf"), None, "s CPU"),
    ]
