"""Many finished sequences as arrays: responses, and the drafts that each of their cycles verified.

A response is fixed by weights, prompt and seed, and does not depend on drafts. A cycle verified
`rows` rows of a response (its root and the draft tree), `accepted` of which follow the root on the
response's own path; accepted drafts after the response's end do not count. So `accepted` is the
longest drafted path that the response follows.

Legend: N responses, T tokens, S spans of one weight version, V verifications, B roots, D depths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

from tlt_kernels.filters import FILTERS, Filters
from tlt_server.samples.columns import expect, same_length, within
from tlt_server.wire.records import GenerateRequest, Sampling, Strategy


class Legend(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The names for the indices in a `SampleSet`, and the model of its tokens."""

    vocab_size: int
    model: str = ""  # identity of the target without its weights, see `identity.py`
    template: str = ""  # identity of its chat template
    versions: tuple[str, ...]  # target weights
    end_reasons: tuple[str, ...]
    strategies: tuple[Strategy, ...]
    calibrations: tuple[str, ...] = ("",)  # versions of the drafters' calibration tables


def filters_of(sampled: Iterable[object]) -> NDArray[np.void]:
    """Return the filters of records that have fields of their names."""
    return np.array([astuple(Filters.of(each)) for each in sampled], Filters.columns(np.float32))


@dataclass(frozen=True)
class Responses:
    """Sequences and their sampling parameters."""

    token_T: NDArray[np.int32]  # prompts with outputs
    start_N: NDArray[np.int64]  # first token
    prompt_len_N: NDArray[np.int32]
    group_N: NDArray[np.int32]  # siblings have the same: one prompt, several seeds
    seed_N: NDArray[np.uint64]
    temperature_N: NDArray[np.float32]
    filters_N: NDArray[np.void]
    max_tokens_N: NDArray[np.int32]
    end_N: NDArray[np.uint8]  # index into `end_reasons`
    # Spans of output tokens that one weight version computed.
    span_request_S: NDArray[np.int32]
    span_start_S: NDArray[np.int32]  # first output token
    span_version_S: NDArray[np.int32]  # index into `versions`

    def __len__(self) -> int:
        return len(self.prompt_len_N)

    @property
    def output_len_N(self) -> NDArray[np.int64]:
        end_N = np.append(self.start_N[1:], len(self.token_T))
        return end_N - self.start_N - self.prompt_len_N

    @property
    def position_N(self) -> NDArray[np.int64]:
        """Return the index of each request's first output token among those of all requests."""
        return np.cumsum(self.output_len_N) - self.output_len_N

    def tokens(self, n: int) -> NDArray[np.int32]:
        """Return prompt and output of a request; a view."""
        end = self.start_N[n + 1] if n + 1 < len(self) else len(self.token_T)
        return self.token_T[self.start_N[n] : end]

    def after(
        self, n_B: NDArray[np.int64], position_B: NDArray[np.int64], count: int
    ) -> NDArray[np.int32]:
        """Return the next `count` tokens of each request after a position, [B, count], padded with
        -1.
        """
        place_BD = position_B[:, None] + 1 + np.arange(count)
        length_B = (self.prompt_len_N + self.output_len_N)[n_B]
        inside_BD = place_BD < length_B[:, None]
        at_BD = np.where(inside_BD, self.start_N[n_B][:, None] + place_BD, 0)
        return np.where(inside_BD, self.token_T[at_BD], np.int32(-1))

    def request(self, n: int) -> GenerateRequest:
        """Return the request in its submitted form."""
        sampling = Sampling(
            temperature=float(self.temperature_N[n]),
            max_tokens=int(self.max_tokens_N[n]),
            **{name: self.filters_N[name][n].item() for name in FILTERS},
        )
        return GenerateRequest(
            id=str(n),
            token_ids=self.tokens(n)[: self.prompt_len_N[n]].tolist(),
            sampling=sampling,
            seed=int(self.seed_N[n]),
            group_id=str(self.group_N[n]),
        )

    def check(self, legend: Legend) -> None:
        """Raise `ValueError` unless the arrays match each other and the legend."""
        expect("responses", same_length(self, "_N"))
        expect("spans", same_length(self, "_S"))
        starts_N = self.start_N
        if len(self):
            expect("responses.start_N", starts_N[0] == 0 and bool((np.diff(starts_N) > 0).all()))
        expect("responses.prompt_len_N", bool((self.prompt_len_N > 0).all()))
        expect("outputs", bool((self.output_len_N <= self.max_tokens_N).all()))
        expect("outputs", bool((self.output_len_N >= 0).all()))
        within("responses.token_T", self.token_T, legend.vocab_size)
        within("responses.end_N", self.end_N, len(legend.end_reasons))
        within("responses.span_request_S", self.span_request_S, len(self))
        within("responses.span_version_S", self.span_version_S, len(legend.versions))
        outputs_S = self.output_len_N[self.span_request_S]
        within("responses.span_start_S", self.span_start_S, int(outputs_S.max(initial=0)) + 1)
        expect("responses.span_start_S", bool((self.span_start_S < outputs_S).all()))
        fractions = [name for name, value in FILTERS.items() if isinstance(value, float)]
        for values in (self.temperature_N, *(self.filters_N[name] for name in fractions)):
            expect("sampling", bool(np.isfinite(values).all() and (values >= 0).all()))


