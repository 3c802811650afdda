"""A start captures steps without running them, unless a kernel is missing or a library of others
has to get ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tlt_kernels.gpu.variants import Unloaded, Variant
from tlt_server.engine.gpu.drafts import DraftKey
from tlt_server.engine.gpu.extend import ExtendKey
from tlt_server.engine.gpu.kernel_start import _load
from tlt_server.engine.gpu.preparing import capture

DRAFT, STEP = DraftKey("eagle", 4, 3, 1), ExtendKey(4, 16)
LONG_PROMPT = ExtendKey(4, 4, 4096, 1)


class Prepared:
    """A runner, its passes and graphs, which note what is asked of them; a kernel of `lacks` is
    missing.
    """

    def __init__(self, lacks: object = None) -> None:
        self.passes = self.graphs = self
        self._lacks = lacks
        self.recorded: list[object] = []
        self.ran: list[object] = []

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        yield

    def of(self, key: object) -> object:
        return key

    def work(self, part: object) -> Callable[[], object]:
        return lambda: part

    def record(self, key: object, work: Callable[[], object]) -> None:
        assert work() == key
        if key == self._lacks:
            raise Unloaded("a kernel")
        self.recorded.append(key)

    def run_empty(self, key: object) -> None:
        self.ran.append(key)

    def keeps(self, key: object) -> bool:
        return key != LONG_PROMPT

    def rehearse(self) -> None:
        pass


@pytest.mark.parametrize(
    ("lacks", "run_first", "recorded", "ran"),
    [
        (None, False, [DRAFT, STEP], []),
        (STEP, False, [DRAFT], [STEP]),
        (None, True, [], [DRAFT, LONG_PROMPT, STEP]),
    ],
)
def test_a_capture_needs_no_run_where_all_kernels_are_loaded(
    lacks: Any, run_first: bool, recorded: list[Any], ran: list[Any]
) -> None:
    runner, seen = Prepared(lacks), []
    keys = [DRAFT, LONG_PROMPT, STEP]
    capture(runner, keys, lambda done, of: seen.append((done, of)), run_first=run_first)  # type: ignore[arg-type]
    assert (runner.recorded, runner.ran) == (recorded, ran)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_kernels_that_cannot_be_loaded_ahead_are_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A record may have come from elsewhere, and names no module but those of the kernels."""
    _load([Variant("os", "system", "true"), Variant("tlt_kernels.gpu.gather", "nothing", "{}")])
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "2 of 2 kernels" in message
    assert "os has no kernels of ours" in message
