"""The metric of how long the event loop is held."""

from __future__ import annotations

import asyncio
import time

from tlt_server.frontend.http.loop_share import watch_turns
from tlt_server.metrics import Metrics


def test_long_turn_is_measured() -> None:
    metrics = Metrics()

    async def main() -> None:
        watching = asyncio.create_task(watch_turns(metrics))
        await asyncio.sleep(0.02)
        asyncio.get_running_loop().call_soon(time.sleep, 0.06)
        await asyncio.sleep(0.02)
        watching.cancel()

    asyncio.run(main())
    value = metrics.registry.get_sample_value
    assert 0.05 < (value("tlt_loop_held_longest_seconds") or 0) < 10
    total, below = (
        value("tlt_loop_held_seconds_bucket", {"le": le}) or 0.0 for le in ("+Inf", "0.05")
    )
    assert total > below
