"""Requests in the native form, as structs of what is right on every server.

`http.parsing.parse` is the only way in; `validation.Validator` then applies the model's and the
server's limits. A borrowed dialect declares structs of its own and translates them to
`NativeRequest`. A field of `SamplingFields` that is absent is UNSET, so that an item's fields win
over the batch's, and those over the defaults, which are those of `records.Sampling`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tlt_client.arguments import SEEN
from tlt_server.errors import ContextExceeded, TltError, TooLarge
from tlt_server.frontend.http.bounds import MAX_INT32, Limit
from tlt_server.frontend.http.fields import Strict
from tlt_server.packed import PackedIds
from tlt_server.records import MAX_SEED, Sampling
from tlt_server.tree_limits import MAX_DEPTH, MAX_ROWS

ITEMS = Limit("max_batch_items", "items", "split the batch", TooLarge)
NAMES = Limit("max_batch_items", "names", "split the call")
MAX_MESSAGES = 2**14  # limit on one conversation


class _PromptLimit(Limit):
    def exceeded(self, where: str, count: int, limit: int) -> TltError:
        found = f"{where} has {count} {self.noun}"
        return ContextExceeded.of(found, f"{limit} ({self.setting})", limit)


PromptIds = Annotated[PackedIds, Meta(extra={"limit": _PromptLimit("max_prompt_tokens", "ids")})]
StopStrings = Annotated[
    list[str], Meta(extra={"limit": Limit("max_stop_strings", "strings", "leave some out")})
]
StopTokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, le=MAX_INT32)]],
    Meta(extra={"limit": Limit("max_stop_token_ids", "ids", "leave some out")}),
]
LogitBias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(extra={"limit": Limit("max_logit_bias", "entries", "leave some out")}),
]
MAX_ALLOWED, MAX_BAD_WORDS, MAX_WORD = 4096, 256, 256  # ids, words, characters of one
MAX_BAD_TOKENS = 4096  # limit on all words together
FORMS = ("json_schema", "regex", "choice", "grammar", "structural_tag")
Json = dict[str, Any] | str  # an object, or its text
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]
MAX_NAME = 256
ShortName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=SEEN)]
Salt = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Length = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Priority = Annotated[
    int,
    Meta(
        ge=-MAX_INT32,
        le=MAX_INT32,
        description="sequences of lower values start first; below 0 needs the scope operate",
    ),
]
Train = Annotated[
    bool,
    Meta(description="false: it is not kept to train the drafter, where the server trains one"),
]
Seconds = Annotated[float, Meta(gt=0)]
Alternatives = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
Truncation = Annotated[
    Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None,
    Meta(description="keep this many last tokens of the prompt; -1: as many as fit"),
]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT32, description="0 or -1: all tokens")]
# Seeds in the borrowed dialects, with or without a sign
AnySeed = Annotated[
    int, Meta(ge=-(2**63), extra={"at_most": MAX_SEED}, extra_json_schema={"maximum": MAX_SEED})
]
Seed = Annotated[  # msgspec has no bounds of 64 bits
    int, Meta(ge=0, extra={"at_most": MAX_SEED}, extra_json_schema={"maximum": MAX_SEED})
]


def seed_of(given: int | None) -> int | None:
    """Return a borrowed dialect's seed as 64 bits without a sign. None and -1 mean none."""
    return None if given in (None, -1) else given & MAX_SEED