@dataclass(frozen=True)
class Verifications:
    """Verifications of one request in one cycle each; those of a request are in cycle order."""

    request_V: NDArray[np.int32]
    root_V: NDArray[np.int32]  # position of the root in prompt and output
    rows_V: NDArray[np.uint16]  # with the root; 1: nothing was drafted
    accepted_V: NDArray[np.uint8]  # drafts after the root that the response has too
    # The drafter's own part of both, without branches that history added: 0 rows: not known.
    own_rows_V: NDArray[np.uint16]  # with the root
    own_accepted_V: NDArray[np.uint8]
    strategy_V: NDArray[np.uint16]  # index into `strategies`; no deeper than the request permits
    calibration_V: NDArray[np.uint16]  # index into `calibrations`

    def __len__(self) -> int:
        return len(self.request_V)

    def check(self, legend: Legend, responses: Responses) -> None:
        """Raise `ValueError` unless the arrays match each other, the legend and the responses."""
        expect("verifications", same_length(self, "_V"))
        within("verifications.request_V", self.request_V, len(responses))
        within("verifications.strategy_V", self.strategy_V, len(legend.strategies))
        within("verifications.calibration_V", self.calibration_V, len(legend.calibrations))
        length_N = responses.prompt_len_N + responses.output_len_N
        last_V = self.root_V.astype(np.int64) + self.accepted_V
        expect("verifications.root_V", bool((self.root_V >= 0).all()))
        # The root gives at least one token more.
        output_V = self.root_V + 1 >= responses.prompt_len_N[self.request_V]
        inside_V = (self.root_V + 1 < length_N[self.request_V]) & output_V
        expect("verifications.root_V", bool(inside_V.all()))
        expect("verifications.accepted_V", bool((last_V < length_N[self.request_V]).all()))
        expect("verifications.accepted_V", bool((self.accepted_V < self.rows_V).all()))
        expect("verifications.own_rows_V", bool((self.own_rows_V <= self.rows_V).all()))
        own_accepted_V = np.minimum(self.accepted_V, np.maximum(self.own_rows_V, 1) - 1)
        expect("verifications.own_accepted_V", bool((self.own_accepted_V <= own_accepted_V).all()))


@dataclass(frozen=True)
class SampleSet:
    legend: Legend
    responses: Responses
    verified: Verifications

    def __len__(self) -> int:
        return len(self.responses)

    def check(self) -> None:
        """Raise `ValueError` unless all parts match."""
        self.responses.check(self.legend)
        self.verified.check(self.legend, self.responses)
