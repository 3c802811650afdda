"""The servers of `tlt drafter coordinate` over HTTP: what they say of themselves, the sequences and
the drafter that move between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tlt_client import Client, ConnectionFailed, ServerError
from tlt_client.channels.http import HttpSender
from tlt_client.errors import Conflict, InvalidRequest, Unavailable
from tlt_server.drafter.coordination import Seen

LIMIT = 256  # sequences of one call


class Peers:
    """Servers by their addresses. `say` takes a line of progress."""

    def __init__(self, clients: Mapping[str, Client], say: Callable[[str], None]) -> None:
        self.clients, self._say = clients, say
        self._said: dict[str, str] = {}  # server -> its trouble that was said last
        self._after: dict[tuple[str, str], int] = {}  # (source, taker) -> last number moved

    def look(self) -> list[Seen]:
        """Return the servers that answer; the first failure of another one is said."""
        found = []
        for url, client in self.clients.items():
            try:
                found.append(seen_of(url, client.load(), client.drafter(), client.weights()))
                if self._said.pop(url, ""):
                    self._say(f"{url} answers again")
            except (ConnectionFailed, ServerError) as error:
                self.trouble(url, f"left out: {error}")
        return found

    def trouble(self, url: str, what: str) -> None:
        """Say it, unless it was the last thing said of this server."""
        if self._said.get(url) != what:
            self._said[url] = what
            self._say(f"{url} {what}")

    def train(self, url: str) -> None:
        self.clients[url].resume_drafter_training()
        try:
            self.clients[url].train_drafter()
        except Conflict as error:  # a round is on already, or nothing is recorded yet
            self._say(f"{url} begins no round now: {error.message}")

    def pause(self, url: str) -> None:
        self.clients[url].pause_drafter_training()

    def release(self) -> None:
        """Let every server train by itself again."""
        for url, client in self.clients.items():
            try:
                client.resume_drafter_training()
            except (ConnectionFailed, ServerError) as error:
                self._say(f"{url} is not resumed ({error}); POST /drafter/resume does that")

    def gather(self, taker: str, sources: list[str], most_bytes: int) -> int:
        """Move sequences to `taker` that it was not given yet, and return their number."""
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
        """Write the files of a server's live drafter. `Conflict`: it is another version by now."""
        client = self.clients[url]
        listed = client.drafter_files()
        for file in listed["files"]:
            name = str(file["name"])
            if Path(name).name != name:
                raise Conflict("conflict", f"{url} names the file {name!r}", status=409)
            with open(directory / name, "wb") as out:
                while out.tell() < file["bytes"]:
                    data = client.drafter_file(version, name, start=out.tell())
                    if not data:
                        raise Conflict("conflict", f"{name} of {url} became shorter", status=409)
                    out.write(data)

    def push(self, url: str, directory: Path, version: str) -> None:
        HttpSender(self.clients[url]).push_directory(directory, version, role="drafter")


def seen_of(url: str, load: int, drafter: Mapping[str, Any], weights: Mapping[str, Any]) -> Seen:
    """Return what replies of `GET /load`, `/drafter` and `/weights` say together."""
    trainer = drafter["trainer"]
    return Seen(
        url,
        load,
        trainer["state"] if trainer else "",
        trainer["adopted"] + sum(trainer["refused"].values()) if trainer else 0,
        weights["target"],
        weights["drafter"],
    )
