"""The check of a journal whose records are whole: a forged one, or one of another
version, must not reach the tokenizer or the engine. Called by `rollout` before it replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tlt_client.fields import MAX_INT32, MAX_SEED
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.generation.requests import SamplingFields
from tlt_server.frontend.rollouts.journal import FORMAT, Header, KeptItem
from tlt_server.grammars.forms import check_grammar
from tlt_server.wire.packed import PackedIds
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput

MAX_BIAS = 100.0
MAX_ROWS = 2**16  # draft rows of one sequence in a step
# Fields that a request and a sequence have in the same form.
SAME = [
    name
    for name in SamplingFields.__struct_fields__
    if name not in ("logit_bias", "bad_words", "structured_outputs")
]


def flaw(header: Header, outputs: Sequence[StepOutput]) -> str:
    """Return the first thing that no server would have written; empty if there is none."""
    if header.format != FORMAT:
        return f"its format is {header.format}, and this server's is {FORMAT}"
    requests = [request for item in header.items for request in item.requests]
    ids = {request.id for request in requests}
    if not header.items or not all(item.requests for item in header.items):
        return "an item has no choices"
    if len(ids) < len(requests) or len({item.id for item in header.items}) < len(header.items):
        return "two of its items or sequences have one id"
    wrong = next(filter(None, map(_wrong_item, header.items)), "")
    return wrong or next(filter(None, (_wrong_output(output, ids) for output in outputs)), "")


def _wrong_item(item: KeptItem) -> str:
    if isinstance(item.token_ids, PackedIds) and len(item.token_ids.packed) % 4:
        return "a prompt has a part of a token id"
    if not item.token_ids or not _are_ids(item.token_ids):
        return "a prompt is empty or holds what is no token id"
    return next(filter(None, map(_wrong_request, item.requests)), "")


def _wrong_request(request: GenerateRequest) -> str:
    if not 0 <= request.seed <= MAX_SEED or request.generated:
        return "a sequence has a seed or tokens that no request can have"
    sampling = request.sampling
    try:
        msgspec.convert({name: getattr(sampling, name) for name in SAME}, SamplingFields)
    except msgspec.ValidationError as error:
        return f"a sequence has a sampling that no request can have: {error}"
    return (
        ""
        if _are_ids(_named(sampling))
        and all(sampling.bad_words)
        and all(abs(bias) <= MAX_BIAS for bias in sampling.logit_bias.values())
        and _structured(sampling)
        else "a sequence has bad words, biases or a structure that no request can have"
    )


def _named(sampling: Sampling) -> list[int]:
    """Return the token ids that a sampling names in other forms than a request."""
    return [id for ids in (sampling.logit_bias, *sampling.bad_words) for id in ids]


def _structured(sampling: Sampling) -> bool:
    try:
        if sampling.structured_outputs is not None:
            check_grammar(sampling.structured_outputs)
    except InvalidRequest:
        return False
    return True


def _wrong_output(output: StepOutput, ids: Iterable[str]) -> str:
    if output.id not in ids:
        return "an output is of a sequence that the request does not have"
    if not _are_ids(output.token_ids):
        return "an output holds what is no token id"
    reports = (output.logprobs, output.raw_logprobs, output.top_logprobs)
    if any(report is not None and len(report) != len(output.token_ids) for report in reports):
        return "an output has more tokens than log-probs"
    if not 0 <= output.accepted <= output.drafted <= MAX_ROWS:
        return "an output accepts more than was drafted"
    alternatives = [*(output.top_logprobs or ()), *(output.prompt_logprobs or ())]
    if any(
        each is not None
        and (len(each.token_ids) != len(each.logprobs) or not _are_ids(each.token_ids))
        for each in alternatives
    ):
        return "an output has alternatives without log-probs"
    return ""


def _are_ids(ids: Iterable[int] | PackedIds) -> bool:
    least = min(ids, default=0)
    return least >= 0 and max(ids, default=0) <= MAX_INT32


def described(header: Header, reason: str) -> str:
    return (
        f"the journal of the rollout {header.id} is not as this server writes it: {reason}; send "
        "its request again"
    )