class SharedSampling(Struct, frozen=True, kw_only=True):
    """Fields with the same name and meaning in all dialects."""

    absent_means: ClassVar[Struct] = Sampling()

    temperature: (
        Annotated[float, Meta(ge=0, le=100, description="0: the most likely token always")]
        | UnsetType
    ) = UNSET
    top_p: (
        Annotated[
            float,
            Meta(
                gt=0, le=1, description="keep the most likely tokens up to this probability in all"
            ),
        ]
        | UnsetType
    ) = UNSET
    min_p: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="drop tokens below this fraction of the most likely one's probability",
            ),
        ]
        | UnsetType
    ) = UNSET
    min_tokens: (
        Annotated[
            Length,
            Meta(
                description="no stop token, and no end at a stop string, before this many output "
                "tokens"
            ),
        ]
        | UnsetType
    ) = UNSET
    stop: (
        Annotated[str | StopStrings, Meta(description="end before one of these texts")] | UnsetType
    ) = UNSET
    stop_token_ids: (
        Annotated[StopTokenIds, Meta(description="end with one of these tokens")] | UnsetType
    ) = UNSET
    ignore_eos: (
        Annotated[bool, Meta(description="the model's own end tokens do not end the output")]
        | UnsetType
    ) = UNSET
    repetition_penalty: (
        Annotated[
            float,
            Meta(ge=0.01, le=100, description="on tokens of the prompt and the output; 1: none"),
        ]
        | UnsetType
    ) = UNSET
    presence_penalty: (
        Annotated[
            float,
            Meta(ge=-2, le=2, description="taken off the logits of tokens that the output has"),
        ]
        | UnsetType
    ) = UNSET
    frequency_penalty: (
        Annotated[
            float,
            Meta(ge=-2, le=2, description="taken off for each time that the output has the token"),
        ]
        | UnsetType
    ) = UNSET
    logit_bias: (
        Annotated[LogitBias, Meta(description="token id -> what is added to its logit")] | UnsetType
    ) = UNSET

    allowed_token_ids: (
        Annotated[
            list[Annotated[int, Meta(ge=0, le=MAX_INT32)]],
            Meta(max_length=MAX_ALLOWED, description="only these tokens are sampled; absent: all"),
        ]
        | UnsetType
    ) = UNSET
    bad_words: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_WORD)]],
            Meta(
                max_length=MAX_BAD_WORDS,
                description="words that are not sampled, with a space before or not",
            ),
        ]
        | UnsetType
    ) = UNSET

    def shared(self) -> dict[str, Any]:
        """Return the fields of this class, those that are absent as UNSET."""
        return {name: getattr(self, name) for name in SharedSampling.__struct_fields__}


class StructuredOutputs(Strict, frozen=True, kw_only=True):
    """The texts that the output may be, in one of several languages."""

    exactly_one: ClassVar[tuple[str, ...]] = FORMS

    json_schema: Annotated[
        Json | None,
        Meta(
            description="a JSON schema, as an object or as its text; properties come in its order"
        ),
    ] = None
    regex: Annotated[
        str | None, Meta(description="a regular expression that matches the whole output")
    ] = None
    choice: Annotated[Choices | None, Meta(description="texts, of which the output is one")] = None
    grammar: Annotated[
        str | None,
        Meta(description="a grammar in Lark's form or in GBNF, the one with ::= in its rules"),
    ] = None
    structural_tag: Annotated[
        Json | None,
        Meta(
            description="free text in which tags hold JSON, as an object or as its text: triggers "
            "and structures of begin, schema and end"
        ),
    ] = None


class SamplingFields(SharedSampling, Strict, frozen=True, kw_only=True):
    """Sampling fields, all optional: an item's win over the batch's, those over the defaults."""

    structured_outputs: (
        Annotated[StructuredOutputs, Meta(description="the texts that the output may be")]
        | UnsetType
    ) = UNSET

    top_k: (
        Annotated[Length, Meta(description="keep this many most likely tokens; 0: all")] | UnsetType
    ) = UNSET
    max_tokens: (
        Annotated[
            Length | None,
            Meta(
                description="null: what the prompt leaves of the model's length; 0: only read the "
                "prompt"
            ),
        ]
        | UnsetType
    ) = UNSET
    logprobs: (
        Annotated[
            Length,
            Meta(description="alternatives reported per token; the token's own log-prob always is"),
        ]
        | UnsetType
    ) = UNSET
    include_stop_str_in_output: (
        Annotated[bool, Meta(description="the text keeps the stop string or token that ended it")]
        | UnsetType
    ) = UNSET
    raw_logprobs: (
        Annotated[bool, Meta(description="report log-probs under the unprocessed distribution too")]
        | UnsetType
    ) = UNSET
    prompt_logprobs: (
        Annotated[
            Alternatives | None,
            Meta(
                description="alternatives per prompt token; null: not reported, -1: the whole "
                "vocabulary"
            ),
        ]
        | UnsetType
    ) = UNSET


