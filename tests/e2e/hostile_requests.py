"""Hostile requests from a seed: request `index` of a seed is always the same bytes, sent and left
in the same way.

    python -m tests.e2e.hostile_requests SEED INDEX        # shows one

`Attempt` says what goes over the wire and what may come back; `test_hostile` sends them and judges
the answers.
"""

import random
import re
import sys
from typing import Literal, NamedTuple

from tests.e2e.hostile_bodies import (
    OFTEN,
    READ,
    SECRET,
    SOUND,
    VOCAB,
    Body,
    encode,
    generate,
    spoil,
)

MAX_N, MAX_ITEMS, MAX_OUTPUT, MAX_PROMPT, MAX_BODY_MB, MAX_HEADER_KB = 4, 8, 24, 200, 1, 8
LIMITS = (
    *("--max-n", MAX_N, "--max-batch-items", MAX_ITEMS, "--max-output-tokens", MAX_OUTPUT),
    *("--max-model-len", 256, "--max-prompt-tokens", MAX_PROMPT, "--max-queue", 256),
    *("--max-body-mb", MAX_BODY_MB, "--max-header-kb", MAX_HEADER_KB, "--max-running", 32),
    # Some attempts last until these deadlines, and so does each storm.
    *("--header-timeout-s", 4, "--body-timeout-s", 4),
)

Leaving = Literal["read", "half-close", "leave", "reset", "leave stream"]


class Attempt(NamedTuple):
    what: str
    pieces: list[bytes]  # sent one after the other, a moment apart
    leaving: Leaving = "read"
    answered: bool = True  # a reply must come; else the connection may also end without one
    slow: bool = False  # the body is late, so a 504 is right

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def short_deadline(self) -> bool:
        """Say whether the request names a timeout_s so short that it may pass."""
        return any(
            float(value) < 5
            for value in re.findall(rb'"timeout_s": ?(\d+\.?\d*(?:e[+-]?\d+)?)', self.data)
        )


def attempt(seed: int, index: int) -> Attempt:
    rng = random.Random(f"{seed}:{index}")
    make = rng.choices(
        [_fields, _json, _limits, _framing, _paths, _connections], weights=[30, 22, 14, 14, 12, 8]
    )[0]
    return make(rng)


