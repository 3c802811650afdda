"""The table of checks, in the order of the report. Checks that need torch run in a child process,
which may crash without harm.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from tlt_server.config import Config
from tlt_server.doctor.finding import Finding, examine


class Check(NamedTuple):
    name: str
    where: str  # module:function below `tlt_server.doctor`
    needs_settings: bool = True  # its one argument
    in_child: bool = False

    def run(self, config: Config | None) -> Finding:
        def check() -> Finding:
            module, _, function = self.where.partition(":")
            found: Finding = getattr(import_module(f"tlt_server.doctor.{module}"), function)(
                *([config] if self.needs_settings else [])
            )
            return found

        return examine(self.name, check)


def chosen(config: Config | None, *, in_child: bool) -> list[Check]:
    """Return the possible checks; without usable settings, only those that need none."""
    return [
        check
        for check in CHECKS
        if check.in_child == in_child and (config is not None or not check.needs_settings)
    ]


CHECKS = (
    Check("python", "host:python", needs_settings=False),
    Check("packages", "host:packages", needs_settings=False),
    Check("locale", "host:locale_encoding", needs_settings=False),
    Check("sockets", "host:sockets", needs_settings=False),
    Check("open files", "host:open_files"),
    Check("processors", "host:processors"),
    Check("libraries", "host:libraries"),
    Check("port", "places:port"),
    Check("api keys", "places:api_keys"),
    Check("certificates", "places:certificates"),
    Check("traces", "places:traces"),
    Check("weight root", "places:weight_root"),
    Check("state directory", "places:state_directory"),
    Check("step times", "places:step_times"),
    Check("disk", "places:disk_space"),
    Check("tokenizer", "places:tokenizer"),
    Check("torch", "compute:torch_import", needs_settings=False, in_child=True),
    Check("gpu", "compute:gpu", needs_settings=False, in_child=True),
    Check("kernels", "compute:kernels", needs_settings=False, in_child=True),
    Check("device", "model:device", in_child=True),
    Check("model", "model:target", in_child=True),
    Check("drafter", "model:drafter", in_child=True),
    Check("numerics", "model:numerics", in_child=True),
    Check("memory", "model:memory", in_child=True),
    Check("committed weights", "model:committed_weights", in_child=True),
)
