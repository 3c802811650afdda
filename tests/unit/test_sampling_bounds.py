"""The sampler computes everything that the API accepts: no value at a bound overflows a field of
the packed parameters.
"""

from __future__ import annotations

import json
import math
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
import torch
from msgspec import UNSET

from tlt_client.fields import MAX_SEED
from tlt_server.engine.sampling.sampler import SamplingState, sample
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.openai.requests import ChatRequest, CompletionRequest
from tlt_server.frontend.generation.requests import SamplingFields
from tlt_server.frontend.http.counting import Bounds
from tlt_server.frontend.http.parsing import parse
from tlt_server.wire.records import GenerateRequest, Sampling

VOCAB = 11
BOUNDS = Bounds(8, 100, 101, 4, 4, 8)


def bounds(struct: type[msgspec.Struct]) -> list[tuple[str, float]]:
    """Each numeric field with its least and its greatest value, as the JSON schema states them."""
    found = []
    _, components = msgspec.json.schema_components([struct])
    for name, schema in components[struct.__name__]["properties"].items():
        for shape in schema.get("anyOf", [schema]):
            whole = shape.get("type") == "integer"
            if not whole and shape.get("type") != "number":
                continue
            found += [
                (name, value)
                for value in (
                    shape.get("minimum"),
                    shape.get("maximum"),
                    math.nextafter(shape["exclusiveMinimum"], math.inf)
                    if "exclusiveMinimum" in shape
                    else None,
                )
                if value is not None
            ]
    return found


def draw(sampling: Sampling) -> int:
    logits_SV = torch.linspace(-3, 3, VOCAB)[None]
    request = GenerateRequest(id="a", token_ids=[1, 2], sampling=sampling, seed=MAX_SEED)
    state = SamplingState(request, VOCAB, [VOCAB - 1])
    sampled = sample(
        logits_SV,
        [state],
        np.zeros(1, np.int64),
        np.full(1, 2, np.int64),
        np.full((1, 1), -1, np.int32),
    )
    state.commit([int(sampled.token_S[0])])
    assert not np.isnan(sampled.logprob_S).any()
    return int(sampled.token_S[0])


def test_every_sampling_number_has_both_bounds() -> None:
    hints = get_type_hints(Sampling)
    numbers = [name for name, hint in hints.items() if hint in (int, float, int | None)]
    assert {"temperature", "top_k", "prompt_logprobs"} <= {*numbers}
    assert sorted(name for name, _ in bounds(SamplingFields)) == sorted(numbers * 2)


@pytest.mark.parametrize(("name", "value"), bounds(SamplingFields))
def test_sampler_accepts_values_at_every_bound(name: str, value: float) -> None:
    given = parse(SamplingFields, json.dumps({name: value}).encode(), BOUNDS)
    assert 0 <= draw(Sampling(**{name: getattr(given, name)})) < VOCAB


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_sampler_accepts_the_largest_biases(bias: float) -> None:
    sampling = Sampling(logit_bias={0: bias, VOCAB - 1: bias})
    assert 0 <= draw(sampling) < VOCAB


@pytest.mark.parametrize(
    "name", ["top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"]
)
def test_values_beyond_int32_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is 2147483648"):
        parse(SamplingFields, json.dumps({name: 2**31}).encode(), BOUNDS)


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_openai_takes_top_k_up_to_int32(model: Any) -> None:
    prompt: dict[str, Any] = (
        {"prompt": "a"}
        if model is CompletionRequest
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    for top_k in (-1, 0, 100_000_000, 2**31 - 1):
        body = json.dumps(prompt | {"top_k": top_k}).encode()
        native = parse(model, body, BOUNDS).native(["a"], UNSET, "")
        assert native.sampling.top_k == max(0, top_k)
    with pytest.raises(InvalidRequest, match="top_k is 2147483648"):
        parse(model, json.dumps(prompt | {"top_k": 2**31}).encode(), BOUNDS)
