"""The servers of `tlt drafter coordinate` over HTTP: their states, and the transfer of sequences
and drafters between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from tlt_client import Client, ConnectionFailed, ServerError
from tlt_client.channels.http import HttpSender
from tlt_client.errors import Conflict, InvalidRequest, Unavailable
from tlt_server.drafter.coordination import Seen
from tlt_server.wire.training import NO_DATA

T = TypeVar("T")
LIMIT = 256  # sequences of one call
LOOK_S = 5.0  # for all servers to answer


class Peers:
    """Servers by address. `say`: prints a line of progress."""

    def __init__(
        self, clients: Mapping[str, Client], say: Callable[[str], None], look_s: float = LOOK_S
    ) -> None:
        self.clients, self._say, self._look_s = clients, say, look_s
        self._said: dict[str, str] = {}  # server -> its trouble that was said last
        self._lost: dict[str, str] = {}  # server -> why it is left out
        self._held: set[str] = set()
        self._pool = ThreadPoolExecutor(2 * len(clients))  # a look and an action for each
        self._looks: dict[str, Future[Seen]] = {}
        self._after: dict[tuple[str, str], int] = {}  # (source, taker) -> last number moved

    def look(self) -> list[Seen]:
        """Return the servers that answer in time; the reason for any other is printed once. All are
        asked at the same time, except those that have not answered the last request.
        """
        begun = {
            url: self._pool.submit(self._look, url)
            for url in self.clients
            if url not in self._looks
        }
        self._looks |= begun
        wait(begun.values(), self._look_s)
        found = []
        for url in self.clients:
            if not self._looks[url].done():
                self._leave_out(url, f"no answer within {self._look_s:g} s")
                continue
            try:
                found.append(self._looks.pop(url).result())
            except (ConnectionFailed, ServerError) as error:
                self._leave_out(url, str(error))
            except (KeyError, TypeError, ValueError) as error:
                self._leave_out(url, f"its answer is none of this version of the server: {error!r}")
            else:
                if self._lost.pop(url, ""):
                    self._said.pop(url, None)
                    self._say(f"{url} answers again")
        return found

    def _look(self, url: str) -> Seen:
        client = self.clients[url]
        return seen_of(url, client.load(), client.drafter(), client.weights())

    def _leave_out(self, url: str, why: str) -> None:
        if self._lost.get(url) != why:
            self._lost[url] = why
            self._say(f"{url} left out: {why}")

    def start(self, act: Callable[[], T]) -> Future[T]:
        """Run a call in a server's thread."""
        return self._pool.submit(act)

    def trouble(self, url: str, what: str) -> None:
        """Print a message about a server, unless it repeats the last one."""
        if self._said.get(url) != what:
            self._said[url] = what
            self._say(f"{url} {what}")

    def train(self, url: str) -> None:
        self.clients[url].pause_drafter_training(0)
        self._held.discard(url)
        try:
            self.clients[url].train_drafter()
        except Conflict as error:  # a round is on already, or it was paused meanwhile
            self.trouble(url, f"begins no round now: {error.message}")

    def hold(self, url: str, for_s: float) -> None:
        self.clients[url].pause_drafter_training(for_s)
        self._held.add(url)

    def release(self) -> None:
        """Resume the training of every server that was paused here."""
        ends = {url: self._pool.submit(self._let_go, url) for url in [*self._held]}
        for url, end in ends.items():
            try:
                end.result()
            except (ConnectionFailed, ServerError) as error:
                self._say(f"{url} trains again once its pause ends, not now: {error}")
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _let_go(self, url: str) -> None:
        self.clients[url].pause_drafter_training(0)

    def gather(self, taker: str, sources: list[str], most_bytes: int) -> int:
        """Send `taker` the sequences that it does not have yet, and return their number."""
        moved = 0
        for source in sources:
            if source == taker:
                continue
            left = 1
            while left and most_bytes > 0:
                after = self._after.get((source, taker), 0)
                try:
                    content, after, left = self.clients[source].drafter_samples(after, limit=LIMIT)
                except InvalidRequest:  # its buffer was emptied
                    if not after:
                        raise
                    self._after[source, taker] = 0
                    break
                except Conflict as error:
                    self.trouble(source, f"hands out no sequences: {error.message}")
                    break
                if after == self._after.get((source, taker), 0):
                    break
                most_bytes -= len(content)
                try:
                    moved += int(self.clients[taker].add_drafter_samples(content)["sequences"])
                except Unavailable:  # what it was given before still waits
                    return moved
                except InvalidRequest as error:
                    self.trouble(taker, f"takes no sequences of {source}: {error.message}")
                self._after[source, taker] = after
        return moved

    def fetch(self, url: str, version: str, directory: Path) -> None:
        """Write the files of a server's live drafter. `Conflict` if it has another version by
        now.
        """
        found = self.clients[url].fetch_drafter(directory)["version"]
        if found != version:
            said = f"{url} has the drafter {found!r} by now, not {version!r}"
            raise Conflict("conflict", said, status=409)

    def push(self, url: str, directory: Path, version: str) -> None:
        HttpSender(self.clients[url]).push_directory(directory, version, role="drafter")


def _judged(refused: Mapping[str, int]) -> int:
    return sum(count for why, count in refused.items() if why != NO_DATA)


def seen_of(url: str, load: int, drafter: Mapping[str, Any], weights: Mapping[str, Any]) -> Seen:
    """Return a server's state from its replies to `GET /load`, `/drafter` and `/weights`."""
    trainer = drafter["trainer"]
    made_for = {served["weight_version"]: served["trained_for"] for served in drafter["drafters"]}
    return Seen(
        url,
        load,
        trainer["state"] if trainer else "",
        trainer["adopted"] + _judged(trainer["refused"]) if trainer else 0,
        weights["target"],
        weights["drafter"],
        trained=made_for.get(weights["drafter"]) == weights["target"][:64],
        held=bool(trainer) and trainer["pause_left_s"] is not None,
        reason=trainer["reason"] if trainer else "",
    )
