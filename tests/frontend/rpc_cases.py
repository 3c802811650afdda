"""Calls of five operations that are sent over HTTP and over gRPC, with the error that each should
end with. Other operations differ by their types, which `test_rpc_mirror` compares.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.frontend.fake_engine import FAILS, HANGS, LATE

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
BATCH = ("GenerateBatch", "Generate")
FIVE = (*BATCH, "GetRollout", "SetStrategy", "CommitWeights")


@dataclass(frozen=True)
class Case:
    about: str
    says: dict[str, Any] = field(default_factory=dict)  # the message
    methods: tuple[str, ...] = BATCH
    key: str = "all"
    metadata: dict[str, str] = field(default_factory=dict)
    error: str = ""  # its code; empty: it succeeds


def batch(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"requests": list(items), **fields}


def sampled(**sampling: Any) -> dict[str, Any]:
    return batch({"prompt": "abc", "seed": 7, "id": "a"}, sampling={"max_tokens": 4, **sampling})


ITEM = {"prompt": "abc", "seed": 7, "id": "a"}
INVALID, LARGE = "invalid_request", "too_large"
EVERY_SAMPLING_FIELD = {
    "temperature": 0.5,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_k": 5,
    "min_tokens": 1,
    "stop": ["zz", "y"],
    "ignore_eos": True,
    "stop_token_ids": [5, 6],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 1.5, "70": -2.0},
}
PINS = [{"batch": [1, 8], "strategy": "off"}]
GENERATING = [
    Case(
        "token ids",
        batch(
            {"token_ids": [65, 66, 67], "seed": 2**64 - 1, "id": "a"}, sampling={"max_tokens": 8}
        ),
    ),
    Case(
        "item fields",
        batch(
            {**ITEM, "n": 3, "group_id": "g", "salt": "s", "sd": False},
            {"prompt": "b", "seed": 1, "id": "b", "sampling": {"max_tokens": 2}},
            timeout_s=20.5,
            queue_timeout_s=5.0,
        ),
    ),
    Case("few drafts", batch({**ITEM, "sd": {"max_depth": 2, "max_rows": 4}})),
    Case("alternatives", sampled(logprobs=2, prompt_logprobs=2, raw_logprobs=True, max_tokens=5)),
    Case("sampling fields", sampled(**EVERY_SAMPLING_FIELD)),
    Case("a null", sampled(max_tokens=None)),
    Case("zeros", sampled(max_tokens=0, prompt_logprobs=1)),
    Case(
        "other scripts",
        batch({"prompt": '\u00e9\u4e2d \U0001f600\n"\\', "seed": 1, "id": "\u00fc"}),
    ),
    Case(
        "a conversation",
        batch({"messages": [{"role": "user", "content": "a"}], "seed": 1, "id": "a"}),
    ),
    Case("one failed item", batch(ITEM, {"token_ids": [FAILS], "seed": 1, "id": "b"})),
    Case("only failed items", batch({"token_ids": [FAILS], "seed": 1, "id": "b"})),
    Case("a passed deadline", batch({"token_ids": [HANGS], "seed": 1, "id": "b"}, timeout_s=0.1)),
    Case("a late start", batch({"token_ids": [LATE], "seed": 1, "id": "b"}, queue_timeout_s=0.1)),
    Case("a request id", batch(ITEM), metadata={"x-request-id": "trainer-7"}),
    Case("no items", {}, error=INVALID),
    Case("two prompts", batch({"prompt": "a", "token_ids": [1]}), error=INVALID),
    Case("a number out of range", sampled(temperature=-1.0), error=INVALID),
    Case("an integer out of range", sampled(logprobs=21), error=INVALID),
    Case("a long list", sampled(stop_token_ids=[1] * 65), error=INVALID),
    Case("a wrong key of a map", sampled(logit_bias={"300": 1.0}), error=INVALID),
    Case("a wrong field of an item", batch({**ITEM, "sampling": {"top_p": 0.0}}), error=INVALID),
    Case("another drafter", batch({**ITEM, "sd": {"drafter": "m"}}), error=INVALID),
    Case("one id twice", batch(ITEM, ITEM), error=INVALID),
    Case("a message without content", batch({"messages": [{"role": "user"}]}), error=INVALID),
    Case("a late deadline", batch(ITEM, timeout_s=1e7), error=INVALID),
    Case("too many items", batch(*({"prompt": "a"} for _ in range(9))), error=LARGE),
    Case("a large body", batch({"prompt": "a" * (2**20 + 10)}), error=LARGE),
    *(
        Case(f"{key} key", batch(ITEM), key=key, error=error)
        for key, error in (("unknown", "unauthenticated"), ("push", "forbidden"))
    ),
    Case(
        "an idempotency key that is not a word",
        batch(ITEM),
        methods=("GenerateBatch",),
        metadata={"idempotency-key": "a b"},
        error=INVALID,
    ),
    Case(
        "an idempotency key of a stream",
        batch(ITEM),
        methods=("Generate",),
        metadata={"idempotency-key": "k-stream"},
        error=INVALID,
    ),
]
OPERATING = [
    *(Case("no key", {}, methods=(method,), key="", error="unauthenticated") for method in FIVE),
    Case("an unknown id", {"id": "no"}, ("GetRollout",), error="not_found"),
    Case("a long wait", {"id": "no", "wait_s": 100.0}, ("GetRollout",), error=INVALID),
    Case("pins", {"policy": "off", "pins": PINS}, ("SetStrategy",)),
    Case("no policy", {}, ("SetStrategy",), error=INVALID),
    Case("not an operator", {}, ("SetStrategy",), key="data", error="forbidden"),
    Case("no push", {"version": "step-9"}, ("CommitWeights",), key="push"),
]
CASES = [*GENERATING, *OPERATING]
