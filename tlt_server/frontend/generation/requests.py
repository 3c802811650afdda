"""Requests in the native form: `tlt_client.fields` with the server's types.

`http.parsing.parse` is the only entry; `validation.Validator` then applies the model's and the
server's limits. A borrowed dialect declares its own structs and translates them to `NativeRequest`.
A validated request is a `RequestBatch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from tlt_client import fields
from tlt_client.fields import MAX_INT32, MAX_SEED, ShortName
from tlt_server.errors import ContextExceeded, TltError, TooLarge
from tlt_server.frontend.http.counting import Limit
from tlt_server.frontend.http.fields import Strict
from tlt_server.wire.packed import PackedIds
from tlt_server.wire.records import GenerateRequest, Sampling
from tlt_server.wire.tree_limits import MAX_DEPTH, MAX_ROWS

NOTHING: Mapping[str, str] = MappingProxyType({})
ITEMS = Limit("max_batch_items", "items", "split the batch", TooLarge)
NAMES = Limit("max_batch_items", "names", "split the call")
MAX_MESSAGES = 2**14  # limit on one conversation
MAX_BAD_TOKENS = 4096  # limit on all words together
FORMS = ("json_schema", "regex", "choice", "grammar", "structural_tag")
Truncation = Annotated[
    Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None,
    "keep this many last tokens of the prompt; -1: as many as fit",
]
# Seeds in the borrowed dialects, with or without a sign
AnySeed = Annotated[
    int, Meta(ge=-(2**63), extra={"at_most": MAX_SEED}, extra_json_schema={"maximum": MAX_SEED})
]
PROMPTS = ("prompt", "token_ids", "messages")


class RequestItem(NamedTuple):
    """One prompt and its n choices; choice i is `requests[i]`."""

    id: str
    requests: list[GenerateRequest]


class Words(NamedTuple):
    """Field names in a dialect's terms, for messages; `{i}` is the item's index."""

    item: str  # one item's prompt
    field: str  # prefix of an item's field
    sampling: str  # prefix of a sampling field
    renamed: Mapping[str, str] = NOTHING  # sampling field -> its path, where its name differs
    clamps: bool = False  # a longer output than the prompt leaves is shortened, not refused

    def called(self, field: str) -> str:
        """Return the path of a sampling field."""
        return self.renamed.get(field, self.sampling + field)

    def structured_by(self, field: str) -> Words:
        """Return the words for a request whose structure is in this field."""
        path = self.sampling + field
        return self._replace(renamed={**self.renamed, "structured_outputs": path})


class PromptReading(NamedTuple):
    """The reading of prompts, if a dialect lets its users choose."""

    special: bool = True  # texts get what the tokenizer puts around them
    keep: int | None = None  # last tokens of each prompt; -1: as many as fit; None: all


WHOLE = PromptReading()
NATIVE = Words("requests[{i}]", "requests[{i}].", "sampling.")


class RequestBatch(NamedTuple):
    items: list[RequestItem]
    stream: bool
    deadline_s: float

    @property
    def positions(self) -> dict[str, int]:
        """Return the position of each item, by its id."""
        return {item.id: i for i, item in enumerate(self.items)}


class _PromptLimit(Limit):
    def exceeded(self, where: str, count: int, limit: int) -> TltError:
        found = f"{where} has {count} {self.noun}"
        return ContextExceeded.of(found, f"{limit} ({self.setting})", limit)


PromptIds = Annotated[PackedIds, Meta(extra={"limit": _PromptLimit("max_prompt_tokens", "ids")})]


class SharedSampling(fields.SharedSampling, frozen=True, kw_only=True):
    """Fields with the same name and meaning in all dialects."""

    absent_means: ClassVar[Struct] = Sampling()


class BorrowedSampling(SharedSampling, frozen=True, kw_only=True):
    """Fields with the same name and meaning in all borrowed dialects."""

    top_k: Annotated[int, "0 or -1: all tokens", Meta(ge=-1, le=MAX_INT32)] = 0

    def shared(self) -> dict[str, Any]:
        """Return the fields of this class in native form; absent ones are UNSET."""
        given = {name: getattr(self, name) for name in BorrowedSampling.__struct_fields__}
        return given | {"top_k": max(0, self.top_k)}


class StructuredOutputs(fields.StructuredOutputs, Strict, frozen=True, kw_only=True):
    exactly_one: ClassVar[tuple[str, ...]] = FORMS


class SamplingFields(fields.SamplingFields, SharedSampling, Strict, frozen=True, kw_only=True):
    structured_outputs: (
        Annotated[StructuredOutputs, "the texts that the output may be"] | UnsetType
    ) = UNSET


class Message(Strict, frozen=True, kw_only=True):
    role: Annotated[ShortName, "whose turn it is, as the chat template knows it"]
    content: Annotated[str, "what was said"]
    name: Annotated[str | None, "who said it, for templates that ask"] = None

    def for_template(self) -> dict[str, str]:
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **name}


class SdFields(fields.SdLimits, Strict, frozen=True, kw_only=True):
    max_depth: Annotated[int, "the longest path of draft tokens", Meta(ge=1, le=MAX_DEPTH)] = (
        MAX_DEPTH
    )
    max_rows: Annotated[
        int, "rows verified per step, the root included", Meta(ge=2, le=MAX_ROWS)
    ] = MAX_ROWS


PromptTokens = Annotated[PromptIds | None, "a text as the model's tokens"]
Conversation = Annotated[
    Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None,
    "a conversation, for the chat template",
]


class ItemFields(fields.Item, Strict, frozen=True, kw_only=True):
    exactly_one: ClassVar[tuple[str, ...]] = PROMPTS

    # Packed, and as messages in their struct, where the client takes lists and dicts.
    token_ids: PromptTokens = None  # type: ignore[assignment]
    messages: Conversation = None  # type: ignore[assignment]
    sd: Annotated[
        bool | Literal["auto", "off"] | SdFields,
        "what is drafted for this item, whose tokens are the same: auto or true, off or false, or "
        "limits",
    ] = True
    sampling: Annotated[SamplingFields | None, "fields that differ from the batch's"] = None


def items_of(
    prompts: Sequence[str | PackedIds],
    seed: int | None,
    loras: Sequence[str],
    ids: Sequence[str | None] | None = None,
    **common: Any,
) -> list[ItemFields]:
    """Return an item for each prompt of a borrowed dialect. Its seed may be negative or absent."""
    return [
        ItemFields(
            id=id,
            prompt=None if isinstance(prompt, PackedIds) else prompt,
            token_ids=prompt if isinstance(prompt, PackedIds) else None,
            seed=None if seed in (None, -1) else seed & MAX_SEED,
            lora=lora,
            **common,
        )
        for prompt, lora, id in zip(prompts, loras, ids or [None] * len(prompts), strict=True)
    ]


class NativeRequest(fields.GenerateBody, Strict, frozen=True, kw_only=True):
    requests: Annotated[
        list[ItemFields],
        "the batch; all of it is admitted or nothing",
        Meta(min_length=1, extra={"limit": ITEMS}),
    ]
    sampling: Annotated[SamplingFields, "for items that say nothing else"] = SamplingFields()
