"""One finished sequence as bytes: the engine's output, and the content of segment files.

In addition to the token ids a sequence takes 6 bytes for each of its cycles, each of which produced
at least one token, and about 120 bytes in all. Roots follow from the accepted counts; `gaps`
records further tokens between two cycles, as when a preempted sequence reads its text again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Meta, Struct
from numpy.typing import DTypeLike, NDArray

from tlt_server.samples.identity import Identity
from tlt_server.samples.samples import Legend, Responses, SampleSet, Verifications, filters_of
from tlt_server.wire.records import Strategy

MAX_TOKENS = 2**24  # prompt and output
MAX_NAME = 1024  # characters of a group, a version, an owner
UNKNOWN = 255  # branches that were not counted
FIELDS = 6  # numbers of a cycle in a `Trace`: root, rows, own rows, accepted, own accepted, how

T = TypeVar("T", bound=Hashable)
Number = TypeVar("Number", bound=np.generic)
EndReason = Literal["stop", "length", "abort"]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class HowDrafted(Struct, frozen=True, array_like=True):
    """A cycle's draft shape for a sequence, with the version of the drafter's table."""

    strategy: Strategy
    calibration: Name


class Sample(Struct, frozen=True, array_like=True, kw_only=True, dict=True):
    tokens: bytes  # int32, prompt and output
    prompt_len: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    group: Name
    owner: Name
    seed: Annotated[int, Meta(ge=0)]
    temperature: Annotated[float, Meta(ge=0)]
    top_p: Annotated[float, Meta(ge=0)]
    min_p: Annotated[float, Meta(ge=0)]
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    max_tokens: Count
    end: EndReason
    # First output token of each, and its weight version. Another engine, under versions that are
    # not known, computed the tokens before the first span.
    spans: list[tuple[Count, Name]]
    first_root: Count
    gaps: list[tuple[Count, Count]]  # cycle, and tokens between it and the next root
    drafted: Annotated[list[HowDrafted], Meta(max_length=256)]
    rows: bytes  # uint16 per cycle, with the root
    branches: bytes  # uint8 per cycle: rows that history added, or UNKNOWN
    accepted: bytes  # uint8 per cycle
    own_accepted: bytes  # uint8 per cycle
    how: bytes  # uint8 per cycle: index into `drafted`

    @cached_property
    def token_T(self) -> NDArray[np.int32]:
        return np.frombuffer(self.tokens, np.dtype("<i4"))

    @property
    def output_len(self) -> int:
        return len(self.tokens) // 4 - self.prompt_len

    @property
    def recorded_from(self) -> int:
        """Position of the first token that was recorded, in prompt and output."""
        return self.prompt_len + self.spans[0][0]

    @property
    def cycles(self) -> int:
        return len(self.accepted)

    @property
    def version(self) -> str:
        """The weight version that computed its last token."""
        return self.spans[-1][1]

    @cached_property
    def prompt_key(self) -> int:
        """A hash of the prompt's tokens, the same for all siblings."""
        return xxhash.xxh3_64_intdigest(self.tokens[: 4 * self.prompt_len])

    @cached_property
    def failures(self) -> int:
        """Cycles whose accepted path ended before the tree did."""
        rows_C = np.frombuffer(self.rows, np.dtype("<u2"))
        depth = [each.strategy.depth for each in self.drafted]
        depth_C = np.array(depth or [0])[np.frombuffer(self.how, np.uint8)]
        return int(np.count_nonzero((rows_C > 1) & (self._accepted_C < depth_C)))

    @property
    def _accepted_C(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.accepted, np.uint8)

    @cached_property
    def root_C(self) -> NDArray[np.int64]:
        """Position of each cycle's root."""
        step_C = self._accepted_C.astype(np.int64) + 1
        for cycle, extra in self.gaps:
            step_C[cycle] += extra
        return self.first_root + np.cumsum(step_C) - step_C

    def check(self, vocab_size: int) -> None:
        """Raise `ValueError` with both values unless all fields are consistent."""
        if len(self.tokens) % 4 or len(self.tokens) > 4 * MAX_TOKENS:
            raise ValueError(f"tokens has {len(self.tokens)} bytes, at most {4 * MAX_TOKENS}")
        if not 1 <= self.output_len <= self.max_tokens:
            raise ValueError(
                f"the output has {self.output_len} tokens, max_tokens is {self.max_tokens}"
            )
        for name, size in (("rows", 2), ("branches", 1), ("own_accepted", 1), ("how", 1)):
            if len(getattr(self, name)) != size * self.cycles:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} bytes for {self.cycles} cycles"
                )
        firsts = [first for first, _ in self.spans]
        if not firsts or firsts != sorted(set(firsts)):
            raise ValueError(f"version spans begin at {firsts[:8]}; they must be ascending")
        beyond = [cycle for cycle, _ in self.gaps if cycle >= self.cycles]
        if beyond:
            raise ValueError(f"a gap is after cycle {beyond[0]} of {self.cycles}")
        if self.cycles and self.first_root + 1 < self.recorded_from:
            raise ValueError(
                f"the first root is at {self.first_root}, before {self.recorded_from}, where the "
                "record begins"
            )
        if self.cycles and int(self.root_C[-1]) >= len(self.tokens) // 4:
            raise ValueError(
                f"the last root is at {int(self.root_C[-1])} of {len(self.tokens) // 4} tokens"
            )
        worst = max(self.how, default=0)
        if self.cycles and worst >= len(self.drafted):
            raise ValueError(f"a cycle has strategy {worst} of {len(self.drafted)}")
        greatest, least = int(self.token_T.max()), int(self.token_T.min())
        if not 0 <= least <= greatest < vocab_size:
            raise ValueError(
                f"a token id is {least if least < 0 else greatest}, the vocabulary has {vocab_size}"
            )
        sample_set([self], Identity("", ""), vocab_size).check()


