"""Launchers, each a file and one line of the table: what starts a fleet's replicas, or knows where
they are. Each is a function from a `FleetPlan` to a `Launcher` (`frontend/link/launching.py`).
"""

from __future__ import annotations

from tlt_server.registry import Registry

LAUNCHERS = Registry(
    "launcher",
    {
        "local": "tlt_server.fleet.launchers.local:local",
        "ray": "tlt_server.fleet.launchers.ray:on_ray",
        "static": "tlt_server.fleet.launchers.static:Static",
    },
)
