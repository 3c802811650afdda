"""LoRA adapters as all dialects load and unload them: a push of its own, and one command."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tlt_client.arguments import VERSION
from tlt_server.commands import Manifest, PushWeights, UnloadAdapter
from tlt_server.errors import InvalidRequest
from tlt_server.events import WeightReport
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.weights.session import WeightSession

AdapterName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=128,
        pattern=VERSION,
        description="a name without slash or control characters, which the model does not have",
    ),
]


class Adapters:
    def __init__(self, session: WeightSession, taken: tuple[str, ...]) -> None:
        """`taken`: names of the model itself."""
        self._session, self._taken = session, taken

    def check_name(self, name: str) -> None:
        if name in self._taken:
            raise InvalidRequest(
                f"adapter is {shown(name)}, a name of the model itself; give it another"
            )

    async def load(self, name: str, path: str) -> WeightReport:
        """Push an adapter from a directory, outside of any weight update. Requests that run with
        another of its name go on with this one.
        """
        self.check_name(name)
        manifest = Manifest(role="adapter", adapter=name, path=path)
        return await self._session.ask(PushWeights(self._session.command_id(), manifest))

    async def unload(
        self, name: str, in_flight: Literal["drain", "abort"] = "drain"
    ) -> WeightReport:
        return await self._session.ask(UnloadAdapter(self._session.command_id(), name, in_flight))
