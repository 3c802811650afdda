"""Loads and unloads LoRA adapters for all dialects: by a separate push, and by one command."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from msgspec import Meta

from tlt_client.arguments import ADAPTER, MAX_ADAPTER
from tlt_server.frontend.weights.session import WeightSession
from tlt_server.wire.commands import Manifest, PushWeights, UnloadAdapter
from tlt_server.wire.events import WeightReport

AdapterName = Annotated[
    str,
    "a name without '+', '@', control and format characters; the model's own: requests that name "
    "the model have it",
    Meta(min_length=1, max_length=MAX_ADAPTER, pattern=ADAPTER),
]


Ends = Literal["drain", "abort"]
AGAIN_S = 1.0  # between two tries to end what runs with an adapter


class Adapters:
    def __init__(self, session: WeightSession, drain_s: float) -> None:
        """`drain_s`: how long the requests of an unloaded adapter may continue."""
        self._session, self._drain_s = session, drain_s
        self._unloads: set[asyncio.Task[WeightReport]] = set()

    async def load(self, name: str, path: str) -> WeightReport:
        """Push an adapter from a directory, outside of any weight update. Running requests of an
        older adapter of this name continue with the new one.
        """
        manifest = Manifest(role="adapter", adapter=name, path=path)
        return await self._session.ask(PushWeights, manifest)

    async def unload(self, name: str, in_flight: Ends = "drain") -> WeightReport:
        """Unload an adapter. Its running requests may continue for `drain_s`, even if the caller
        has left; then they are ended.
        """
        unload = asyncio.create_task(self._unload(name, in_flight))
        self._unloads.add(unload)
        unload.add_done_callback(self._ended)
        return await asyncio.shield(unload)

    async def _unload(self, name: str, in_flight: Ends) -> WeightReport:
        asked = asyncio.ensure_future(self._ask(name, in_flight))
        await asyncio.wait({asked}, timeout=self._drain_s)
        while not asked.done():
            # Refused while the weights sleep. What it finds ended meanwhile is no error.
            await asyncio.gather(self._ask(name, "abort"), return_exceptions=True)
            await asyncio.wait({asked}, timeout=AGAIN_S)
        return await asked

    def _ended(self, unload: asyncio.Task[WeightReport]) -> None:
        self._unloads.discard(unload)
        if not unload.cancelled():
            unload.exception()  # mark it as retrieved: the caller may have left

    async def _ask(self, name: str, in_flight: Ends) -> WeightReport:
        return await self._session.ask(UnloadAdapter, name, in_flight)