def _fields(rng: random.Random) -> Attempt:
    route = rng.choice(OFTEN)
    body = SOUND[route](rng)
    what = [spoil(body, rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    return Attempt(
        f"fields: {', '.join(what)}",
        [_request(*route, encode(body, rng).encode("utf-8", "surrogatepass"), rng)],
    )


def _json(rng: random.Random) -> Attempt:
    """Bytes that are nearly JSON, or JSON of a shape that hurts."""
    route = rng.choice(OFTEN)
    text = encode(SOUND[route](rng), rng).encode()
    at = rng.randrange(len(text) + 1)
    depth = rng.choice([50, 150, 300, 1000, 20_000])
    changed = rng.choice(
        [
            lambda: text[:at],
            lambda: text[at:],
            lambda: text[:at] + rng.randbytes(rng.randint(1, 4)) + text[at:],
            lambda: text[:at] + text[at + 1 :],
            lambda: text + rng.choice([b"x", b"{}", b"\0", b",", text]),
            lambda: b"\xef\xbb\xbf" + text,
            lambda: text.decode().encode("utf-16"),
            lambda: text.decode().encode("utf-32"),
            lambda: text.replace(b'"', b"'"),
            lambda: text.replace(b":", b"=", 1),
            lambda: text.replace(b"}", b"]", 1),
            lambda: b"[" * depth,
            lambda: b"[" * depth + b"]" * depth,
            lambda: b'{"requests":' * depth + b"1" + b"}" * depth,
            lambda: b'{"prompt":' + b"[" * depth + b"]" * depth + b"}",
            lambda: b"",
            lambda: b" " * 5000,
            lambda: b"null",
            lambda: b'"a"',
            lambda: b"[]",
            lambda: b"1" * 5000,
            lambda: rng.randbytes(rng.randint(1, 200)),
            lambda: text.replace(b"1", b"\xc0\x80"),
            lambda: b"--boundary\r\n\r\n" + text,
            lambda: b"a=1&b=2",
            lambda: text[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}",
            lambda: b'{"requests": [' + b'{"prompt": "a"},' * 300 + b'{"prompt": "a"}]}',
            lambda: text.replace(b"e", b"\\u0065"),
        ]
    )()
    return Attempt("json", [_request(*route, changed, rng)])


def _limits(rng: random.Random) -> Attempt:
    """Values at a limit, one below and one above."""
    by = rng.choice([-1, 0, 1])
    item: Body = {"prompt": f"{SECRET}="}
    sampling: Body = {"max_tokens": 2}
    body: Body = {"requests": [item], "sampling": sampling}
    field = rng.choice(
        [
            lambda: item.update(n=MAX_N + by),
            lambda: sampling.update(max_tokens=MAX_OUTPUT + by),
            lambda: sampling.update(max_tokens=by),
            lambda: item.update(seed=2**64 - 1 + by),
            lambda: sampling.update(temperature=100 + by),
            lambda: sampling.update(temperature=1e-3 * (1 + by / 2)),
            lambda: sampling.update(top_k=2**31 - 1 + by),
            lambda: sampling.update(top_k=VOCAB + by),
            lambda: sampling.update(top_p=rng.choice([0, 5e-324, 1, 1.0000001])),
            lambda: sampling.update(stop=["ab"] * 1 + [str(i) for i in range(15 + by)]),
            lambda: sampling.update(stop="x" * (256 + by)),
            lambda: sampling.update(stop_token_ids=[VOCAB - 1 + by]),
            lambda: sampling.update(stop_token_ids=list(range(64 + by))),
            lambda: sampling.update(logprobs=20 + by),
            lambda: sampling.update(prompt_logprobs=rng.choice([20 + by, -1, -2])),
            lambda: sampling.update(logit_bias={str(VOCAB - 1 + by): 100}),
            lambda: sampling.update(logit_bias={"3": 100 + by}),
            lambda: sampling.update(logit_bias={str(i): -100 for i in range(VOCAB)}),
            lambda: sampling.update(min_tokens=2 + by),
            lambda: sampling.update(repetition_penalty=rng.choice([0.01, 0.009, 100, 101])),
            lambda: sampling.update(presence_penalty=2 + by),
            lambda: sampling.update(min_p=1 + by),
            lambda: body.update(requests=[{"prompt": "a"}] * (MAX_ITEMS + by)),
            lambda: body.update(requests=[{"token_ids": [VOCAB - 1 + by]}]),
            lambda: body.update(requests=[{"token_ids": [5] * (MAX_PROMPT + by)}]),
            lambda: body.update(timeout_s=rng.choice([86400 + by, 5e-324, 0.001, 0.05, 0])),
            lambda: item.update(id="i" * (256 + by)),
            lambda: item.update(salt="i" * (256 + by)),
            lambda: item.update(group_id="i" * (256 + by)),
            lambda: item.update(token_ids=[1]),
            lambda: body.update(requests=[{"token_ids": []}]),
            lambda: body.update(requests=[{"messages": []}]),
            lambda: body.update(requests=[]),
            lambda: body.update(requests=[item, item | {"id": "0"}, item | {"id": "0"}]),
            lambda: item.update(prompt="\u20ac" * (400 + by)),
            lambda: item.update(prompt=""),
            lambda: item.update(prompt="a" * 2**17),
            lambda: body.update(requests=[{"token_ids": [5] * 90_000}]),
        ]
    )
    field()
    return Attempt("limits", [_request("POST", "/generate", encode(body, rng).encode(), rng)])


def _paths(rng: random.Random) -> Attempt:
    """Every method on every route, and paths that are none."""
    path = rng.choice([*READ, *(path for _, path in SOUND)])
    twisted = rng.choice(
        [
            *(path, path, path, path + "/", "/" + path, path.upper()),
            *(path.replace("/", "/%2e%2e/", 1), path.replace("/", "%2f"), path + "?" + "a=1&" * 50),
            *(path + "?stream=true#x", path + "%00", path + "%", path + "%zz", path + "%ff"),
            *(path + "/../../etc/passwd", "/..%5c..%5cetc", "/weights//commit"),
            *("/weights/" + "%F0%9F%9A%80" * 20 + "/commit", "/weights/%2e%2e/abort"),
            *("/weights/a%2fb/commit", "/weights/" + "v" * 3000 + "/commit", "*", "", "//"),
            *("http://localhost" + path, "http://evil.example" + path, "/" + "a" * 7000),
            *("/caf\u00e9", path + ";x=1", path.replace("e", "%65", 1), "/\\", "/."),
        ]
    )
    usual = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
    method = rng.choice([*usual, "TRACE", "CONNECT", "PROPFIND", "get", "X" * 30, "BREW"])
    body = rng.choice([b"", b"{}", b"[]", b"x"]) if rng.random() < 0.5 else b""
    plain = method in usual and twisted.startswith("/") and twisted.isascii()
    return Attempt(f"paths: {method}", [_request(method, twisted, body, rng)], answered=plain)


def _framing(rng: random.Random) -> Attempt:
    """Make HTTP that is wrong, old or odd. What is not a request may also end the connection."""
    text = encode(generate(rng) | {"stream": False}, rng).encode()
    size = len(text)
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    length = b"Content-Length: %d\r\n" % size
    rest = length + b"\r\n" + text  # ends the head, after further headers
    chunk = b"%x\r\n%s\r\n" % (size, text)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    garbage = rng.randbytes(rng.randint(1, 60))
    lengths = (b" -5", b" 1e3", b" " + b"9" * 30, b" 0x10", b"", b" 5, 5", b" 5 5", b" +5")
    sizes = (b"zz\r\n", b"-1\r\n", b"fffffffffffffffff\r\n", b"5\r\nabc\r\n", b"\r\n")
    versions = (b"1.0", b"0.9", b"2.0", b"1.10", b"9.9", b"x")
    hosts = (b"Host: ", b"Host: evil.example", b"Host: localhost\r\nHost: evil", b"X: y")
    hosts += (b"Host: [::1", b"Host: \xff")
    origins = (b"null", b"http://evil.example", b"http://[", b"\xff")
    upgrade = b"close, Upgrade\r\nUpgrade: websocket"
    unread = b"Authorization: Bearer \xff\xfe\r\nContent-Type: \xff\r\nAccept: \0\r\n"
    data = rng.choice(
        [
            lambda: head + b"Content-Length:" + rng.choice(lengths) + b"\r\n\r\n" + text,
            lambda: head + length + b"Content-Length: 3\r\n\r\n" + text,
            lambda: head + b"Content-Length: %d\r\n\r\n" % (size - 3) + text,
            lambda: head + b"Content-Length: %d\r\n\r\n" % (2**20 + 1) + text,
            lambda: head + b"Content-Length: %d\r\n\r\n" % 2**62 + text,
            lambda: chunked + chunk + b"0\r\n\r\n",
            lambda: chunked + chunk.replace(b"\r\n", b";ext=1\r\n", 1) + b"0\r\nTrailer: x\r\n\r\n",
            lambda: chunked + rng.choice(sizes) + garbage,
            lambda: head + b"Transfer-Encoding: chunked\r\n" + rest,
            lambda: head + b"Transfer-Encoding: gzip\r\n\r\n" + garbage,
            lambda: head + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + chunk + b"0\r\n\r\n",
            lambda: head + b"Content-Encoding: gzip\r\n" + rest,
            lambda: head.replace(b"1.1", rng.choice(versions)) + rest,
            lambda: b"POST /generate\r\n\r\n",
            lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            lambda: b"\x16\x03\x01\x02\x00" + garbage,
            lambda: garbage,
            lambda: b"\r\n" * 40,
            lambda: (head + rest).replace(b"\r\n", b"\n"),
            lambda: head + b" folded: a\r\n" + rest,
            lambda: head + garbage + b"\r\n" + rest,
            lambda: head + b"X: " + garbage.replace(b"\n", b"") + b"\r\n" + rest,
            lambda: head + b"X-Long: " + b"a" * rng.choice([1000, 9000, 60_000]) + b"\r\n" + rest,
            lambda: (
                head + b"".join(b"X-%d: 1\r\n" % i for i in range(rng.choice([50, 400]))) + rest
            ),
            lambda: head + b": empty\r\n" + rest,
            lambda: head + b"X y: 1\r\n" + rest,
            lambda: head.replace(b"Host: localhost", rng.choice(hosts)) + rest,
            lambda: head + b"Origin: " + rng.choice(origins) + b"\r\n" + rest,
            lambda: head + b"Expect: 100-continue\r\n" + rest,
            lambda: head.replace(b"close", upgrade) + rest,
            lambda: head + unread + rest,
        ]
    )()
    return Attempt(
        "framing", [data], leaving="half-close" if rng.random() < 0.3 else "read", answered=False
    )


def _connections(rng: random.Random) -> Attempt:
    """Clients that stop, leave, trickle, pipeline or do not read."""
    route = rng.choice(
        [("POST", "/generate"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")]
    )
    body = SOUND[route](rng)
    body["stream"] = stream = rng.random() < 0.6
    whole = _request(*route, encode(body, rng).encode(), rng)
    at = rng.randrange(1, len(whole))
    leaving: Leaving = rng.choice(["leave", "reset"])
    third = len(whole) // 3 + 1
    probe = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def cut(what: str, sent: bytes, leaving: Leaving = leaving, *, slow: bool = False) -> Attempt:
        return Attempt(what, [sent], leaving, answered=False, slow=slow)

    return rng.choice(
        [
            lambda: cut("leave in the middle of a request", whole[:at]),
            lambda: cut("leave before the reply", whole),
            lambda: cut("half-close after a request", whole, "half-close"),
            lambda: cut("half-close in the middle of a request", whole[:at], "half-close"),
            lambda: cut("leave in a stream", whole, "leave stream" if stream else leaving),
            lambda: Attempt(
                "in pieces", [whole[i : i + third] for i in range(0, len(whole), third)]
            ),
            lambda: Attempt("pipelined", [whole + rng.choice([whole, probe, b"\0garbage" * 200])]),
            lambda: cut("nothing", b""),
            lambda: (
                cut("a body that never comes", whole[:-1], "read", slow=True)
                if rng.random() < 0.1
                else cut("leave in the middle of a request", whole[:at])
            ),
        ]
    )()


def _request(method: str, target: str, body: bytes, rng: random.Random) -> bytes:
    kind = rng.choice(
        ["application/json"] * 6
        + ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "a" * 200]
    )
    length = f"Content-Length: {len(body)}\r\n" if body or method in ("POST", "PUT") else ""
    named = rng.choice(["k1", "k2", "a b", "k" * 300, "", "caf\u00e9"])
    key = f"Idempotency-Key: {named}\r\n" if rng.random() < 0.05 else ""
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: {kind}\r\n{key}{length}\r\n"
    )
    return head.encode() + body


if __name__ == "__main__":
    shown = attempt(int(sys.argv[1]), int(sys.argv[2]))
    print(shown.what, shown.leaving)
    for piece in shown.pieces:
        print(piece)
