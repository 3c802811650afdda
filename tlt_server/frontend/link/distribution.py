"""Distributes open sequences over replicas, each replica's in an order.

A sequence without a replica waits until there is one. Requests that may have crashed an engine are
tried one by one at a single replica, so that none can end one replica after the other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import structlog

from tlt_server.errors import Poisoned, TltError
from tlt_server.frontend.link.replica import Replica, Replicas
from tlt_server.frontend.link.submission import EngineQueue, Holder, Route
from tlt_server.frontend.link.suspects import KEPT_S, Suspects
from tlt_server.process.faults import Containment
from tlt_server.wire.commands import Abort, Submit
from tlt_server.wire.records import GenerateRequest

log = structlog.get_logger()


class Distribution:
    def __init__(
        self,
        routes: Mapping[str, Route],
        replicas: Replicas,
        faults: Containment,
        end: Callable[[str, TltError], None],
    ) -> None:
        """`routes`: the open sequences, by id; `end` ends one with an error."""
        self._routes, self._replicas, self._faults, self._end = routes, replicas, faults, end
        self.suspects = Suspects()

    def queue(self, replica: Replica) -> EngineQueue:
        """Return a queue of these sequences for a replica."""
        return EngineQueue(self._routes, partial(self._hand_over, replica), self.suspects.trial)

    def sort(
        self, requests: list[GenerateRequest]
    ) -> tuple[list[GenerateRequest], list[GenerateRequest]]:
        """Refuse requests that crash engines; return those that do not, and those that may."""
        free, suspect, refused = self.suspects.sort(requests, time.monotonic())
        for request in refused:
            log.warning("poisoned", id=request.id)
            self._end(
                request.id,
                Poisoned(
                    "was running when two engines crashed or were lost, and made no progress in "
                    "between; it is not run again: leave it out, or change its prompt, sampling "
                    "or structure, "
                    f"or wait {KEPT_S / 60:g} minutes"
                ),
            )
        return free, suspect

    def place(self, requests: Iterable[GenerateRequest], at: Replica | None = None) -> None:
        """Queue each of these at the replica that is best for it, or at this one if it can run
        it.
        """
        groups = defaultdict[Replica, list[GenerateRequest]](list)
        for route in self.waiting(each.id for each in requests):
            replica = route.replica = self._replicas.place(route.request, route.tokens, at)
            if replica is not None:
                groups[replica].append(route.request)
        for replica, group in groups.items():
            replica.queue.add(group)

    def move(self, routes: Iterable[Route], to: Replica | None = None) -> None:
        """Continue sequences at another replica, which gets their tokens so far: at `to` if given,
        else where it is best.
        """
        moved = [*routes]
        known = [(route.replica, route.sent_as) for route in moved if not route.held]
        for route in moved:  # before the aborts, whose answers then concern no open sequence
            route.hops += not route.held
            holder, route.replica, route.held = route.replica, None, True
            if holder is not None:
                holder.queue.reached(route.request.id)
        _abort(known, "abort")
        free, suspect = self.sort([route.request for route in moved])
        self.place(free, to)
        self.try_out(suspect)

    def try_out(self, requests: Iterable[GenerateRequest]) -> None:
        """Queue these at the one replica that has requests on trial."""
        at = next((replica for replica in self._replicas if replica.queue.trying), None)
        tried: list[GenerateRequest] = []
        for route in self.waiting(each.id for each in requests):
            at = self._replicas.place(route.request, route.tokens, at)
            if at is not None:
                route.replica = at
                tried.append(route.request)
        if at is not None:
            at.queue.add_trials(tried)

    def waiting(self, ids: Iterable[str]) -> list[Route]:
        """Return those of these that are open and have no replica."""
        found = [route for id in ids if (route := self._routes.get(id)) is not None]
        return [route for route in found if route.replica is None]

    def _hand_over(self, replica: Replica, routes: list[Route]) -> None:
        """Send those of these that are still the replica's; if that fails, only these end."""
        routes = [route for route in routes if route.held and route.replica is replica]
        if not routes:
            return
        try:
            sent = replica.send(Submit([route.rest() for route in routes]))
        except Exception as error:
            failed = self._faults.contain(error, f"the batch of {routes[0].request.id}")
            for route in routes:
                self._end(route.request.id, failed)
        else:
            for route in routes:
                route.held, route.stepped = not sent, False

    def abort(self, routes: Iterable[Route], finish_reason: str = "abort") -> None:
        """Ask the replicas of these to end them."""
        _abort([(route.replica, route.sent_as) for route in routes], finish_reason)


def _abort(sequences: Iterable[tuple[Holder | None, str]], finish_reason: str) -> None:
    ids = defaultdict[Holder, list[str]](list)
    for holder, id in sequences:
        if holder is not None:
            ids[holder].append(id)
    for holder, few in ids.items():
        holder.send(Abort(few, finish_reason))
