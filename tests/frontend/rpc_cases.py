"""Calls that are sent over HTTP and over gRPC, with the error that each should end with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.frontend.fake_engine import FAILS, HANGS, LATE
from tlt_server.frontend.rpc.methods import OPERATIONS

KEYS = "".join(
    f"key-{name} scopes={scopes} name={name}\n"
    for name, scopes in (
        ("data", "data"),
        ("other", "data"),
        ("push", "push-weights"),
        ("operator", "operate"),
        ("all", "data,push-weights,operate"),
    )
)
BATCH = ("GenerateBatch", "Generate", "Detach")
MAX_BODY_BYTES = 2**20


@dataclass(frozen=True)
class Case:
    about: str
    says: dict[str, Any] = field(default_factory=dict)  # the message
    methods: tuple[str, ...] = ("GenerateBatch", "Generate")
    key: str = "all"
    metadata: dict[str, str] = field(default_factory=dict)
    error: str = ""  # its code; empty: it succeeds


def batch(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"requests": list(items), **fields}


def sampled(**sampling: Any) -> dict[str, Any]:
    return batch({"prompt": "abc", "seed": 7, "id": "a"}, sampling={"max_tokens": 4, **sampling})


ITEM = {"prompt": "abc", "seed": 7, "id": "a"}
INVALID, LARGE = "invalid_request", "too_large"
CASES = [
    # what is right
    Case("text", batch(ITEM, sampling={"max_tokens": 8})),
    Case(
        "token ids",
        batch(
            {"token_ids": [65, 66, 67], "seed": 2**64 - 1, "id": "a"}, sampling={"max_tokens": 8}
        ),
    ),
    Case(
        "no text for it",
        batch(
            {**ITEM, "n": 3, "group_id": "g", "salt": "s", "sd": False},
            timeout_s=20.5,
            queue_timeout_s=5.0,
        ),
    ),
    Case("few drafts", batch({**ITEM, "sd": {"max_depth": 2, "max_rows": 4}})),
    Case("alternatives", sampled(logprobs=2, prompt_logprobs=2, raw_logprobs=True, max_tokens=5)),
    Case(
        "all sampling fields",
        sampled(
            temperature=0.5,
            top_p=0.9,
            min_p=0.1,
            top_k=5,
            min_tokens=1,
            stop=["zz", "y"],
            ignore_eos=True,
            stop_token_ids=[5, 6],
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"5": 1.5, "70": -2.0},
        ),
    ),
    Case("a stop string", sampled(stop=["c"], max_tokens=20)),
    Case(
        "a stop token",
        batch({"token_ids": [65, 66, 256], "seed": 1, "id": "a"}, sampling={"max_tokens": 20}),
    ),
    Case("what the prompt leaves", sampled(max_tokens=None)),
    Case("no tokens", sampled(max_tokens=0, prompt_logprobs=1)),
    Case(
        "an item's own fields",
        batch(
            ITEM,
            {"prompt": "b", "seed": 1, "id": "b", "sampling": {"max_tokens": 2}},
            sampling={"max_tokens": 3},
        ),
    ),
    Case(
        "many items",
        batch(
            *({"prompt": "abc" * i, "seed": i, "id": f"i{i}"} for i in range(1, 8)),
            sampling={"max_tokens": 9},
        ),
    ),
    Case(
        "unlike texts",
        batch(
            {"prompt": '\u00e9\u4e2d \U0001f600\n"\\', "seed": 1, "id": "\u00fc"},
            sampling={"max_tokens": 4},
        ),
    ),
    Case(
        "a conversation",
        batch({"messages": [{"role": "user", "content": "a"}], "seed": 1, "id": "a"}),
    ),
    Case(
        "one item fails",
        batch(ITEM, {"token_ids": [FAILS], "seed": 1, "id": "b"}, sampling={"max_tokens": 4}),
    ),
    Case("every item fails", batch({"token_ids": [FAILS], "seed": 1, "id": "b"})),
    Case("its deadline passes", batch({"token_ids": [HANGS], "seed": 1, "id": "b"}, timeout_s=0.1)),
    Case(
        "not started in time",
        batch({"token_ids": [LATE], "seed": 1, "id": "b"}, queue_timeout_s=0.1),
    ),
    Case("a request id", batch(ITEM), metadata={"x-request-id": "trainer-7"}),
    # fields that are wrong
    Case("nothing", {}, methods=BATCH, error=INVALID),
    Case("no prompt", batch({"id": "a"}), methods=BATCH, error=INVALID),
    Case("two prompts", batch({"prompt": "a", "token_ids": [1]}), error=INVALID),
    Case("an empty prompt", batch({"prompt": ""}), error=INVALID),
    *(
        Case(f"{name} {value}", sampled(**{name: value}), error=INVALID)
        for name, value in (
            ("temperature", -1.0),
            ("temperature", 101.0),
            ("temperature", 1e-5),
            ("top_p", 0.0),
            ("top_p", 1.5),
            ("min_p", -0.1),
            ("top_k", -1),
            ("max_tokens", -1),
            ("max_tokens", 10_000),
            ("min_tokens", 9),
            ("min_tokens", -1),
            ("repetition_penalty", 0.0),
            ("presence_penalty", 3.0),
            ("frequency_penalty", -2.5),
            ("logprobs", -1),
            ("logprobs", 21),
            ("prompt_logprobs", -2),
            ("prompt_logprobs", -1),
            ("stop", [""]),
            ("stop", ["x" * 300]),
            ("stop", [str(i) for i in range(17)]),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", [300]),
            ("stop_token_ids", [1] * 65),
            ("logit_bias", {"300": 1.0}),
            ("logit_bias", {"-1": 1.0}),
            ("logit_bias", {"5": 101.0}),
        )
    ),
    Case("an item's own field", batch({**ITEM, "sampling": {"temperature": -2.0}}), error=INVALID),
    Case("a drafter of another server", batch({**ITEM, "sd": {"drafter": "m"}}), error=INVALID),
    Case("drafts of no depth", batch({**ITEM, "sd": {"max_depth": 0}}), error=INVALID),
    Case("no choices", batch({**ITEM, "n": 0}), error=INVALID),
    Case("too many choices", batch({**ITEM, "n": 5}), error=INVALID),
    Case("a negative token id", batch({"token_ids": [-5]}), error=INVALID),
    Case("a token id too high", batch({"token_ids": [5, 300]}), error=INVALID),
    Case("a prompt too long", batch({"token_ids": [65] * 600}), error=INVALID),
    Case("a text too long", batch({"prompt": "a" * 100_000}), error=INVALID),
    Case("one id twice", batch(ITEM, ITEM), error=INVALID),
    Case("an id too long", batch({**ITEM, "id": "x" * 257}), error=INVALID),
    Case("an empty id", batch({**ITEM, "id": ""}), error=INVALID),
    Case("a salt too long", batch({**ITEM, "salt": "x" * 257}), error=INVALID),
    Case("a message without content", batch({"messages": [{"role": "user"}]}), error=INVALID),
    Case("no time", batch(ITEM, timeout_s=0.0), error=INVALID),
    Case("a deadline too far", batch(ITEM, timeout_s=1e7), error=INVALID),
    Case("a queue timeout too long", batch(ITEM, queue_timeout_s=1e7), error=INVALID),
    # bounds
    Case("too many items", batch(*({"prompt": "a"} for _ in range(9))), methods=BATCH, error=LARGE),
    Case(
        "too much output",
        batch({**ITEM, "n": 4}, {"prompt": "b", "n": 4}, sampling={"max_tokens": 400}),
        error=LARGE,
    ),
    Case(
        "too many sequences",
        batch(*({"prompt": "a", "n": 4} for _ in range(8))),
        methods=BATCH,
        error=LARGE,
    ),
    Case(
        "an over-size body",
        batch({"prompt": "a" * (MAX_BODY_BYTES + 10)}),
        methods=BATCH,
        error=LARGE,
    ),
    # keys
    *(
        Case(f"{key or 'no'} key", batch(ITEM), methods=BATCH, key=key, error=error)
        for key, error in (
            ("", "unauthenticated"),
            ("unknown", "unauthenticated"),
            ("push", "forbidden"),
            ("operator", "forbidden"),
        )
    ),
    *(
        Case(
            "not with data",
            {"name": "n"} if "Group" in method else {},
            methods=(method,),
            key="data",
            error="forbidden",
        )
        for method in (
            "Pause",
            "Resume",
            "Sleep",
            "Wake",
            "ClearCache",
            "Rollback",
            "JoinGroup",
            "LeaveGroup",
        )
    ),
    Case(
        "nor with data",
        {"version": "v"},
        methods=("CommitWeights", "AbortWeights"),
        key="data",
        error="forbidden",
    ),
    *(
        Case("no key at all", {}, methods=(method,), key="", error="unauthenticated")
        for method in OPERATIONS
    ),
    # idempotency
    *(
        Case(
            "a key of no header",
            batch(ITEM),
            methods=("GenerateBatch", "Detach"),
            metadata={"idempotency-key": value},
            error=INVALID,
        )
        for value in ("", "a b", "k" * 257)
    ),
    Case(
        "a key and a stream",
        batch(ITEM),
        methods=("Generate",),
        metadata={"idempotency-key": "k-stream"},
        error=INVALID,
    ),
    # rollouts, weights, pauses
    Case(
        "a rollout that is not there",
        {"id": "nope"},
        methods=("GetRollout", "DeleteRollout"),
        error="not_found",
    ),
    Case(
        "too long a wait", {"id": "nope", "wait_s": 100.0}, methods=("GetRollout",), error=INVALID
    ),
    Case("the strategy", methods=("GetStrategy",)),
    Case("the strategy, with data", methods=("GetStrategy",), key="data", error="forbidden"),
    Case("no drafts", {"policy": "off"}, methods=("SetStrategy",)),
    Case("no policy", methods=("SetStrategy",), error=INVALID),
    Case(
        "a pin of nothing",
        {"policy": "off", "pins": [{"batch": [8, 1], "strategy": "off"}]},
        methods=("SetStrategy",),
        error=INVALID,
    ),
    Case(
        "a pin",
        {"policy": "off", "pins": [{"batch": [1, 8], "strategy": "off"}]},
        methods=("SetStrategy",),
    ),
    Case("no such end", {"in_flight": "stop"}, methods=("Pause", "Sleep"), error=INVALID),
    Case("KV that sleeps", {"in_flight": "continue"}, methods=("Sleep",), error=INVALID),
    Case("no such answer", {"new_requests": "run"}, methods=("Pause",), error=INVALID),
    Case("no such memory", {"memory": ["graphs"]}, methods=("Sleep", "Wake"), error=INVALID),
    Case("nothing is paused or asleep", methods=("Resume", "Wake", "ClearCache")),
    Case("nothing runs", {"unless_held": True}, methods=("ClearCache",)),
    Case("nothing to abort", methods=("Abort",), error=INVALID),
    Case("some and all", {"ids": ["x"], "all": True}, methods=("Abort",), error=INVALID),
    Case("not all", {"all": False}, methods=("Abort",), error=INVALID),
    Case("an empty id", {"ids": [""]}, methods=("Abort",), error=INVALID),
    Case("all, with data", {"all": True}, methods=("Abort",), key="data", error="forbidden"),
    Case("ids of nothing open", {"ids": ["x", "y"]}, methods=("Abort",)),
    Case(
        "nothing was pushed",
        {"version": "step-9"},
        methods=("CommitWeights", "AbortWeights"),
        key="push",
    ),
    Case(
        "a rollback in an unknown way", {"in_flight": "stop"}, methods=("Rollback",), error=INVALID
    ),
    Case("a rollback", {"to": "v0"}, methods=("Rollback",)),
    Case("what is live", methods=("GetWeights",)),
    Case("a group without a store", {"name": "g"}, methods=("JoinGroup",), error=INVALID),
    Case(
        "a rank that is none",
        {"name": "g", "master_address": "h", "master_port": 1, "rank_offset": 2, "world_size": 2},
        methods=("JoinGroup",),
        error=INVALID,
    ),
    Case(
        "a part of a server without the channel",
        {"version": "v", "part": "a"},
        methods=("GetPart",),
        error="forbidden",
    ),
    Case("the list of nothing", methods=("ListRollouts",), key="other"),
    Case("what it is", methods=("GetInfo",)),
    Case("what it is, to a tenant", methods=("GetInfo",), key="data"),
]
