"""A sequence that an engine had begun goes on in another one: cut anywhere, the rest has the same
tokens and the same bits.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.engine.pushing import cpu_settings
from tests.engine.test_engine import Said, bits, requests, run
from tests.engine.tiny import EOS, VOCAB, write_eagle, write_target
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.wire.commands import Submit
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput, Strategy

STRATEGIES = {
    "off": Strategy(),
    "eagle": Strategy("eagle", 4, 3, 9),
    "history": Strategy("history", 5, 2, 8),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    root = tmp_path_factory.mktemp("tiny")
    return cpu_settings(write_target(root / "target"), write_eagle(root / "drafter"))


def drawn(i: int) -> GenerateRequest:
    """Return a request of any kind."""
    draw = np.random.default_rng(900 + i)
    chance = lambda value, otherwise: value if draw.random() < 0.5 else otherwise  # noqa: E731
    sampling = Sampling(
        max_tokens=int(draw.integers(1, 40)),
        temperature=chance(float(draw.uniform(0.3, 1.5)), 0.0),
        top_k=chance(12, 0),
        top_p=chance(0.9, 1.0),
        min_p=chance(0.02, 0.0),
        min_tokens=0,
        repetition_penalty=chance(1.4, 1.0),
        presence_penalty=chance(0.5, 0.0),
        frequency_penalty=chance(0.3, 0.0),
        logprobs=chance(3, 0),
        raw_logprobs=chance(True, False),
        prompt_logprobs=chance(1, None),
        stop_token_ids=tuple(draw.integers(0, VOCAB, chance(6, 0)).tolist()),
        ignore_eos=chance(True, False),
    )
    sampling = msgspec.structs.replace(sampling, min_tokens=chance(sampling.max_tokens // 2, 0))
    prompt = draw.integers(0, VOCAB - 1, int(draw.integers(1, 50))).tolist()
    return GenerateRequest(
        id=f"d{i}",
        token_ids=prompt,
        sampling=sampling,
        seed=int(draw.integers(0, 2**63)),
        group_id=f"g{i % 4}",
    )


def cut(request: GenerateRequest, outputs: list[StepOutput], k: int) -> GenerateRequest:
    tokens = [token for output in outputs for token in output.token_ids]
    return msgspec.structs.replace(request, id=f"{request.id}@{k}", generated=tokens[:k])


@pytest.fixture(scope="module")
def whole(base: EngineSettings) -> tuple[list[GenerateRequest], Said]:
    asked = [*requests(6), *(drawn(i) for i in range(10))]
    return asked, run(base, asked)[0]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("memory", ["ample", pytest.param("scarce", marks=pytest.mark.long)])
def test_request_resumed_at_any_token_has_the_same_bits(
    name: str, memory: str, base: EngineSettings, whole: tuple[list[GenerateRequest], Said]
) -> None:
    asked, said = whole
    policy = {"policy": "fixed", "sd_strategy": STRATEGIES[name].name} if name != "off" else {}
    settings = replace(
        base, **policy, **({"pages": 12, "max_rows": 7} if memory == "scarce" else {})
    )
    parts = {}
    for request in asked:
        length = sum(len(output.token_ids) for output in said[request.id])
        parts |= {(request.id, k): cut(request, said[request.id], k) for k in range(length)}
    rest, counts = run(settings, list(parts.values()))
    rest_bits, whole_bits = bits(rest), bits(said)
    for (id, k), part in parts.items():
        tokens, logprobs, raw, top, prompt_logprobs, reason = whole_bits[id]
        assert isinstance(tokens, list)
        assert isinstance(logprobs, bytes)
        assert isinstance(raw, bytes)
        assert isinstance(top, list)
        expected = (
            tokens[k:],
            logprobs[4 * k :],
            raw[4 * k :],
            top[k:],
            prompt_logprobs if k == 0 else [],
            reason,
        )
        assert rest_bits[part.id] == expected, part.id
    assert counts["pages_free"] == counts["pages"] and counts["running"] == 0, "pages leak"
    assert memory == "ample" or counts["preemptions"] > 0


@pytest.mark.parametrize(
    ("sampling", "generated", "says"),
    [
        (Sampling(max_tokens=3), [1, 2, 3], "generated has 3 tokens and max_tokens is 3"),
        (Sampling(), [1, EOS], f"the stop token {EOS}"),
        (Sampling(stop_token_ids=(5,)), [5, 1], "the stop token 5"),
        (Sampling(ignore_eos=True), [VOCAB], f"ids of this model end at {VOCAB - 1}"),
    ],
)
def test_batch_with_an_unresumable_request_gets_a_typed_error(
    base: EngineSettings, sampling: Sampling, generated: list[int], says: str
) -> None:
    engine, _ = assemble(base)
    good = requests(1)[0]
    engine.send(
        Submit(
            [good, msgspec.structs.replace(good, id="bad", sampling=sampling, generated=generated)]
        )
    )
    ended = engine.step()
    assert [(o.id, o.error and o.error[0]) for o in ended] == [
        ("r0", "invalid_request"),
        ("bad", "invalid_request"),
    ]
    assert ended[0].error is not None and says in ended[0].error[1] and engine.idle
