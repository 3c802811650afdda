"""JSON bodies for every route: sound ones, values that hurt, and one change anywhere that makes a
sound one hostile.
"""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

VOCAB = 512  # the shipped pair's vocabulary
# Stands in sound prompts, so an answer about another field must not hold it.
SECRET = "the moon is a mirror"

Body = dict[str, Any]


class Raw(str):
    """JSON text as it is."""


def _item(rng: random.Random) -> Body:
    prompt = rng.choice(
        [
            {"prompt": f"{SECRET} {rng.randrange(99)}="},
            {"token_ids": [rng.randrange(VOCAB - 8) for _ in range(rng.randint(1, 9))]},
            {"messages": [{"role": "user", "content": SECRET}]},
        ]
    )
    return prompt | rng.choice(
        [
            {},
            {"n": 2},
            {"seed": rng.randrange(2**64)},
            {"salt": "s"},
            {"sd": False},
            {"id": "a"},
            {"group_id": "g"},
        ]
    )


def _sampling(rng: random.Random) -> Body:
    fields = {
        "max_tokens": rng.randint(0, 6),
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "stop": ["\n\n"],
        "stop_token_ids": [7],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": 3.5},
        "min_tokens": 0,
        "ignore_eos": True,
        "raw_logprobs": True,
    }
    return {
        name: fields[name]
        for name in ["max_tokens", *rng.sample(sorted(fields), rng.randint(0, 5))]
    }


def generate(rng: random.Random) -> Body:
    items = [_item(rng) | {"id": str(i)} for i in range(rng.randint(1, 3))]
    batch = rng.choice(
        [{}, {"stream": True}, {"timeout_s": 20}, {"queue_timeout_s": 20}, {"detach": True}]
    )
    return {"requests": items, "sampling": _sampling(rng)} | batch


def _openai(rng: random.Random) -> Body:
    shared = _sampling(rng)
    shared.pop("raw_logprobs", None)
    return (
        shared
        | {"n": rng.choice([1, 2])}
        | rng.choice(
            [{}, {"stream": True, "stream_options": {"include_usage": True}}, {"user": "u"}]
        )
    )


def _completions(rng: random.Random) -> Body:
    return _openai(rng) | {
        "prompt": rng.choice([SECRET, [SECRET, "2+2="], [5, 6, 7], [[5], [6, 7]]]),
        "echo": rng.random() < 0.3,
    }


def _chat(rng: random.Random) -> Body:
    return _openai(rng) | {
        "messages": [
            {"role": "user", "content": rng.choice([SECRET, [{"type": "text", "text": SECRET}]])}
        ],
        "logprobs": True,
        "tools": [],
        "chat_template_kwargs": {"enable_thinking": True},
    }


SOUND: dict[tuple[str, str], Callable[[random.Random], Body]] = {
    ("POST", "/generate"): generate,
    ("POST", "/v1/completions"): _completions,
    ("POST", "/v1/chat/completions"): _chat,
    ("POST", "/tokenize"): lambda rng: {"prompt": SECRET, "add_special_tokens": False},
    ("POST", "/detokenize"): lambda rng: {"tokens": [5, 6, VOCAB - 1]},
    ("PUT", "/strategy"): lambda rng: rng.choice(
        [{"policy": "off"}, {"policy": "beg"}, {"policy": "fixed", "strategy": "eagle:3x2x6"}]
    ),
    ("POST", "/update_weights"): lambda rng: {
        "version": "v",
        "path": rng.choice(["gone", "../..", "/etc"]),
        "tensors": [{"name": "w", "shape": [2]}],
    },
    ("POST", "/weights/rollback"): lambda rng: {"to": "v", "in_flight": "continue"},
    ("POST", "/weights/v9/commit"): lambda rng: {},
    ("POST", "/weights/v9/abort"): lambda rng: {},
    ("POST", "/weight_checker"): lambda rng: {"action": "compare", "baseline": {"w": "sha256:00"}},
}
READ = (
    *("/health", "/readyz", "/livez", "/startupz", "/metrics", "/server_info", "/openapi.json"),
    *("/v1/models", "/strategy", "/drafter", "/drafter/samples", "/drafter/files"),
    *("/drafter/files/..%2F?start=-1", "/drafter/samples?after=nan&limit=-1"),
    *("/weights", "/weight_info", "/rollouts", "/rollouts/r0", "/rollouts/r0?wait_s=nan", "/"),
)
OFTEN = (
    [("POST", "/generate")] * 6
    + [("POST", "/v1/completions")] * 4
    + [("POST", "/v1/chat/completions")] * 4
    + list(SOUND)
)


VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1),
    *(2**63, 2**64 - 1, 2**64, 10**40, -(10**40)),
    *(0.5, 1.0, -0.0, 1e-3, 1e-4, 5e-324, 1e308, -1e308),
    *("", " ", "1", "true", "null", "\0", "\ud800", "\udfff\ud800", "\uffff", "\u202e"),
    *("\U0001f680" * 40, "a" * 400, "a" * 4000, "{{ 1 + 1 }}", "{% for x in y %}"),
    *("../../etc/passwd", "%00"),
    *([], [[]], [[[[]]]], {}, {"": {}}, [None], [True], [0], [-1], [1, "a"], [VOCAB], [VOCAB - 1]),
    *([2**31], [2**70], [0.5], {"a": 1}, {"0": 0.5}, [0] * 300, ["a"] * 20),
    *({"5": 1e9}, {"-1": 1}, {"00": 1}),
    *map(Raw, "NaN Infinity -Infinity 1e999 -1e999 0x10 01 +1 .5 1. 1e -".split()),
    *map(Raw, ["1" * 4000, "1e-9999999", "--1", "tru", "undefined", "'a'", '"\\x"', '"\\ud83d"']),
    *map(Raw, ['"a', "[1,]", '{"a":}', "{,}", "/*c*/1", '"\t"']),
]
# Fields that belong to other bodies.
FOREIGN = (
    *("prompt", "token_ids", "messages", "n", "sampling", "requests", "stream", "timeout_s"),
    *("max_tokens", "text", "detach", "logprobs", "top_logprobs", "stop", "model", "weight_dir"),
    *("update_info", "best_of", "id", "prompt_logprobs"),
)


def hostile(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))  # it may be changed in its turn


def encode(value: Any, rng: random.Random) -> str:
    """JSON, except that `Raw` is left as it is and now and then a key stands there twice."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        members = [f"{json.dumps(name)}: {encode(inner, rng)}" for name, inner in value.items()]
        if members and rng.random() < 0.01:
            members.append(f"{json.dumps(rng.choice(sorted(value)))}: {encode(hostile(rng), rng)}")
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(encode(inner, rng) for inner in value) + "]"
    return json.dumps(value)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a body."""
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [(value, key) for key, _ in inner] + [
        place for _, child in inner for place in _places(child)
    ]


def spoil(body: Body, rng: random.Random) -> str:
    """One change anywhere in the body; says which."""
    places = _places(body)
    if not places:
        body["x"] = hostile(rng)
        return "unknown field"
    container, key = rng.choice(places)
    kind = rng.choice(["replace"] * 6 + ["delete", "unknown", "wrap", "rename", "other"])
    if kind == "replace":
        container[key] = hostile(rng)
    elif kind == "delete":
        del container[key]
    elif kind == "wrap":
        container[key] = rng.choice([[container[key]], {"a": container[key]}, str(container[key])])
    elif kind == "other":
        name = rng.choice(FOREIGN)
        (container if isinstance(container, dict) else body)[name] = hostile(rng)
    elif isinstance(container, dict) and kind == "rename":
        container[rng.choice([str(key) + "s", str(key).upper(), "", "\0", "__class__"])] = (
            container.pop(key)
        )
    else:
        body[rng.choice(["x", "__proto__", "tempature", "\u0130", "a" * 300])] = hostile(rng)
    return f"{kind} {str(key)[:20]}"