def encode_sample(sample: Sample) -> bytes:
    return msgspec.msgpack.encode(sample)


_SAMPLES = msgspec.msgpack.Decoder(Sample)


def decode_sample(data: bytes) -> Sample:
    """Parse a sequence; `ValueError` if the bytes are malformed."""
    try:
        return _SAMPLES.decode(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def cycles_of(noted: Sequence[int], drafted: Sequence[HowDrafted]) -> dict[str, Any]:
    """Return the fields of a sample's cycles. noted: FIELDS numbers per cycle, with own rows 0 if
    unknown; `how` is an index into `drafted`. `ValueError` for values out of range: the sequence is
    then not recorded.
    """
    noted_CF = np.array(noted, np.int64).reshape(-1, FIELDS)
    root_C, rows_C, own_C, accepted_C, own_accepted_C, how_C = noted_CF.T
    used, local_C = np.unique(how_C, return_inverse=True)
    branches_C = np.where(own_C > 0, rows_C - own_C, UNKNOWN)
    for name, values_C, limit in (
        ("rows", rows_C, 2**16),
        ("branches", branches_C, 2**8),
        ("accepted drafts", accepted_C, 2**8),
        ("strategies", local_C, 2**8),
    ):
        if len(values_C) and not 0 <= values_C.min() <= values_C.max() < limit:
            raise ValueError(f"a cycle has {int(values_C.max())} {name}, fewer than {limit} fit")
    extra_C = np.diff(root_C) - accepted_C[:-1] - 1
    return {
        "first_root": int(root_C[0]) if len(root_C) else 0,
        "gaps": [(int(c), int(extra_C[c])) for c in np.flatnonzero(extra_C)],
        "drafted": [drafted[i] for i in used],
        "rows": rows_C.astype("<u2").tobytes(),
        "branches": branches_C.astype(np.uint8).tobytes(),
        "accepted": accepted_C.astype(np.uint8).tobytes(),
        "own_accepted": own_accepted_C.astype(np.uint8).tobytes(),
        "how": local_C.astype(np.uint8).tobytes(),
    }


def sample_set(samples: Sequence[Sample], identity: Identity, vocab_size: int) -> SampleSet:
    """Return the arrays of these sequences. Names get indices in order of appearance."""
    length_N = np.array([len(s.tokens) // 4 for s in samples], np.int64)
    cycles_N = np.array([s.cycles for s in samples], np.int64)
    spans = [(n, *span) for n, s in enumerate(samples) for span in s.spans]
    versions = _indices(version for _, _, version in spans)
    groups = _indices(s.prompt_key for s in samples)
    ends = _indices(s.end for s in samples)
    drafted = [each for s in samples for each in s.drafted]
    strategies = _indices(each.strategy for each in drafted)
    calibrations = _indices(each.calibration for each in drafted)
    responses = Responses(
        token_T=_joined([s.tokens for s in samples], "<i4", np.int32),
        start_N=np.cumsum(length_N) - length_N,
        prompt_len_N=np.array([s.prompt_len for s in samples], np.int32),
        group_N=np.array([groups[s.prompt_key] for s in samples], np.int32),
        seed_N=np.array([s.seed for s in samples], np.uint64),
        temperature_N=np.array([s.temperature for s in samples], np.float32),
        filters_N=filters_of(samples),
        max_tokens_N=np.array([s.max_tokens for s in samples], np.int32),
        end_N=np.array([ends[s.end] for s in samples], np.uint8),
        span_request_S=np.array([n for n, _, _ in spans], np.int32),
        span_start_S=np.array([first for _, first, _ in spans], np.int32),
        span_version_S=np.array([versions[version] for _, _, version in spans], np.int32),
    )
    rows_V = _joined([s.rows for s in samples], "<u2", np.uint16)
    branches_V = _joined([s.branches for s in samples], np.uint8, np.uint16)
    how_V = _joined([s.how for s in samples], np.uint8, np.int64)
    per_sample_N = np.array([len(s.drafted) for s in samples], np.int64)
    how_V = how_V + np.repeat(np.cumsum(per_sample_N) - per_sample_N, cycles_N)
    strategy_H = np.array([strategies[each.strategy] for each in drafted], np.uint16)
    calibration_H = np.array([calibrations[each.calibration] for each in drafted], np.uint16)
    verified = Verifications(
        request_V=np.repeat(np.arange(len(samples), dtype=np.int32), cycles_N),
        root_V=np.concatenate([np.zeros(0, np.int64), *(s.root_C for s in samples)]).astype(
            np.int32
        ),
        rows_V=rows_V,
        accepted_V=_joined([s.accepted for s in samples], np.uint8, np.uint8),
        own_rows_V=np.where(branches_V == UNKNOWN, 0, rows_V - branches_V).astype(np.uint16),
        own_accepted_V=_joined([s.own_accepted for s in samples], np.uint8, np.uint8),
        strategy_V=strategy_H[how_V] if len(how_V) else np.zeros(0, np.uint16),
        calibration_V=calibration_H[how_V] if len(how_V) else np.zeros(0, np.uint16),
    )
    legend = Legend(
        vocab_size=vocab_size,
        model=identity.model,
        template=identity.template,
        versions=tuple(versions),
        end_reasons=tuple(ends),
        strategies=tuple(strategies),
        calibrations=tuple(calibrations),
    )
    return SampleSet(legend, responses, verified)


def _indices(names: Iterable[T]) -> dict[T, int]:
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def _joined(parts: Sequence[bytes], stored: DTypeLike, dtype: type[Number]) -> NDArray[Number]:
    return np.frombuffer(b"".join(parts), np.dtype(stored)).astype(dtype)
