"""Collects the answers of ranks to orders, for a bounded time."""

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
    """The orders with pending answers. For one thread at a time."""

    def __init__(self, inbox: zmq.Socket[bytes], ranks: int, check: Callable[[], None]) -> None:
        """`ranks`: number of answering ranks, from rank 1. `check`: raises to end a wait, for
        example after a death.
        """
        self._inbox, self._ranks, self._check = inbox, ranks, check
        self._asked: dict[int, AskedOrder] = {}
        self.patience_s = START_S

    def expect(self, number: int, order: str) -> None:
        """Await answers to the order of this number, which is sent next."""
        self._asked[number] = AskedOrder(order, {})

    def of(self, number: int) -> list[str]:
        """Return the texts of all ranks' answers to an order. `EngineFailed` if a rank could not
        execute it or is silent, `torch.OutOfMemoryError` if one was out of memory, `Unavailable` if
        one refused.
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
        """Read the answers that arrive within `wait_s`. Return True if all ranks have answered the
        order. `EngineFailed` if a rank could not execute it.
        """
        asked = self._asked[number]
        while len(asked.answers) < self._ranks and self._inbox.poll(int(1000 * wait_s)):
            answer = msgspec.msgpack.decode(self._inbox.recv(), type=RankAnswer)
            if answer.number not in self._asked:
                raise EngineFailed(
                    f"rank {answer.rank} answered order {answer.number}, which expects no answer"
                )
            if answer.error:
                order = self._asked[answer.number].order
                raise EngineFailed(
                    f"rank {answer.rank} failed in order {answer.number} ({order}): {answer.error}"
                )
            self._asked[answer.number].answers[answer.rank] = answer
        return len(asked.answers) == self._ranks

    def give_up(self, number: int, waited_s: float) -> None:
        """Raise `EngineFailed` with the names of the silent ranks."""
        asked = self._asked[number]
        silent = [str(rank) for rank in range(1, self._ranks + 1) if rank not in asked.answers]
        raise EngineFailed(
            f"rank {', '.join(silent)} did not answer order {number} ({asked.order}) in "
            f"{waited_s:g} s"
        )
