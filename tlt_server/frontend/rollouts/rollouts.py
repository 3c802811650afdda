"""Batches that outlive their connection: each runs as a task, a journal keeps its outputs, and its
results can be fetched at any time.

A rollout ends by itself, by its deadline or by `delete`, never because a client left. After a death
of the engine it continues with the same tokens; with a persistent state directory, also after a
death of this process. `shelf` bounds their number, bytes and age.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tlt_server.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    NotFound,
    StorageFailed,
    TltError,
    Unavailable,
)
from tlt_server.frontend.generation.generation import Generation, Generations
from tlt_server.frontend.generation.items import FailedItem, FinishedItem
from tlt_server.frontend.generation.requests import RequestBatch
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.replies import unexpected
from tlt_server.frontend.http.slices import FREED, SLICE_BYTES
from tlt_server.frontend.rollouts.journal import (
    FORMAT,
    Grown,
    Header,
    Journal,
    KeptItem,
    Past,
    RolloutEnd,
    frame,
    now,
    outlines,
)
from tlt_server.frontend.rollouts.owning import unusable
from tlt_server.frontend.rollouts.rollout import KeptRollout
from tlt_server.frontend.rollouts.shelf import Shelf
from tlt_server.metrics import Metrics
from tlt_server.wire.fingerprint import Fingerprint

if TYPE_CHECKING:
    from tlt_server.config import Config

RETRY_S = 0.2  # between two tries to submit a rollout of an earlier process
WRITTEN_BYTES = 2**20  # written to a journal at once, in about 1 ms on a slow core

log = structlog.get_logger()


class Rollouts:
    def __init__(
        self, directory: Path, config: Config, metrics: Metrics, generations: Generations
    ) -> None:
        self._directory, self._metrics, self._generations = directory, metrics, generations
        self._shelf, self._ttl_s = Shelf(config, metrics), config.rollout_ttl_s
        self._model = str(config.model.resolve())
        self.lasting = config.state_dir is not None
        self._resuming: asyncio.Task[None] | None = None
        self._replaying = asyncio.Semaphore(1)

    # the start and the end of a process

    async def open(self) -> None:
        """Load the rollouts in the directory. Finished ones can be fetched; the others continue
        once the engine is ready. A thread reads the journals while the engine starts.
        """
        try:
            found = [
                self._found(path, said)
                for path, said in await asyncio.to_thread(outlines, self._directory)
            ]
        except OSError as error:
            raise unusable(self._directory, error) from None
        for rollout in sorted(
            (rollout for rollout in found if rollout), key=lambda rollout: rollout.header.created_s
        ):
            self._shelf.keep(rollout)
        self._resuming = asyncio.create_task(
            self._resume([rollout for rollout in self._shelf if rollout.done_s is None])
        )

    async def suspend(self, *, detached_only: bool = False) -> None:
        """Stop rollouts at their present state. Their journals stay for the next process to
        continue.
        """
        stopped = [
            rollout
            for rollout in self._shelf
            if rollout.done_s is None and (rollout.header.detached or not detached_only)
        ]
        tasks = [
            task
            for task in (self._resuming, *(rollout.task for rollout in stopped))
            if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for rollout in stopped:
            rollout.over(
                Unavailable(
                    "the server is stopping; the rollout goes on when a server with this state_dir "
                    "starts"
                    if self.lasting
                    else "the server is stopping, and without a state_dir its rollouts end with it",
                    retry_after_s=5,
                )
            )

    async def close(self) -> None:
        await self.suspend()
        for rollout in self._shelf:
            if rollout.expiry is not None:
                rollout.expiry.cancel()

    # called by routes

    def __iter__(self) -> Iterator[KeptRollout]:
        return iter(self._shelf)

    def find(self, id: str, caller: Caller) -> KeptRollout:
        """Return the rollout. `NotFound` also for another key's rollout, so that its existence
        stays unknown.
        """
        rollout = self._shelf.get(id)
        if rollout is None or not caller.sees(rollout.header.owner):
            raise NotFound(
                f"there is no rollout {id[:80]!r}; it was deleted, or made room for others, or "
                f"finished more than {self._ttl_s:g} s ago (rollout_ttl_s), or started by a server "
                "without this state_dir: send its request again"
            )
        return rollout

    def keyed(self, owner: str, key: str, digest: str) -> KeptRollout | None:
        """Return the rollout of an owner's idempotency key. `Conflict` if it was started with
        another body.
        """
        rollout = self._shelf.keyed(owner, key)
        if rollout is not None and rollout.header.digest != digest:
            raise Conflict(
                f"the Idempotency-Key {key[:80]!r} was used before with another body; repeat that "
                "body, or use a new key"
            )
        return rollout

    async def begin(
        self, batch: RequestBatch, *, owner: str, key: str, digest: str, detached: bool
    ) -> KeptRollout:
        """Record and submit a batch, or (with a typed error) neither. If the same request has
        started meanwhile, return its rollout.
        """
        self._shelf.check_room(owner)
        kept = await asyncio.to_thread(lambda: [KeptItem.of(item) for item in batch.items])
        created = now()
        header = Header(
            format=FORMAT,
            id=f"r-{secrets.token_hex(16)}",
            model=self._model,
            detached=detached,
            owner=owner,
            key=key,
            digest=digest,
            created_s=created.wall_s,
            deadline_s=created.wall_s + batch.deadline_s - time.monotonic(),
            boot=created.boot,
            boot_s=created.boot_s,
            fingerprint=self._fingerprint,
            items=kept,
        )
        rollout = KeptRollout(header, self._directory / f"{header.id}.journal")
        try:
            rollout.items = self._generations.items(batch)
            rollout.journal = Journal(rollout.path)
            await self._write(rollout, await asyncio.to_thread(frame, header))
            same = self.keyed(owner, key, digest)
            if same is not None:
                self._shelf.remove_file(rollout)
                return same
            self._shelf.check_room(owner)
            self._run(rollout, batch.deadline_s)
        except BaseException:
            self._shelf.remove_file(rollout)
            raise
        self._metrics.sequences.prompt.inc(
            sum(len(item.token_ids) * len(item.requests) for item in header.items)
        )
        self._shelf.keep(rollout)
        return rollout

    async def _write(self, rollout: KeptRollout, framed: bytes) -> None:
        """Write a large record to the journal while other requests run."""
        view = memoryview(framed)
        for at in range(0, len(view), WRITTEN_BYTES):
            self._shelf.append(rollout, view[at : at + WRITTEN_BYTES])
            await asyncio.sleep(0)

    async def results(self, rollout: KeptRollout) -> list[FinishedItem | FailedItem]:
        """Return the ended items, in order. Mark a finished rollout as fetched."""
        ended = rollout.ended
        if rollout.done_s is not None:
            rollout.fetched = True
            if rollout.written:
                rollout.ended = None
        if ended is None:
            async with self._replaying:  # one at a time: each holds a whole rollout
                replayed = await asyncio.to_thread(rollout.replayed, self._generations.items)
                ended, done = replayed.ended, replayed.done
                turn = self._generations.share.of(rollout.header.owner)
                while replayed.items.shed(FREED):
                    await turn(SLICE_BYTES)
            if rollout.done_s is not None and not done:
                raise StorageFailed(
                    f"the journal of the rollout {rollout.header.id} was written by another "
                    "version of this server and cannot be read to its end; send its request again"
                )
        return [ended[id] for id in rollout.item_ids if id in ended]

    def delete(self, rollout: KeptRollout) -> None:
        """Abort its running sequences, and delete it."""
        rollout.over(Cancelled("the rollout was deleted while it ran"))
        self._shelf.forget(rollout)

    # one rollout, from its start or its journal to its end

    def _found(self, path: Path, said: Past | None) -> KeptRollout | None:
        if said is None or said.header.id != path.stem:
            log.warning(
                "rollout_lost",
                file=path.name,
                reason="its first record is damaged, or not whole (then no client knows it), or it "
                "is a copy; the file is put aside with .damaged after its name",
            )
            path.rename(f"{path}.damaged")
            return None
        rollout = KeptRollout(said.header, path)
        self._shelf.count(rollout, said.length)
        if said.end is not None:
            rollout.done, rollout.tokens, rollout.ended = said.end.at, said.end.tokens, None
            rollout.over()
            self._shelf.expire_later(rollout)
        return rollout

    async def _resume(self, rollouts: list[KeptRollout]) -> None:
        await self._generations.engine.ready()
        await asyncio.gather(*(self._try(rollout) for rollout in rollouts))

    async def _try(self, rollout: KeptRollout) -> None:
        keep_file = True  # a server that fits may still go on with it
        try:
            self._check_fit(rollout.header)
            keep_file = False
            await self._take_up(rollout)
        except Exception as error:
            if not rollout.is_over:  # not deleted meanwhile
                typed = error if isinstance(error, TltError) else unexpected(error)
                self._finish(rollout, typed, keep_file=keep_file)

    async def _take_up(self, rollout: KeptRollout) -> None:
        """Continue a rollout of an earlier process. Wait while the engine cannot take it, but not
        beyond its deadline.
        """
        async with self._replaying:
            length, items, ended, _ = await asyncio.to_thread(
                rollout.replayed, self._generations.items
            )
        if rollout.is_over:
            return
        rollout.items, rollout.ended, rollout.journal = items, ended, Journal(rollout.path, length)
        resumed = len(items.open())
        if not resumed:  # all items have ended; only its end was not written down
            self._finish(rollout, None)
        while not rollout.is_over:
            if time.monotonic() >= rollout.deadline_s:
                raise DeadlineExceeded(
                    "the deadline (timeout_s) passed before the engine could take the rollout up "
                    "again; ask for more time"
                )
            try:
                self._run(rollout, rollout.deadline_s, accepted=True)
                self._metrics.rollouts.resumed.inc(resumed)
                return
            except TltError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(RETRY_S)

    @property
    def _fingerprint(self) -> Fingerprint | None:
        info = self._generations.engine.info
        return info.fingerprint if info is not None else None

    def _check_fit(self, header: Header) -> None:
        """Raise `Conflict` if the engine would continue with another model, or with other bits."""
        if header.model != self._model:
            raise Conflict(
                f"the rollout was started with the model {header.model}, this server serves "
                f"{self._model}; start a server with that model, or send the request again"
            )
        mine, kept = self._fingerprint, header.fingerprint
        assert mine is not None, "an engine that is ready has said what it is"
        why = mine.difference(kept) if kept is not None else "its journal names no fingerprint"
        if why:
            raise Conflict(
                f"the rollout was started with other numerics ({why}), so it cannot continue with "
                "the same tokens; start a server with the same settings, or send the request again"
            )

    def _run(self, rollout: KeptRollout, deadline_s: float, *, accepted: bool = False) -> None:
        assert rollout.items is not None
        generation = self._generations.submit(
            rollout.items,
            deadline_s,
            rollout.header.owner,
            lambda outputs: self._shelf.append(rollout, frame(Grown(outputs))),
            accepted=accepted,
        )
        rollout.task = asyncio.create_task(self._collect(rollout, generation))

    async def _collect(self, rollout: KeptRollout, generation: Generation) -> None:
        assert rollout.ended is not None
        error: TltError | None = None
        with contextlib.closing(generation):
            try:
                async for event in generation.events():
                    if isinstance(event, FinishedItem | FailedItem):
                        rollout.ended[event.id] = event
            except Exception as cause:
                error = cause if isinstance(cause, TltError) else unexpected(cause)
        self._finish(rollout, error)
        await generation.release_items()

    def _finish(
        self, rollout: KeptRollout, error: TltError | None, *, keep_file: bool = False
    ) -> None:
        """Settle a finished rollout. With an error, end its unfinished items with it. `keep_file`:
        leave the file for another server to continue, until this one deletes the rollout.
        """
        assert rollout.ended is not None
        rollout.tokens = rollout.items.tokens if rollout.items is not None else 0
        done = rollout.done = now()
        try:
            if error is not None:
                raise error
            end = RolloutEnd(done.wall_s, rollout.tokens, done.boot, done.boot_s)
            self._shelf.append(rollout, frame(end))
            rollout.seal()
        except TltError as cause:  # keep results in memory instead, and free the file's room
            for id in rollout.item_ids:
                rollout.ended.setdefault(id, FailedItem(id, cause))
            if not keep_file:
                self._shelf.remove_file(rollout)
        rollout.items = None
        rollout.over()
        self._shelf.expire_later(rollout)
        self._shelf.measure()
