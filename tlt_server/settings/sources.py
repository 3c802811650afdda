"""Reads settings from a YAML file, whose keys and values `config` checks, and from variables,
except those by which Kubernetes describes a Service to every container.

A key of the file may occur once, and only `true` and `false` are booleans. A Service named `tlt` or
`tlt-gateway` sets variables that begin with `TLT_` but are not settings of this server. A variable
counts as one of them only if its name and its value both have Kubernetes' form, so a misspelled
setting is still refused.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
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


_DIGITS = re.compile(r"\d{1,5}", re.ASCII)
_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S{1,80}:\d{1,5}", re.ASCII)
_PROTOCOL = re.compile(r"tcp|udp|sctp", re.ASCII)


def _is_host(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _form(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda value: pattern.fullmatch(value) is not None


_OF_A_PORT = r"_PORT_\d{1,5}_(TCP|UDP|SCTP)"
# End of a variable's name, after that of its Service -> whether a value has the form it must have.
FORMS: Mapping[str, Callable[[str], bool]] = {
    "_SERVICE_HOST": _is_host,
    r"_SERVICE_PORT(_\w+)?": _form(_DIGITS),
    "_PORT": _form(_ADDRESS),
    _OF_A_PORT: _form(_ADDRESS),
    _OF_A_PORT + "_PROTO": _form(_PROTOCOL),
    _OF_A_PORT + "_PORT": _form(_DIGITS),
    _OF_A_PORT + "_ADDR": _is_host,
}

log = structlog.get_logger()


def service_links(variables: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that describe a Service called `tlt` or `tlt-...`."""
    return [name for name, value in variables.items() if _is_link(name, value)]


def log_service_links() -> None:
    """Name this process's service links in one log line, if there are any."""
    if links := service_links(os.environ):
        log.info("service_links_ignored", variables=sorted(links))


def _is_link(name: str, value: str) -> bool:
    return any(
        re.fullmatch(rf"TLT(_\w+)?{end}", name, re.ASCII) is not None and fits(value)
        for end, fits in FORMS.items()
    )
