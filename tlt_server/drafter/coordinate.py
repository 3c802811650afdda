"""The command `tlt drafter coordinate`: it reads the servers' states, decides by `Coordination`,
and acts.

Each server has a thread for its calls. A step waits for them for a limited time, and a server with
an unfinished call gets no other until it is done; so a slow server delays no other.

Servers serve and train without it. Losing it at any moment loses nothing: its pauses of servers
expire, and a drafter that was not pushed everywhere is pushed with the next one.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from threading import Lock

from tlt_client import Client, ConnectionFailed, ServerError
from tlt_client.channels.errors import ContentRefused
from tlt_client.errors import InvalidArgument
from tlt_server.drafter.coordination import (
    Action,
    Coordination,
    GiveSamples,
    LetTrain,
    Seen,
    ShareDrafter,
    StopTraining,
)
from tlt_server.drafter.peers import Peers
from tlt_server.errors import StartupError
from tlt_server.push.calling import key_in, tls_of
from tlt_server.wire.training import MAX_PAUSE_S

TIMEOUT_S = 60.0
ACT_S = 5.0  # for all servers to do what a step asks of them
RIVAL = (
    "trains, or is paused, against what it was asked here: another tlt drafter coordinate runs, or "
    "an operator steps in; run one coordinator"
)

Done = tuple[Action, str | Exception]  # an action, and a line that says so or why it failed


def run(arguments: argparse.Namespace) -> int:
    urls = [url.rstrip("/") for url in arguments.servers]
    if len(set(urls)) < len(urls):
        raise StartupError("--servers names a server twice; name each one once")
    if arguments.min_idle >= len(urls):
        raise StartupError(
            f"--min-idle is {arguments.min_idle}, and {len(urls)} servers are named: none could "
            "ever train; make it smaller"
        )
    if arguments.hold_s > MAX_PAUSE_S:
        raise StartupError(
            f"--hold-s is {arguments.hold_s:g}, and a server takes pauses of at most "
            f"{MAX_PAUSE_S} s; make it shorter"
        )
    if arguments.hold_s <= 2 * arguments.interval_s:
        raise StartupError(
            f"--hold-s is {arguments.hold_s:g} and --interval-s {arguments.interval_s:g}: a pause "
            "would end before it is renewed; make it longer than two intervals"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        key, tls = key_in(arguments.api_key_file), tls_of(arguments)
        with ExitStack() as stack:
            clients = {
                url: stack.enter_context(Client(url, api_key=key, timeout_s=TIMEOUT_S, tls=tls))
                for url in urls
            }
            coordinator = Coordinator(Peers(clients, say), arguments)
            stack.callback(coordinator.end)
            return coordinator.run(once=arguments.once)
    except (InvalidArgument, OSError) as error:
        raise StartupError(str(error)) from None


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class Coordinator:
    def __init__(
        self,
        peers: Peers,
        options: argparse.Namespace,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        said: Callable[[str], None] = say,
        act_s: float = ACT_S,
    ) -> None:
        self.coordination = Coordination(options.min_idle, options.quiet_s)
        self.refused = 0  # pushes
        self._peers, self._options = peers, options
        self._clock, self._sleep, self._say = clock, sleep, said
        self._files = TemporaryDirectory(prefix="tlt-drafter-")
        self._fetched: dict[str, Path] = {}  # the newest two versions of drafters in it
        self._fetching = Lock()
        self._act_s = act_s
        self._asked: dict[str, Future[list[Done]]] = {}  # servers that are not done
        self._notes: dict[str, str] = {}

    def run(self, *, once: bool = False) -> int:
        """Run rounds for ever, or until one server has trained a round; return the exit status."""
        while True:
            seen = self.step()
            if once and self.coordination.done(seen):
                shared = self.coordination.shared
                end = f"drafter {shared.version}" if shared else "without an adoption"
                self._say(f"the round has ended: {end}")
                return int(self.refused > 0)
            if once and not any(server.trainer not in ("", "failed") for server in seen):
                self._say("no server can train; tlt drafter status shows why")
                return 1
            self._sleep(self._options.interval_s)

    def step(self) -> list[Seen]:
        """Read states, decide and act once; return the servers' states before acting."""
        self._harvest()
        seen = self._peers.look()
        sources = [server.url for server in seen]
        actions = self.coordination.decide(seen, self._clock(), self._asked.keys())
        self._tell(self.coordination.notes, sources)
        for url in self.coordination.rivals:
            self._peers.trouble(url, RIVAL)
        for url in {action.url: None for action in actions if action.url not in self._asked}:
            own = [action for action in actions if action.url == url]
            self._asked[url] = self._peers.start(partial(self._act_all, own, sources))
        wait(self._asked.values(), self._act_s)
        self._harvest()
        return seen

    def _act_all(self, actions: Sequence[Action], sources: Sequence[str]) -> list[Done]:
        """Carry out the actions on one server."""
        done: list[Done] = []
        for action in actions:
            try:
                done.append((action, self._act(action, sources)))
            except (ContentRefused, ConnectionFailed, ServerError, OSError) as error:
                done.append((action, error))
        return done

    def _harvest(self) -> None:
        """Record the finished actions."""
        for url in [url for url, doing in self._asked.items() if doing.done()]:
            for action, result in self._asked.pop(url).result():
                if isinstance(result, str):
                    if result:
                        self._say(result)
                    if isinstance(action, StopTraining):
                        self.coordination.stopped(url)
                elif isinstance(result, ConnectionFailed | ServerError):
                    self._peers.trouble(url, f"refused: {result}")
                    self._was_refused(action, lasting=not getattr(result, "retryable", True))
                else:
                    self._peers.trouble(url, str(result))

    def _was_refused(self, action: Action, *, lasting: bool) -> None:
        if isinstance(action, LetTrain):
            self.coordination.put_off(action.url)
        if not lasting:
            return
        self.refused += 1
        if isinstance(action, LetTrain):
            self.coordination.cannot_train(action.url)
        if isinstance(action, ShareDrafter):
            self.coordination.refused(action)
            if self.coordination.gives_up(action):
                self._say(f"{action.url} cannot adopt {action.version}; it keeps its own")

    def _tell(self, notes: Mapping[str, str], answered: Sequence[str]) -> None:
        """Print the changed notes on answering servers."""
        for url in answered:
            note, before = notes.get(url, ""), self._notes.get(url, "")
            if note != before:
                self._say(f"{url} {note or 'takes part again'}")
                self._notes[url] = note

    def end(self) -> None:
        """Resume the servers' own training."""
        wait(self._asked.values(), self._act_s)
        self._peers.release()
        self._files.cleanup()

    def _act(self, action: Action, sources: Sequence[str]) -> str:
        """Carry out an action, and return a line about it; empty if nothing changed."""
        if isinstance(action, LetTrain):
            moved = self._peers.gather(action.url, [*sources], self._options.gather_mb * 2**20)
            self._peers.train(action.url)
            return "" if action.again else f"{action.url} trains, with {moved} sequences of others"
        if isinstance(action, StopTraining):
            self._peers.hold(action.url, self._options.hold_s)
            return "" if action.again else f"{action.url} trains no more: {action.reason}"
        if isinstance(action, GiveSamples):
            moved = self._peers.gather(action.url, [*sources], self._options.gather_mb * 2**20)
            return f"{action.url} was given {moved} sequences of others" if moved else ""
        self._peers.push(action.url, self._drafter(action), action.version)
        return f"{action.url} has the drafter {action.version} of {action.source}"

    def _drafter(self, share: ShareDrafter) -> Path:
        """Return the directory of the shared drafter, fetched once. The previous one stays for
        pushes in progress.
        """
        with self._fetching:
            found = self._fetched.get(share.version)
            if found is None:
                found = Path(mkdtemp(dir=self._files.name))
                self._peers.fetch(share.source, share.version, found)
                self._fetched[share.version] = found
                for old in [*self._fetched][:-2]:
                    shutil.rmtree(self._fetched.pop(old))
            return found
