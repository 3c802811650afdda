"""The state and operations that all routes share."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import structlog

from tlt_server.errors import Cancelled, Conflict, Forbidden, TltError, Unavailable
from tlt_server.frontend.generation.generation import Generation, Generations
from tlt_server.frontend.generation.requests import (
    NATIVE,
    WHOLE,
    NativeRequest,
    PromptReading,
    RequestBatch,
    Words,
)
from tlt_server.frontend.generation.text import Pieces, Text
from tlt_server.frontend.generation.validation import Validator
from tlt_server.frontend.http.counting import Bounds
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.limits import Reading
from tlt_server.frontend.http.parsing import Bodies
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.trainer import TrainerLink
from tlt_server.frontend.parsers.answer import Parsers, parsers_of
from tlt_server.frontend.reading.reader import Reader
from tlt_server.frontend.rollouts.responses import ResponseShelf
from tlt_server.frontend.rollouts.rollouts import Rollouts
from tlt_server.frontend.weights.adapters import Adapters
from tlt_server.frontend.weights.adoption import Adoption, DrafterExports
from tlt_server.frontend.weights.broadcasts import Broadcasts
from tlt_server.frontend.weights.checker import WeightChecker
from tlt_server.frontend.weights.files import Takers
from tlt_server.frontend.weights.session import WeightSession
from tlt_server.frontend.weights.uploads import Uploads
from tlt_server.metrics import Metrics
from tlt_server.speculation.drafters import weights_directory
from tlt_server.wire.commands import InFlight, Memory
from tlt_server.wire.events import EngineInfo

if TYPE_CHECKING:
    from tlt_server.config import ResolvedConfig


@dataclass(frozen=True)
class Service:
    """The parts of the server that a route may use."""

    config: ResolvedConfig
    engine: EngineClient
    text: Text
    validator: Validator
    metrics: Metrics
    generations: Generations
    rollouts: Rollouts
    uploads: Uploads | None  # None: the server takes no weights by http
    trainer: TrainerLink | None = None  # None: nothing is recorded
    reading: Reading = field(default_factory=Reading)
    started_s: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.config.model, secrets=(self.config.api_key_variable,))

    @cached_property
    def bodies(self) -> Bodies:
        return Bodies(Bounds.of(self.config))

    @cached_property
    def responses(self) -> ResponseShelf:
        return ResponseShelf(self.config.max_responses, self.config.max_responses_mb * 2**20)

    @cached_property
    def parsers(self) -> Parsers:
        config, template = self.config, self.text.template_for(tools=True)
        source = template.source if template is not None else None
        return parsers_of(config.tool_call_parser, config.reasoning_parser, source)

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.text)

    @cached_property
    def session(self) -> WeightSession:
        return WeightSession(
            self.engine,
            stages=self.config.weight_staging != "none",
            ttl_s=self.config.weight_update_ttl_s,
        )

    @cached_property
    def adapters(self) -> Adapters:
        return Adapters(self.session, self.config.drain_timeout_s)

    @cached_property
    def broadcasts(self) -> Broadcasts:
        return Broadcasts(self.session)

    @cached_property
    def adoption(self) -> Adoption:
        return Adoption(self.engine, self.session, weights_directory(self.config.drafter))

    @cached_property
    def exports(self) -> DrafterExports:
        return DrafterExports(self.config, self.adoption)

    @cached_property
    def checker(self) -> WeightChecker:
        return WeightChecker(self.session)

    @cached_property
    def takers(self) -> Takers:
        return Takers()

    def spot_trainer(self) -> TrainerLink:
        """Return the link to a training process. `Conflict` without one."""
        trainer = self.trainer
        if trainer is None:
            raise Conflict(
                "drafter_training is off; restart the server with --drafter-training idle and "
                "--state-dir"
            )
        if not trainer.trains:
            raise Conflict(
                "this server drafts without a network, so nothing can be trained; restart it with "
                "--drafter DIR, which tlt drafter init can write"
            )
        if not self.config.drafter_feature_mb:
            raise Conflict(
                "drafter_feature_mb is 0, so no features are kept to train on; restart the server "
                "with --drafter-feature-mb"
            )
        return trainer

    async def sleep(self, memory: Collection[Memory], in_flight: InFlight = "recompute") -> None:
        """Free the memory; with the weights', also the trainer's. `Unavailable` if the trainer has
        not freed its memory in time: the engine sleeps nevertheless, and a repeated call waits
        again.
        """
        await self.engine.pauses.sleep(memory, in_flight)
        number = self.engine.activity.asleep
        if self.trainer is None or "weights" not in memory or await self.trainer.gave_back(number):
            return
        if self.engine.activity.asleep == number:
            raise Unavailable(
                "the engine sleeps, but the trainer process has not given its memory back yet "
                f"({self.trainer.spot.state}); send this again to wait for it, or POST "
                "/engine/wake",
                retry_after_s=1,
            )

    def close(self) -> None:
        """Tell every waiting or sending client that the server is shutting down."""
        self.engine.close()
        self.reading.close()
        self.reader.close()

    def abort(self, names: Iterable[str] | None, caller: Caller) -> int:
        """End the caller's items of these names with their present outputs; without names,
        everything open. Return the number of open sequences that this ends.
        """
        if names is None and not caller.may("operate"):
            raise Forbidden(
                f"aborting everything needs the scope operate, and the key {caller.name} does not "
                "have it; name its requests"
            )
        named = self.generations.named
        ids = self.engine.open_ids if names is None else named.find(names, caller)
        ended = self.engine.abort(ids)
        # The audit line of the request has these.
        structlog.contextvars.bind_contextvars(
            action="abort all" if names is None else "abort", sequences=ended
        )
        return ended

    async def begin(
        self,
        asked: NativeRequest,
        caller: Caller,
        words: Words = NATIVE,
        reading: PromptReading = WHOLE,
        names: Collection[str] = (),
    ) -> tuple[RequestBatch, Generation]:
        """Check a request, admit it, all of it or (with a typed error) nothing, and start to
        generate. The caller closes the generation. `names`: further names by which the whole batch
        can be aborted.
        """
        batch = await self.validator.batch(asked, self.info, caller, words, reading)
        return batch, await self.generations.start(batch, caller.name, names)

    @property
    def info(self) -> EngineInfo:
        """Return the engine's description; the engine must have been ready."""
        assert self.engine.info is not None
        return self.engine.info

    def running(self) -> EngineInfo:
        """Return the description of the running engine. `Unavailable` without one."""
        self.engine.check_running()
        return self.info

    @property
    def ready(self) -> bool:
        """Return True if a request sent now would be accepted."""
        try:
            self.engine.check_available()
        except Unavailable:
            return False
        return True

    @property
    def numerics(self) -> str:
        """Return only the mode, strict or fast, without its method."""
        return (
            self.engine.info.numerics.partition(":")[0]
            if self.engine.info is not None
            else self.config.numerics
        )

    def rejected(self, error: TltError) -> None:
        if not isinstance(error, Cancelled):
            self.metrics.exchanges.rejected.labels(error.code).inc()
