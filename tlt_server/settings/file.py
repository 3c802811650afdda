"""Reads the YAML file of settings; `config` checks the keys and values.

A key may stand once, and only `true` and `false` are booleans.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tlt_server.errors import StartupError


class _Loader(yaml.SafeLoader):
    """YAML in which only true and false are booleans: `policy: off` is a string."""

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag != "tag:yaml.org,2002:bool" or first in "tTfF"
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key[:80]} is given twice; keep one")
        return super().construct_mapping(node, deep)


def read_settings(file: Path) -> dict[Any, Any]:
    """Return the keys of a file and their values. `StartupError` if it cannot be read."""
    try:
        keys = yaml.load(file.read_text("utf-8"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())  # in one line
        raise StartupError(f"cannot read the configuration file {file}: {said}") from None
    if not isinstance(keys, dict | None):
        raise StartupError(
            f"the configuration file {file} holds a {type(keys).__name__}; it must map setting "
            "names to values"
        )
    return keys or {}
