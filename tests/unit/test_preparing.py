"""Steps are captured without running them, unless another library must get ready. Exhausted memory
ends captures and nothing else; a kernel that cannot be loaded is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from tlt_kernels.gpu.variants import Unloaded, Variant
from tlt_server.engine.gpu.start import preparing
from tlt_server.engine.gpu.start.kernel_start import load_all
from tlt_server.engine.gpu.start.preparing import KernelList, capture, record
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey
from tlt_server.errors import Unavailable

DRAFT, STEP = DraftKey("eagle", 4, 3, 1), ExtendKey(4, 16)
LONG_PROMPT = ExtendKey(4, 4, 4096, 1)


class Prepared:
    """A runner, its passes and graphs, which note what is asked of them; a kernel of `lacks` is
    missing.
    """

    def __init__(self, lacks: object = None, *, run_first: bool = False) -> None:
        self.passes = self.graphs = self
        self.lacks, self.run_first = lacks, run_first
        self.recorded: list[object] = []
        self.ran: list[object] = []
        self.ended: list[str] = []

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        yield

    def of(self, key: object) -> object:
        return key

    def work(self, part: object) -> Callable[[], object]:
        return lambda: part

    def record(self, key: object, work: Callable[[], object]) -> None:
        assert work() == key
        if key == self.lacks:
            raise Unloaded("a kernel")
        self.recorded.append(key)

    def run_empty(self, key: object) -> None:
        self.ran.append(key)

    def keeps(self, key: object) -> bool:
        return key != LONG_PROMPT

    def rehearse(self) -> None:
        pass

    def cap_rows(self, key: object) -> None:
        pass

    def end(self, why: str, remedy: str) -> None:
        self.ended.append(why)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Names of kernels that a launch finds missing, until they are loaded."""
    names: list[object] = []

    @contextmanager
    def listed() -> Iterator[list[object]]:
        yield [*names]

    monkeypatch.setattr(preparing, "listed", listed)
    monkeypatch.setattr(preparing, "load", names.remove)
    return names


@pytest.mark.parametrize(
    ("lacks", "run_first", "recorded", "ran"),
    [
        (None, False, [DRAFT, STEP], []),
        (DRAFT, False, [DRAFT, STEP], []),
        (None, True, [], [DRAFT, LONG_PROMPT, STEP]),
    ],
)
def test_capture_skips_the_first_run_if_kernels_are_loaded(
    lacks: Any,
    run_first: bool,
    recorded: list[Any],
    ran: list[Any],
    listed: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, seen = Prepared(lacks, run_first=run_first), []
    if lacks:
        listed.append("a kernel")
        monkeypatch.setattr(preparing, "load", lambda kernel: setattr(runner, "lacks", None))
    keys = [DRAFT, LONG_PROMPT, STEP]
    capture(runner, keys, lambda done, of: seen.append((done, of)))  # type: ignore[arg-type]
    assert (runner.recorded, runner.ran) == (recorded, ran)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_later_graph_is_recorded_once_its_kernels_are_loaded(listed: list[object]) -> None:
    runner = Prepared()
    listed += ["a kernel", "another"]
    record(runner, DRAFT)  # type: ignore[arg-type]
    assert runner.recorded == [DRAFT] and not runner.ran and not listed


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_exhausted_memory_ends_only_the_captures(
    error: RuntimeError, listed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Prepared()
    listed.append("a kernel")

    def fails(kernel: object) -> None:
        raise error

    monkeypatch.setattr(preparing, "load", fails)
    record(runner, DRAFT)  # type: ignore[arg-type]
    [why] = runner.ended
    assert "no room to record DraftKey" in why and not runner.recorded
    error.args = ("an illegal address",)
    if type(error) is RuntimeError:
        with pytest.raises(RuntimeError, match="illegal"):
            record(runner, DRAFT)  # type: ignore[arg-type]


class Listed:
    """Passes, of which each draft needs a kernel, and those that a graph holds."""

    def __init__(self) -> None:
        self.made: set[object] = {STEP}
        self.stream = None
        self.dropped: set[object] = set()

    def drop(self, keys: set[object]) -> None:
        self.dropped |= keys


def test_kernel_list_is_loaded_in_parts_and_frees_its_buffers(
    listed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, brought = Listed(), list[object]()
    found = [Variant("kernels", name, "") for name in "abcde"]
    kernels = KernelList(passes)  # type: ignore[arg-type]
    monkeypatch.setattr(
        preparing, "_rehearse", lambda *made: setattr(passes, "made", {STEP, DRAFT})
    )
    monkeypatch.setattr(preparing, "load", brought.append)
    monkeypatch.setattr(preparing, "listed", lambda: nullcontext(dict.fromkeys(found)))
    kernels.add(DRAFT)  # type: ignore[arg-type]
    assert [*kernels.found] == found
    kernels.load(2, last=False)
    assert brought == found[:2]
    kernels.load(1, last=True)
    assert brought == found, "what is left at the last part"
    kernels.drop()
    assert passes.dropped == {DRAFT}


def test_a_kernel_that_cannot_be_loaded_is_refused_by_name() -> None:
    kernels = KernelList(Listed())  # type: ignore[arg-type]
    kernels._unloaded.append(Variant("os", "system", "true"))
    with pytest.raises(Unavailable, match="kernel system .*os is not a module of tlt_kernels"):
        kernels.load(1, last=False)


def test_kernels_not_loaded_ahead_are_reported_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A record may have come from elsewhere, and names no module but those of the kernels."""
    load_all([Variant("os", "system", "true"), Variant("tlt_kernels.gpu.gather", "nothing", "{}")])
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "2 of 2 kernels" in message
    assert "os is not a module of tlt_kernels" in message
