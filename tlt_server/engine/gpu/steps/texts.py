"""The texts that requests may draft from: which device slot has which text, and which texts to send
again.

An ended sequence leaves its text in its batch slot until another sequence starts there. The host
keeps the newest responses of each prompt within bounds, across steps and weight versions. While the
prompt runs, responses that the device has lost are sent to text slots, in place of texts that no
running prompt needs. Responses are shared by prompt, or by group while one of the group runs, and
never between salts. No tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from os import urandom
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_kernels.gpu.history import MAX_MATCH, MEMBERS
from tlt_kernels.gpu.tensors import BatchSlots
from tlt_server.engine.schedule.sequence import Sequence

# The device compares 31 bits of a digest, so a client must not be able to aim at another's.
KEY = urandom(16)


@dataclass(frozen=True)
class TextSettings:
    responses: int = MEMBERS * 2 // 3  # per prompt, the newest; some room is left for siblings
    kept_tokens: int = 1 << 14  # tokens per prompt
    total_tokens: int = 1 << 23  # the prompts unused for longest go first
    prompts: int = 4096


NOTHING_KEPT = TextSettings(responses=0)


@dataclass(eq=False)
class Response:
    """The text of one sequence."""

    prompt: bytes  # digest; of the first of its group
    # Empty before it has ended.
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    slot: int = -1  # the batch slot or the slot for texts that has it


class SentText(NamedTuple):
    slot: int
    group: int
    tokens: NDArray[np.int32]


class Shared(NamedTuple):
    """A sequence's text as `BatchSlots` stores it, and texts to send with it."""

    group: int
    first: int
    sent: list[SentText]


