"""The check of a journal whose records are whole: a forged one, or one of another
version, must not reach the tokenizer or the engine. Called by `rollout` before it replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.rollouts.journal import Header, KeptItem
from tlt_server.grammars.forms import check_grammar
from tlt_server.packed import PackedIds
from tlt_server.records import MAX_SEED, GenerateRequest, Sampling, StepOutput

MAX_ID = 2**31 - 1
MAX_ROWS = 2**16  # draft rows of one sequence in a step
# Sampling field -> its least and greatest value.
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e6),
    "top_k": (0, MAX_ID),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "max_tokens": (0, MAX_ID),
    "min_tokens": (0, MAX_ID),
    "repetition_penalty": (0, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "logprobs": (0, MAX_ID),
}


def flaw(header: Header, outputs: Sequence[StepOutput]) -> str:
    """Return the first thing that no server would have written; empty if there is none."""
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
    for name, (least, greatest) in BOUNDS.items():
        if not least <= getattr(sampling, name) <= greatest:  # also where it is no number
            return f"a sequence has the sampling value {name} {getattr(sampling, name)!r}"
    return (
        ""
        if _are_ids(_named(sampling))
        and all(sampling.bad_words)
        and _reports(sampling)
        and _structured(sampling)
        else "a sequence has stop tokens, biases, a structure or prompt_logprobs that no request "
        "can have"
    )


def _named(sampling: Sampling) -> list[int]:
    """Return the token ids that a sampling names."""
    lists = (sampling.stop_token_ids, sampling.logit_bias, sampling.allowed_token_ids)
    return [id for ids in (*lists, *sampling.bad_words) for id in ids]


def _structured(sampling: Sampling) -> bool:
    try:
        if sampling.structured_outputs is not None:
            check_grammar(sampling.structured_outputs)
    except InvalidRequest:
        return False
    return True


def _reports(sampling: Sampling) -> bool:
    asked = sampling.prompt_logprobs
    return (asked is None or -1 <= asked <= MAX_ID) and all(
        abs(bias) <= 1e6 for bias in sampling.logit_bias.values()
    )


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
    return least >= 0 and max(ids, default=0) <= MAX_ID


def described(header: Header, reason: str) -> str:
    return (
        f"the journal of the rollout {header.id} is not as this server writes it: {reason}; send "
        "its request again"
    )