class Message(Strict, frozen=True, kw_only=True):
    role: Annotated[ShortName, Meta(description="whose turn it is, as the chat template knows it")]
    content: Annotated[str, Meta(description="what was said")]
    name: Annotated[str | None, Meta(description="who said it, for templates that ask")] = None

    def for_template(self) -> dict[str, str]:
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **name}


class SdFields(Strict, frozen=True, kw_only=True):
    """Limits on what is drafted for one item."""

    drafter: Annotated[
        ShortName | None,
        Meta(description="the only one that may draft; steps of another draft nothing for this"),
    ] = None
    max_depth: Annotated[
        int, Meta(ge=1, le=MAX_DEPTH, description="the longest path of draft tokens")
    ] = MAX_DEPTH
    max_rows: Annotated[
        int, Meta(ge=2, le=MAX_ROWS, description="rows verified per step, the root included")
    ] = MAX_ROWS


PROMPTS = ("prompt", "token_ids", "messages")


class ItemFields(Strict, frozen=True, kw_only=True):
    """One prompt, in one of three forms, and how many choices to make of it."""

    exactly_one: ClassVar[tuple[str, ...]] = PROMPTS

    id: Annotated[
        ShortName | None, Meta(description="comes back with the results; ids of one batch differ")
    ] = None
    prompt: Annotated[str | None, Meta(description="a text")] = None
    token_ids: Annotated[PromptIds | None, Meta(description="a text as the model's tokens")] = None
    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None,
        Meta(description="a conversation, for the chat template"),
    ] = None
    group_id: Annotated[
        ShortName | None,
        Meta(description="siblings draft from each other's text; absent: the choices of this item"),
    ] = None
    salt: Annotated[
        Salt, Meta(description="requests share cached prefixes only with those of the same salt")
    ] = ""
    lora: Annotated[
        str, Meta(max_length=MAX_NAME, description="the LoRA adapter that computes it; empty: none")
    ] = ""
    n: Annotated[Count, Meta(description="choices")] = 1
    seed: Annotated[
        Seed | None,
        Meta(
            description="keys the choices' noise: the same seed gives the same tokens; absent: "
            "the server's own"
        ),
    ] = None
    sd: Annotated[
        bool | Literal["auto", "off"] | SdFields,
        Meta(
            description="what is drafted for this item, whose tokens are the same: auto or true, "
            "off or false, or limits"
        ),
    ] = True
    train: Train = True
    sampling: Annotated[
        SamplingFields | None, Meta(description="fields that differ from the batch's")
    ] = None


class NativeRequest(Strict, frozen=True, kw_only=True):
    requests: Annotated[
        list[ItemFields],
        Meta(
            min_length=1,
            description="the batch; all of it is admitted or nothing",
            extra={"limit": ITEMS},
        ),
    ]
    sampling: Annotated[SamplingFields, Meta(description="for items that say nothing else")] = (
        SamplingFields()
    )
    stream: Annotated[
        bool, Meta(description="server-sent events as tokens come, instead of one reply")
    ] = False
    timeout_s: Annotated[
        Seconds | None, Meta(description="the batch's deadline, from its arrival")
    ] = None
    queue_timeout_s: Annotated[
        Seconds | None,
        Meta(description="a sequence not started by then ends with the error queue_timeout"),
    ] = None
    priority: Priority = 0
    detach: Annotated[
        bool, Meta(description="answer at once with an id; GET /rollouts/{id} has the results")
    ] = False
