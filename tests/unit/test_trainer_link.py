"""The frontend starts another trainer process, however the last one ended."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process

import pytest

from tlt_server.frontend.link import trainer as links
from tlt_server.frontend.link.trainer import TrainerLink
from tlt_server.metrics import Metrics


@pytest.mark.parametrize(
    "code", ["print('a warning')", "print('x' * 2**17, flush=True)", "raise SystemExit(3)"]
)
def test_a_process_that_ends_or_writes_no_report_is_replaced(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "FIRST_DELAY_S", 0.0)
    asyncio.run(two_processes(code))


async def two_processes(code: str) -> None:
    started = [asyncio.Event() for _ in range(2)]
    launched: list[Process] = []

    async def launch() -> Process:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE)
        launched.append(process)
        started[min(len(launched), 2) - 1].set()
        return process

    running = asyncio.create_task(TrainerLink(launch, Metrics().samples, None).run())
    second = asyncio.create_task(started[1].wait())
    await asyncio.wait({running, second}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert second.done() and not running.done()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert all(process.returncode is not None for process in launched)
