"""The command `tlt drafter coordinate`: it looks at servers, decides by `Coordination`, and acts.

Servers serve and train without it. Losing it in the middle loses nothing: the pauses by which it
holds servers end by themselves, and a drafter that was not pushed everywhere is pushed with the
next one.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tlt_client import Client, ConnectionFailed, ServerError
from tlt_client.channels.errors import ContentRefused
from tlt_client.errors import InvalidArgument
from tlt_server.drafter.coordination import (
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

TIMEOUT_S = 60.0


def run(arguments: argparse.Namespace) -> int:
    urls = [url.rstrip("/") for url in arguments.servers]
    if len(set(urls)) < len(urls):
        raise StartupError("--servers names a server twice; name each one once")
    if arguments.min_idle >= len(urls):
        raise StartupError(
            f"--min-idle is {arguments.min_idle}, and {len(urls)} servers are named: none could "
            "ever train; make it smaller"
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
    ) -> None:
        self.coordination = Coordination(options.min_idle, options.quiet_s)
        self.refused = 0  # pushes
        self._peers, self._options = peers, options
        self._clock, self._sleep, self._say = clock, sleep, said
        self._files = TemporaryDirectory(prefix="tlt-drafter-")
        self._fetched = ""  # the version in it
        self._notes: dict[str, str] = {}

    def run(self, *, once: bool = False) -> int:
        """Take rounds for ever, or until one server has trained a round; return the exit status."""
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
        """Look, decide and act once; return what was seen before."""
        seen = self._peers.look()
        sources = [server.url for server in seen]
        actions = self.coordination.decide(seen, self._clock())
        self._tell(self.coordination.notes, sources)
        for action in actions:
            try:
                self._act(action, sources)
            except ContentRefused as error:
                self._peers.trouble(action.url, str(error))
            except (ConnectionFailed, ServerError) as error:
                self._peers.trouble(action.url, f"refused: {error}")
                if isinstance(action, LetTrain):
                    self.coordination.put_off(action.url)
                if getattr(error, "retryable", True):
                    continue
                self.refused += 1
                if isinstance(action, LetTrain):
                    self.coordination.cannot_train(action.url)
                if isinstance(action, ShareDrafter):
                    self.coordination.refused(action)
                    if self.coordination.gives_up(action):
                        self._say(f"{action.url} cannot adopt {action.version}; it keeps its own")
        return seen

    def _tell(self, notes: Mapping[str, str], answered: Sequence[str]) -> None:
        """Say of servers that answered what has changed."""
        for url in answered:
            note, before = notes.get(url, ""), self._notes.get(url, "")
            if note != before:
                self._say(f"{url} {note or 'takes part again'}")
                self._notes[url] = note

    def end(self) -> None:
        """Let the servers train by themselves again."""
        self._peers.release()
        self._files.cleanup()

    def _act(
        self, action: LetTrain | StopTraining | GiveSamples | ShareDrafter, sources: Sequence[str]
    ) -> None:
        if isinstance(action, LetTrain):
            moved = self._peers.gather(action.url, [*sources], self._options.gather_mb * 2**20)
            self._peers.train(action.url)
            if not action.again:
                self._say(f"{action.url} trains, with {moved} sequences of others")
        elif isinstance(action, StopTraining):
            self._peers.hold(action.url, self._options.hold_s)
            if not action.again:
                self._say(f"{action.url} trains no more: {action.reason}")
        elif isinstance(action, GiveSamples):
            moved = self._peers.gather(action.url, [*sources], self._options.gather_mb * 2**20)
            if moved:
                self._say(f"{action.url} was given {moved} sequences of others")
        else:
            self._peers.push(action.url, self._drafter(action), action.version)
            self._say(f"{action.url} has the drafter {action.version} of {action.source}")

    def _drafter(self, share: ShareDrafter) -> Path:
        """Return the directory of the shared drafter, fetched once."""
        directory = Path(self._files.name)
        if self._fetched != share.version:
            self._fetched = ""
            for file in directory.iterdir():
                file.unlink()
            self._peers.fetch(share.source, share.version, directory)
            self._fetched = share.version
        return directory
