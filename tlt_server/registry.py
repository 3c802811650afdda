"""Name -> "module:Class" tables, resolved lazily so that optional libraries stay optional.

Each extension folder owns one `Registry`; a new drafter, policy, dialect, model family or attention
backend is one new file and one line in that folder's table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from tlt_server.errors import StartupError


class Registry:
    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        self.kind = kind
        self._table = dict(table)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def resolve(self, name: str) -> Any:
        """Return the object that `name` stands for. `StartupError` names the nearest known name."""
        target = self._table.get(name)
        if target is None:
            near = difflib.get_close_matches(name, self._table, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StartupError(
                f"unknown {self.kind} {name!r}: known are {', '.join(sorted(self._table))}{hint}"
            )
        return load_object(target)


def load_object(target: str) -> Any:
    """Import "module:Name" and return the object."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
