"""The fields of a request, declared once, with bounds and descriptions: the client sends these
structs, the server reads bodies by them, the journal is checked against them, and the gRPC messages
and the docs follow them.

A field of `SamplingFields` that is left out is UNSET: an item's fields win over the batch's, and
those over the server's defaults. `extra={"limit": NAME}` names the setting of a server that
limits the length of a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from tlt_client.arguments import MAX_VERSION, SEEN

MAX_INT32, MAX_SEED = 2**31 - 1, 2**64 - 1
MAX_ALLOWED, MAX_BAD_WORDS, MAX_WORD = 4096, 256, 256  # ids, words, characters of one
MAX_NAME = 256

T = TypeVar("T")
Given: TypeAlias = T | UnsetType  # a field that may be left out
Json = dict[str, Any] | str  # an object, or its text
Count = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Length = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Seconds = Annotated[float, Meta(gt=0)]
ShortName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=SEEN)]
Salt = Annotated[str, Meta(max_length=256)]
Alternatives = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]
Priority = Annotated[
    int,
    "sequences of lower values start first; below 0 needs the scope operate",
    Meta(ge=-MAX_INT32, le=MAX_INT32),
]
SessionId = Annotated[
    ShortName | None,
    "the conversation it belongs to: a fleet keeps it where its text was read before; absent: the "
    "header X-Session-ID",
]
Train = Annotated[bool, "false: it is not kept to train the drafter, where the server trains one"]
Seed = Annotated[  # msgspec has no bounds of 64 bits
    int, Meta(ge=0, extra={"at_most": MAX_SEED}, extra_json_schema={"maximum": MAX_SEED})
]


class SharedSampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling fields with the same name and meaning in all dialects."""

    temperature: Given[Annotated[float, "0: the most likely token always", Meta(ge=0, le=100)]] = (
        UNSET
    )
    top_p: Given[
        Annotated[
            float, "keep the most likely tokens up to this probability in all", Meta(gt=0, le=1)
        ]
    ] = UNSET
    min_p: Given[
        Annotated[
            float,
            "drop tokens below this fraction of the most likely one's probability",
            Meta(ge=0, le=1),
        ]
    ] = UNSET
    min_tokens: Given[
        Annotated[
            Length, "no stop token, and no end at a stop string, before this many output tokens"
        ]
    ] = UNSET
    stop: Given[
        Annotated[
            str | Annotated[list[str], Meta(extra={"limit": "max_stop_strings"})],
            "end before one of these texts",
        ]
    ] = UNSET
    stop_token_ids: Given[
        Annotated[
            list[Length],
            "end with one of these tokens",
            Meta(extra={"limit": "max_stop_token_ids"}),
        ]
    ] = UNSET
    ignore_eos: Given[Annotated[bool, "the model's own end tokens do not end the output"]] = UNSET
    repetition_penalty: Given[
        Annotated[float, "on tokens of the prompt and the output; 1: none", Meta(ge=0.01, le=100)]
    ] = UNSET
    presence_penalty: Given[
        Annotated[float, "taken off the logits of tokens that the output has", Meta(ge=-2, le=2)]
    ] = UNSET
    frequency_penalty: Given[
        Annotated[float, "taken off for each time that the output has the token", Meta(ge=-2, le=2)]
    ] = UNSET
    logit_bias: Given[
        Annotated[
            dict[str, Annotated[float, Meta(ge=-100, le=100)]],
            "token id -> what is added to its logit",
            Meta(extra={"limit": "max_logit_bias"}),
        ]
    ] = UNSET
    allowed_token_ids: Given[
        Annotated[
            list[Length], "only these tokens are sampled; absent: all", Meta(max_length=MAX_ALLOWED)
        ]
    ] = UNSET
    bad_words: Given[
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_WORD)]],
            "words that are not sampled, with a space before or not",
            Meta(max_length=MAX_BAD_WORDS),
        ]
    ] = UNSET


class StructuredOutputs(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The texts that an output may be, in exactly one of several languages."""

    json_schema: Annotated[
        Json | None, "a JSON schema, as an object or as its text; properties come in its order"
    ] = None
    regex: Annotated[str | None, "a regular expression that matches the whole output"] = None
    choice: Annotated[Choices | None, "texts, of which the output is one"] = None
    grammar: Annotated[
        str | None, "a grammar in Lark's form or in GBNF, the one with ::= in its rules"
    ] = None
    structural_tag: Annotated[
        Json | None,
        "free text in which tags hold JSON, as an object or as its text: triggers and structures "
        "of begin, schema and end",
    ] = None


class SamplingFields(SharedSampling, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling fields, all optional: an item's win over the batch's, those over the defaults."""

    structured_outputs: StructuredOutputs | dict[str, Any] | UnsetType = UNSET
    top_k: Given[Annotated[Length, "keep this many most likely tokens; 0: all"]] = UNSET
    max_tokens: Given[
        Annotated[
            Length | None,
            "null: what the prompt leaves of the model's length; 0: only read the prompt",
        ]
    ] = UNSET
    logprobs: Given[
        Annotated[Length, "alternatives reported per token; the token's own log-prob always is"]
    ] = UNSET
    include_stop_str_in_output: Given[
        Annotated[bool, "the text keeps the stop string or token that ended it"]
    ] = UNSET
    raw_logprobs: Given[
        Annotated[bool, "report log-probs under the unprocessed distribution too"]
    ] = UNSET
    prompt_logprobs: Given[
        Annotated[
            Alternatives | None,
            "alternatives per prompt token; null: not reported, -1: the whole vocabulary",
        ]
    ] = UNSET


class SdLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits on one item's drafts."""

    drafter: Annotated[
        ShortName | None, "the only one that may draft; steps of another draft nothing for this"
    ] = None
    max_depth: int | UnsetType = UNSET  # the longest path of draft tokens
    max_rows: int | UnsetType = UNSET  # rows verified per step, the root included


class Item(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt, in exactly one of three forms, and how many choices to make of it."""

    id: Annotated[ShortName | None, "comes back with the results; ids of one batch differ"] = None
    prompt: Annotated[str | None, "a text"] = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[dict[str, Any]] | None = None
    group_id: Annotated[
        ShortName | None, "siblings draft from each other's text; absent: the choices of this item"
    ] = None
    salt: Annotated[Salt, "requests share cached prefixes only with those of the same salt"] = ""
    lora: Annotated[
        str, "the LoRA adapter that computes it; empty: none", Meta(max_length=MAX_NAME)
    ] = ""
    weight_version: Annotated[
        str,
        "the version of the weights that must compute all of it, else it ends with a 409; empty: "
        "any",
        Meta(max_length=MAX_VERSION),
    ] = ""
    n: Annotated[Count, "choices"] = 1
    seed: Annotated[
        Seed | None,
        "keys the choices' noise: the same seed gives the same tokens; absent: the server's own",
    ] = None
    sd: bool | Literal["auto", "off"] | SdLimits | dict[str, Any] = True
    train: Train = True
    sampling: SamplingFields | dict[str, Any] | None = None


class GenerateBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch of items."""

    requests: Sequence[Item | dict[str, Any]]
    sampling: SamplingFields | dict[str, Any] | UnsetType = UNSET
    stream: Annotated[bool, "server-sent events as tokens come, instead of one reply"] = False
    timeout_s: Annotated[Seconds | None, "the batch's deadline, from its arrival"] = None
    queue_timeout_s: Annotated[
        Seconds | None, "a sequence not started by then ends with the error queue_timeout"
    ] = None
    priority: Priority = 0
    detach: Annotated[bool, "answer at once with an id; GET /rollouts/{id} has the results"] = False
