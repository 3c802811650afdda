"""The valid settings for the checks, even if others are faulty.

A check that reads a faulty setting fails with its name. The process of the checks that need torch
gets both as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tlt_server.config import Config, ResolvedConfig, load, named_in
from tlt_server.demo.workload import TARGET
from tlt_server.errors import StartupError

# What is read from the model where it is not set.
OF_THE_MODEL = frozenset(
    {
        "max_model_len",
        "max_prompt_tokens",
        "max_output_tokens",
        "served_model_name",
        "drafter_ring_mb",
    }
)


class Usable(NamedTuple):
    config: Config | None  # None: not even the sound settings can be read
    faults: list[StartupError]


class _Sound(ResolvedConfig):
    """Settings, some of which must not be read."""

    at_fault: ClassVar[frozenset[str]] = frozenset()

    def __getattribute__(self, name: str) -> Any:
        if name in type(self).at_fault:
            raise StartupError(f"not checked, as {name} is at fault; correct {name} first")
        return super().__getattribute__(name)


def usable_settings(flags: Mapping[str, Any], file: Path | None) -> Usable:
    """Load the valid settings. Faulty values are left out until the rest can be loaded."""
    at_fault: frozenset[str] | None = None
    faults: dict[str, StartupError] = {}
    while True:
        stand_in = {"model": str(TARGET)} if "model" in (at_fault or ()) else {}
        ignoring = None if at_fault is None else at_fault - stand_in.keys()
        named: frozenset[str] = frozenset()
        try:
            config = load({**flags, **stand_in}, file=file, ignoring=ignoring)
            named = frozenset({"model"})  # the only one whose files are read below
            return Usable(_sound(config.resolved(), at_fault or frozenset()), [*faults.values()])
        except StartupError as error:
            lines = error.message.splitlines()
            faults.update((line, StartupError(line)) for line in lines if line not in faults)
            named = named or frozenset(name for line in lines for name in named_in(line))
            if at_fault is not None and named <= at_fault:
                return Usable(None, [*faults.values()])
            at_fault = named | (at_fault or frozenset())


def _sound(config: Config, at_fault: frozenset[str]) -> Config:
    unusable = at_fault | (OF_THE_MODEL if "model" in at_fault else frozenset())

    class Sound(_Sound):
        at_fault: ClassVar[frozenset[str]] = unusable

    return Sound.model_construct(**dict(config)) if unusable else config


def written(config: Config) -> str:
    at_fault = config.at_fault if isinstance(config, _Sound) else ()
    return json.dumps([config.model_dump(mode="json"), sorted(at_fault)])


def read(text: str) -> Config:
    fields, at_fault = json.loads(text)
    return _sound(Config.model_validate(fields), frozenset(at_fault))