class Texts:
    def __init__(
        self, batch_slots: int, slots: range, settings: TextSettings = TextSettings()
    ) -> None:
        """`slots`: the text slots."""
        self.settings, self._batch_slots = settings, range(batch_slots)
        self._slots = OrderedDict.fromkeys(slots)  # those not needed for longest first
        self._in_slot: dict[int, Response] = {}
        self._running: dict[str, Response] = {}  # by sequence
        self._needed = Counter[bytes]()  # running sequences by prompt
        self._groups: dict[tuple[str, str], tuple[bytes, int]] = {}  # prompt, running sequences
        # By prompt, least recently used first.
        self._kept: OrderedDict[bytes, deque[Response]] = OrderedDict()
        self._tokens = 0

    @classmethod
    def of(cls, batch_slots: BatchSlots, *, kept: bool) -> Texts:
        """Return the texts of a device. `kept`: False if nothing drafts, so nothing is kept."""
        slots = range(batch_slots.idle + 1, len(batch_slots.group_Q))
        return cls(batch_slots.idle, slots, TextSettings() if kept else NOTHING_KEPT)

    def begin(self, sequence: Sequence) -> Shared:
        """Add a sequence that has got a batch slot."""
        response = self._running.get(sequence.id)
        if response is None:
            response = self._running[sequence.id] = Response(self._join(sequence))
        before = self._in_slot.get(sequence.batch_slot)
        for gone in (before, response):  # one that was preempted writes all of its text again
            if gone is not None and gone.slot >= 0:
                del self._in_slot[gone.slot]
                gone.slot = -1
        response.slot = sequence.batch_slot
        self._in_slot[response.slot] = response
        prompts = dict.fromkeys([response.prompt, *([before.prompt] if before else [])])
        sent = [text for prompt in prompts for text in self._send(prompt)]
        return Shared(_number(response.prompt), _first(sequence), sent)

    def end(self, sequence: Sequence) -> None:
        """Keep the response of an ended sequence, unless it ran in the background."""
        response = self._running.pop(sequence.id, None)
        if response is None:
            return  # it never ran
        self._part(sequence, response.prompt)
        if sequence.background:
            if response.slot >= 0:
                del self._in_slot[response.slot]
            return
        response.tokens = sequence.tokens[_first(sequence) :].copy()
        kept = self._kept.setdefault(response.prompt, deque())
        self._kept.move_to_end(response.prompt)
        kept.append(response)
        self._tokens += len(response.tokens)
        while len(kept) > self.settings.responses or _size(kept) > self.settings.kept_tokens:
            self._drop(kept.popleft())
        if not kept:
            del self._kept[response.prompt]
        self._evict()

    def forget(self) -> list[int]:
        """Drop the texts of all prompts that no running sequence has. Return the slots whose text
        may no longer be read.
        """
        for prompt in [prompt for prompt in self._kept if prompt not in self._needed]:
            self._drop_prompt(prompt)
        return [slot for slot in (*self._batch_slots, *self._slots) if slot not in self._in_slot]

    def gauges(self) -> Mapping[str, float]:
        return {"history_pool_tokens": float(self._tokens), "history_pools": float(len(self._kept))}

    def check(self) -> None:
        """Assert that slots, texts and counts agree, and that memory is bounded."""
        assert all(response.slot == slot for slot, response in self._in_slot.items())
        known = [*self._running.values(), *(r for kept in self._kept.values() for r in kept)]
        assert sorted(self._in_slot) == sorted(r.slot for r in known if r.slot >= 0), "slots leak"
        assert self._tokens == sum(map(_size, self._kept.values())) <= self.settings.total_tokens
        assert len(self._kept) <= self.settings.prompts
        assert self._needed == Counter(r.prompt for r in self._running.values())
        assert sum(count for _, count in self._groups.values()) <= len(self._running)

    def _join(self, sequence: Sequence) -> bytes:
        """Return the digest of its group's first prompt; without a group, of its prompt."""
        request = sequence.request
        key = request.tenant, request.group_id
        prompt, running = self._groups.get(key) or (_digest(sequence), 0)
        if request.group_id:
            self._groups[key] = prompt, running + 1
        self._needed[prompt] += 1
        return prompt

    def _part(self, sequence: Sequence, prompt: bytes) -> None:
        self._needed[prompt] -= 1
        if not self._needed[prompt]:
            del self._needed[prompt]
        if sequence.request.group_id:
            key = sequence.request.tenant, sequence.request.group_id
            prompt, running = self._groups.pop(key)
            if running > 1:
                self._groups[key] = prompt, running - 1

    def _send(self, prompt: bytes) -> Iterator[SentText]:
        """Yield the newest responses of a running prompt that the device has lost, with slots for
        them.
        """
        if prompt not in self._kept or prompt not in self._needed:
            return
        self._kept.move_to_end(prompt)
        for response in self._kept[prompt]:
            if response.slot in self._slots:
                self._slots.move_to_end(response.slot)
        for response in reversed(self._kept[prompt]):
            if response.slot >= 0:
                continue
            slot = next(iter(self._slots), -1)
            there = self._in_slot.get(slot)
            if slot < 0 or (there is not None and there.prompt in self._needed):
                return
            if there is not None:
                there.slot = -1
            self._slots.move_to_end(slot)
            response.slot, self._in_slot[slot] = slot, response
            yield SentText(slot, _number(prompt), response.tokens)

    def _evict(self) -> None:
        for prompt in list(self._kept) if not self._fits else ():
            if self._fits:
                return
            self._drop_prompt(prompt)

    @property
    def _fits(self) -> bool:
        settings = self.settings
        return self._tokens <= settings.total_tokens and len(self._kept) <= settings.prompts

    def _drop_prompt(self, prompt: bytes) -> None:
        for response in self._kept.pop(prompt):
            self._drop(response)

    def _drop(self, response: Response) -> None:
        self._tokens -= len(response.tokens)
        if response.slot >= 0:
            del self._in_slot[response.slot]
            if response.slot in self._slots:
                self._slots.move_to_end(response.slot, last=False)


def _digest(sequence: Sequence) -> bytes:
    tenant = blake2b(sequence.request.tenant.encode(), digest_size=16).digest()
    prompt = sequence.tokens[: sequence.prompt_len].tobytes()
    return blake2b(tenant + prompt, digest_size=16, key=KEY).digest()


def _number(prompt: bytes) -> int:
    return int.from_bytes(prompt[:4]) >> 1


def _first(sequence: Sequence) -> int:
    """Return where its response begins, including the tokens before it that a match may cover."""
    return max(0, sequence.prompt_len - MAX_MATCH)


def _size(responses: deque[Response]) -> int:
    return sum(len(r.tokens) for r in responses)
