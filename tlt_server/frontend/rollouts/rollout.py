"""One rollout: its request, its progress and its journal. `Rollouts` runs and changes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tlt_client.fields import MAX_INT32, MAX_SEED
from tlt_server.errors import InvalidRequest, NotFound, StorageFailed, TltError
from tlt_server.frontend.generation.items import FailedItem, FinishedItem, Items
from tlt_server.frontend.generation.requests import RequestBatch, SamplingFields
from tlt_server.frontend.rollouts.journal import FORMAT, Header, Journal, KeptTime, elapsed_s, past
from tlt_server.grammars.forms import check_grammar
from tlt_server.wire.packed import PackedIds
from tlt_server.wire.records import Sampling, StepOutput

MAX_BIAS = 100.0
MAX_ROWS = 2**16  # draft rows of one sequence in a step
# Fields that a request and a sequence have in the same form.
SAME = [
    name
    for name in SamplingFields.__struct_fields__
    if name not in ("logit_bias", "bad_words", "structured_outputs")
]


def flaw(header: Header, outputs: Sequence[StepOutput]) -> str:
    """Return the first content that no server would have written; empty if there is none. Intact
    records may be forged, or of another version: they must not reach the tokenizer or the engine.
    """
    return next(_flaws(header, outputs), "")


def _flaws(header: Header, outputs: Sequence[StepOutput]) -> Iterator[str]:
    if not 1 <= header.format <= FORMAT:
        yield f"its format is {header.format}, and this server's is {FORMAT}"
    requests = [request for item in header.items for request in item.requests]
    ids = {request.id for request in requests}
    if not header.items or not all(item.requests for item in header.items):
        yield "an item has no choices"
    if len(ids) < len(requests) or len({item.id for item in header.items}) < len(header.items):
        yield "two of its items or sequences have one id"
    for item in header.items:
        if isinstance(item.token_ids, PackedIds) and len(item.token_ids.packed) % 4:
            yield "a prompt has a part of a token id"
        if not item.token_ids or not _are_ids(item.token_ids):
            yield "a prompt is empty or holds what is no token id"
    for request in requests:
        if not 0 <= request.seed <= MAX_SEED or request.generated:
            yield "a sequence has a seed or tokens that no request can have"
        if wrong := _wrong(request.sampling):
            yield f"a sequence has {wrong}"
    for output in outputs:
        yield from _flaws_of(output, ids)


def _flaws_of(output: StepOutput, ids: Collection[str]) -> Iterator[str]:
    if output.id not in ids:
        yield "an output is of a sequence that the request does not have"
    if not _are_ids(output.token_ids):
        yield "an output holds what is no token id"
    reports = (output.logprobs, output.raw_logprobs, output.top_logprobs)
    if any(report is not None and len(report) != len(output.token_ids) for report in reports):
        yield "an output has more tokens than log-probs"
    if not 0 <= output.accepted <= output.drafted <= MAX_ROWS:
        yield "an output accepts more than was drafted"
    if not (0 <= output.steps <= len(output.token_ids) or output.steps == 1):
        yield "an output has more steps than tokens"
    each = output.accepted_each
    if each and (min(each) < 0 or sum(each) != output.accepted or output.draft_tokens < len(each)):
        yield "an output accepts other drafts in all than in its steps"
    for each in filter(None, (*(output.top_logprobs or ()), *(output.prompt_logprobs or ()))):
        if len(each.token_ids) != len(each.logprobs) or not _are_ids(each.token_ids):
            yield "an output has alternatives without log-probs"


def _wrong(sampling: Sampling) -> str:
    """Return what is invalid in a decoded sampling; empty if nothing is."""
    try:
        msgspec.convert({name: getattr(sampling, name) for name in SAME}, SamplingFields)
        if sampling.structured_outputs is not None:
            check_grammar(sampling.structured_outputs)
        named = [id for ids in (sampling.logit_bias, *sampling.bad_words) for id in ids]
        biases = sampling.logit_bias.values()
        if (
            _are_ids(named)
            and all(sampling.bad_words)
            and all(abs(bias) <= MAX_BIAS for bias in biases)
        ):
            return ""
    except msgspec.ValidationError as error:
        return f"a sampling that no request can have: {error}"
    except InvalidRequest:
        pass
    return "bad words, biases or a structure that no request can have"


def _are_ids(ids: Iterable[int] | PackedIds) -> bool:
    least = min(ids, default=0)
    return least >= 0 and max(ids, default=0) <= MAX_INT32


def described(header: Header, reason: str) -> str:
    return (
        f"the journal of the rollout {header.id} is not as this server writes it: {reason}; send "
        "its request again"
    )


Ended = dict[str, FinishedItem | FailedItem]  # by item


class Replayed(NamedTuple):
    length: int  # bytes of the journal's whole records
    items: Items
    ended: Ended
    done: bool  # the journal has its end


class KeptRollout:
    """One batch. While it runs, `items` grow and its journal is open. Its results stay in memory
    until they are fetched, and then only in the file.
    """

    def __init__(self, header: Header, path: Path) -> None:
        self.header, self.path = header, path
        self.item_ids = [item.id for item in header.items]
        self.bytes = 0
        self.tokens = 0
        self.done: KeptTime | None = None
        self.fetched = False
        self.items: Items | None = None
        self.ended: Ended | None = {}
        self.journal: Journal | None = None
        self.written = False  # the file has its end
        self.task: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def status(self) -> Literal["running", "done"]:
        return "running" if self.done is None else "done"

    @property
    def done_s(self) -> float | None:
        """The end on the wall clock; None while it runs."""
        return self.done.wall_s if self.done is not None else None

    @property
    def deadline_s(self) -> float:
        """The deadline on this process's clock."""
        asked_s = self.header.deadline_s - self.header.created_s
        return time.monotonic() + asked_s - elapsed_s(self.header.created)

    def replayed(self, make: Callable[[RequestBatch], Items]) -> Replayed:
        """Turn the journal's outputs into items, as when they were live. `NotFound` if the rollout
        has just been deleted, `StorageFailed` if no server wrote its content.
        """
        try:
            said = past(self.path.read_bytes())
        except FileNotFoundError:
            raise NotFound(
                f"the rollout {self.header.id} has just been deleted; send its request again"
            ) from None
        assert said is not None, "its header was whole before"
        reason = flaw(said.header, said.outputs)
        if reason:
            raise StorageFailed(described(said.header, reason))
        deadline_s = self.deadline_s
        items, ended = (
            make(
                RequestBatch(
                    [item.item(deadline_s) for item in self.header.items], False, deadline_s
                )
            ),
            Ended(),
        )
        for output in said.outputs:
            ended |= {
                event.id: event
                for event in items.take([output])
                if isinstance(event, FinishedItem | FailedItem)
            }
        return Replayed(said.length, items, ended, said.end is not None)

    def seal(self) -> None:
        """Close the complete journal."""
        assert self.journal is not None
        self.journal.close()
        self.journal, self.written = None, True

    def count(self) -> tuple[int, int]:
        """Return the number of ended items and of tokens so far."""
        if self.done_s is not None:
            return len(self.item_ids), self.tokens
        return len(self.ended or ()), self.items.tokens if self.items is not None else 0

    async def wait(self, wait_s: float | None = None) -> None:
        """Wait until it is done or the time is up. Raise the typed error if it is deleted or the
        server stops first.
        """
        await asyncio.wait([self._over], timeout=wait_s)
        if self.is_over:
            self._over.result()

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def over(self, error: TltError | None = None) -> None:
        """Settle the rollout: this process adds nothing to it any more."""
        if self.is_over:
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
            self._over.exception()  # mark it as retrieved: there may be no waiter
