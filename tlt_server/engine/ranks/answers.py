"""The answers of ranks to the orders that await some, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
import zmq

from tlt_server.engine.ranks.orders import RankAnswer
from tlt_server.errors import EngineFailed, Unavailable

START_S = 120.0  # for an answer while ranks start, and may compile kernels
POLL_S = 0.2


class AskedOrder(NamedTuple):
    order: str  # its name
    answers: dict[int, RankAnswer]  # by rank


class RankAnswers:
    """The orders that await answers, for one thread at a time."""

    def __init__(self, inbox: zmq.Socket[bytes], ranks: int, check: Callable[[], None]) -> None:
        """`ranks`: those that answer, from 1. `check`: raises what ends a wait, such as a death."""
        self._inbox, self._ranks, self._check = inbox, ranks, check
        self._asked: dict[int, AskedOrder] = {}
        self.patience_s = START_S

    def expect(self, number: int, order: str) -> None:
        """Await answers to the order of this number, which is about to be sent."""
        self._asked[number] = AskedOrder(order, {})

    def of(self, number: int) -> list[str]:
        """Return the texts of all ranks' answers to an order. `EngineFailed` where a rank could
        not follow it or says nothing, `torch.OutOfMemoryError` where one had no room,
        `Unavailable` where one refused it.
        """
        until_s = time.monotonic() + self.patience_s
        while not self.complete(number, wait_s=POLL_S):
            self._check()
            if time.monotonic() > until_s:
                self.give_up(number, self.patience_s)
        answers = self._asked.pop(number).answers
        for rank, answer in answers.items():
            if answer.exhausted:
                raise torch.OutOfMemoryError(f"rank {rank} is out of memory: {answer.exhausted}")
            if answer.refused:
                raise Unavailable(f"rank {rank}: {answer.refused}")
        return [answers[rank].text for rank in sorted(answers)]

    def complete(self, number: int, *, wait_s: float = 0.0) -> bool:
        """Take the answers that come in this time, and tell whether all ranks have answered an
        order. `EngineFailed` where one could not follow it.
        """
        asked = self._asked[number]
        while len(asked.answers) < self._ranks and self._inbox.poll(int(1000 * wait_s)):
            answer = msgspec.msgpack.decode(self._inbox.recv(), type=RankAnswer)
            if answer.number not in self._asked:
                raise EngineFailed(
                    f"rank {answer.rank} answered order {answer.number}, which awaits no answer"
                )
            if answer.error:
                order = self._asked[answer.number].order
                raise EngineFailed(
                    f"rank {answer.rank} failed in order {answer.number} ({order}): {answer.error}"
                )
            self._asked[answer.number].answers[answer.rank] = answer
        return len(asked.answers) == self._ranks

    def give_up(self, number: int, waited_s: float) -> None:
        """Raise the `EngineFailed` that names who did not answer an order."""
        asked = self._asked[number]
        silent = [str(rank) for rank in range(1, self._ranks + 1) if rank not in asked.answers]
        raise EngineFailed(
            f"rank {', '.join(silent)} did not answer order {number} ({asked.order}) in "
            f"{waited_s:g} s"
        )
