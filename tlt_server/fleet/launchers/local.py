"""The launcher `local`: replicas as children of the gateway, with the visible GPUs divided among
them, or a CPU's processors where there are no GPUs.
"""

from __future__ import annotations

import sys

from tlt_server.fleet.launchers.child import Change, Child, StartedReplicas
from tlt_server.fleet.launchers.plan import FleetPlan
from tlt_server.frontend.http.logs import lasting
from tlt_server.process.machine import visible_gpus
from tlt_server.settings.server import available_processors

HOST = "127.0.0.1"
PER_PROCESSOR = 4  # bound on the replicas that compute on the CPU


def local(plan: FleetPlan) -> StartedReplicas:
    return StartedReplicas(plan.replicas or 0, (here := _Here(plan)).live, here.lacking)


class _Here:
    """The GPUs of this machine, and servers on parts of them."""

    def __init__(self, plan: FleetPlan) -> None:
        self._plan, self._each = plan, plan.gpus_each
        self._gpus = visible_gpus() if self._each else []
        if not self._gpus and plan.config.device is None:
            self._each = 0  # the replicas will compute on the CPU
        self._flags = list(plan.flags)
        if not self._each and plan.config.threads is None:
            self._flags += [
                "--threads",
                str(max(1, available_processors() // (plan.replicas or 1))),
            ]
        self._lines = lasting(sys.stderr)

    def lacking(self, number: int) -> str:
        if not self._each:
            fit = PER_PROCESSOR * (processors := available_processors())
            if number <= fit:
                return ""
            return f"{processors} processors take {fit} replicas, not {number}; lower --replicas"
        if number * self._each <= len(self._gpus):
            return ""
        return (
            f"{number} replicas of {self._each} GPUs each need {number * self._each}, and "
            f"{len(self._gpus)} are visible; lower --replicas or --tensor-parallel, or name more "
            "in CUDA_VISIBLE_DEVICES"
        )

    async def live(self, name: str, change: Change) -> str:
        first = int(name[1:]) * self._each  # its number is below the replicas that fit
        mine, variables = self._gpus[first : first + self._each], self._plan.variables()
        if mine:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        place = f"GPU {', '.join(mine)}" if mine else "CPU"
        directory, stop_s = self._plan.directory(name), self._plan.stop_s
        server = Child(name, self._flags, variables, directory, stop_s, HOST, place)
        return await server.live(change, lambda line: print(line, file=self._lines, flush=True))
