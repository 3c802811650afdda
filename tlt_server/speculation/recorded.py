"""The record of a rollout: responses, the cycles that made them, and what drafters would draft at
every position.

A response is fixed by weights, prompt and seed, and does not depend on drafts. So the tree that a
drafter grows from a position is a property of the record, and how much of it is accepted is known:
the longest path that the response follows. One recording therefore tells what any policy would have
gained. Nodes keep the cells of their calibration table, not survivals, so that a replay can learn
the table as the engine does.

One safetensors file; `bench/recording.py` writes it, `bench/replay.py` reads it. No torch.
Legend: N requests, T tokens, S spans of one weight version, C cycles, V verifications, P positions
(an output token each, request after request), M nodes of a position, D depths.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tlt_server.errors import StartupError
from tlt_server.records import GenerateRequest, Sampling, Strategy
from tlt_server.speculation.cost import CostRecord
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.knowledge import KnowledgeRecord

FORMAT = "tlt rollout record 2"
MAX_BYTES = 2**31  # limit of a file's size
MAX_HEADER = 2**20  # bytes
DEVICES = ("cpu", "cuda", "interpreter")
MAX_COLUMNS = 1024  # nodes of a tree
NONE = 2**16 - 1  # no node
REMEDY = "record the rollout again with `tlt bench record`"

Array = NDArray[Any]
Part = TypeVar("Part")


class DraftedTrees(Struct, frozen=True, forbid_unknown_fields=True):
    """A drafter's trees of one width, grown as deep as `depth`."""

    drafter: str
    depth: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.drafter}-{self.width}"

    @property
    def columns(self) -> int:
        """Nodes of a position: level 0 plants `width`, each later one `width` squared."""
        return self.width + (self.depth - 1) * self.width**2


class RecordedRun(Struct, frozen=True, forbid_unknown_fields=True):
    """One time that the rollout ran."""

    policy: str
    seconds: float
    known: KnowledgeRecord | None  # at its start; None where no step had been measured


class RecordHeader(Struct, frozen=True, forbid_unknown_fields=True):
    device: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    pages: int
    max_model_len: int
    max_running: int
    max_rows: int
    max_draft_rows: int
    drafters: tuple[str, ...]
    trees: tuple[DraftedTrees, ...]
    strategies: tuple[Strategy, ...]
    versions: tuple[str, ...]
    end_reasons: tuple[str, ...]
    runs: tuple[RecordedRun, ...]
    cost: CostRecord  # fitted to all recorded cycles
    described: dict[str, Any]  # what a reader of figures has to know
    machine: str = ""  # processor, memory, GPU


@dataclass(frozen=True)
class Responses:
    """Requests in the order in which they were submitted."""

    token_T: NDArray[np.int32]  # prompts with outputs
    start_N: NDArray[np.int64]  # first token
    prompt_len_N: NDArray[np.int32]
    group_N: NDArray[np.int32]
    seed_N: NDArray[np.uint64]
    temperature_N: NDArray[np.float32]
    top_p_N: NDArray[np.float32]
    min_p_N: NDArray[np.float32]
    top_k_N: NDArray[np.int32]
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
        """Return the index of each request's first position in the arrays over P."""
        return np.cumsum(self.output_len_N) - self.output_len_N

    def tokens(self, n: int) -> NDArray[np.int32]:
        """Return prompt and output of a request; a view."""
        end = self.start_N[n + 1] if n + 1 < len(self) else len(self.token_T)
        return self.token_T[self.start_N[n] : end]

    def request(self, n: int) -> GenerateRequest:
        """Return the request as it was submitted."""
        sampling = Sampling(
            temperature=float(self.temperature_N[n]),
            top_p=float(self.top_p_N[n]),
            min_p=float(self.min_p_N[n]),
            top_k=int(self.top_k_N[n]),
            max_tokens=int(self.max_tokens_N[n]),
        )
        return GenerateRequest(
            id=str(n),
            token_ids=self.tokens(n)[: self.prompt_len_N[n]].tolist(),
            sampling=sampling,
            seed=int(self.seed_N[n]),
            group_id=str(self.group_N[n]),
        )


@dataclass(frozen=True)
class RecordedCycles:
    """The cycles of all runs, and what they verified of each request."""

    run_C: NDArray[np.uint8]
    strategy_C: NDArray[np.int32]  # index into `strategies`
    decoding_C: NDArray[np.int32]
    prompt_rows_C: NDArray[np.int32]
    context_C: NDArray[np.float32]  # mean, in tokens
    rows_C: NDArray[np.int32]  # prompt rows included
    drafted_C: NDArray[np.int32]
    emitted_C: NDArray[np.int32]
    seconds_C: NDArray[np.float32]
    cycle_V: NDArray[np.int32]
    request_V: NDArray[np.int32]
    root_V: NDArray[np.int32]  # position of the root in prompt and output
    rows_V: NDArray[np.uint16]  # with the root
    accepted_V: NDArray[np.uint8]


@dataclass(frozen=True)
class RecordedTrees:
    """Trees of every position whose root was drafted from. Nodes stand in the order in which they
    were planted, so a tree of fewer levels is the head of these.
    """

    count_P: NDArray[np.uint16]  # nodes; 0 also where the position never was a root
    cell_PM: NDArray[np.uint8]  # in the drafter's calibration table
    parent_PM: NDArray[np.uint16]  # NONE: the root
    own_PD: NDArray[np.uint16]  # node that is the response's own token; NONE from the first miss on


@dataclass(frozen=True)
class Table:
    """A drafter's calibration table, as it was shipped."""

    survival_K: NDArray[np.float32]
    gap_edges: NDArray[np.float32]


@dataclass(frozen=True)
class RolloutRecord:
    header: RecordHeader
    responses: Responses
    cycles: RecordedCycles
    trees: Mapping[str, RecordedTrees]  # by `DraftedTrees.name`
    tables: Mapping[str, Table]  # by drafter

    def save(self, path: Path) -> None:
        """Write the file; a reader never sees a part of it."""
        tensors = {
            **_tensors("responses", self.responses),
            **_tensors("cycles", self.cycles),
            **{k: v for name, part in self.trees.items() for k, v in _tensors(name, part).items()},
            **{k: v for name, part in self.tables.items() for k, v in _tensors(name, part).items()},
        }
        header = msgspec.json.encode(self.header).decode()
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(save(tensors, {"format": FORMAT, "header": header}))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> RolloutRecord:
        """Read a file. `StartupError` names what is wrong with it and the remedy."""
        try:
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise StartupError(
                    f"{path} has {size} bytes, a record at most {MAX_BYTES}; record fewer requests"
                )
            data = path.read_bytes()
            header = _header(data, path)
            tensors = load(data)
        except OSError as error:
            raise StartupError(
                f"{path}: {error.strerror}; name a file of `tlt bench record`"
            ) from error
        except SafetensorError as error:
            raise StartupError(f"{path} is no safetensors file ({error}); {REMEDY}") from error
        try:
            record = cls(
                header,
                _parsed(Responses, "responses", tensors),
                _parsed(RecordedCycles, "cycles", tensors),
                {trees.name: _parsed(RecordedTrees, trees.name, tensors) for trees in header.trees},
                {name: _parsed(Table, name, tensors) for name in _drafters(header)},
            )
            record.check()
        except (ValueError, KeyError) as error:
            raise StartupError(f"{path} is damaged: {error}; {REMEDY}") from error
        return record

    def check(self) -> None:
        """`ValueError` unless all arrays fit each other."""
        self._check_responses()
        cycles, header = self.cycles, self.header
        _expect("cycles", _same_length(cycles, "_C") and _same_length(cycles, "_V"))
        _within("cycles.run_C", cycles.run_C, len(header.runs))
        _within("cycles.strategy_C", cycles.strategy_C, len(header.strategies))
        _within("cycles.cycle_V", cycles.cycle_V, len(cycles.run_C))
        _within("cycles.request_V", cycles.request_V, len(self.responses))
        finite = np.isfinite(cycles.seconds_C) & np.isfinite(cycles.context_C)
        _expect("cycles.seconds_C", bool(finite.all() and (cycles.seconds_C >= 0).all()))
        positions = int(self.responses.output_len_N.sum())
        for drafted in header.trees:
            trees, table = self.trees[drafted.name], self.tables[drafted.drafter]
            shape = (positions, drafted.columns)
            _expect(drafted.name, trees.cell_PM.shape == trees.parent_PM.shape == shape)
            _expect(drafted.name, trees.own_PD.shape == (positions, drafted.depth))
            _expect(drafted.name, trees.count_P.shape == (positions,))
            _within(drafted.name, trees.count_P, drafted.columns + 1)
            _expect(drafted.name, _before(trees.parent_PM) and _before(trees.own_PD, shape[1]))
            _within(drafted.name, trees.cell_PM, len(table.survival_K))
            good = (table.survival_K >= 0) & (table.survival_K <= 1)
            _expect(drafted.drafter, bool(good.all() and (np.diff(table.gap_edges) > 0).all()))

    def _check_responses(self) -> None:
        responses, header = self.responses, self.header
        _expect("responses", len(responses) > 0 and _same_length(responses, "_N"))
        _expect("spans", _same_length(responses, "_S"))
        output_len_N = responses.output_len_N
        starts_N = responses.start_N
        _expect("responses.start_N", starts_N[0] == 0 and bool((np.diff(starts_N) > 0).all()))
        _expect("responses.prompt_len_N", bool((responses.prompt_len_N > 0).all()))
        most_N = responses.max_tokens_N
        _expect("outputs", bool(((output_len_N > 0) & (output_len_N <= most_N)).all()))
        lengths_N = responses.prompt_len_N + most_N.astype(np.int64)
        _expect("responses.max_tokens_N", bool((lengths_N <= header.max_model_len).all()))
        _within("responses.token_T", responses.token_T, header.vocab_size)
        ends_T = np.isin(responses.token_T, header.eos_token_ids)
        place_T = np.arange(len(ends_T)) - np.repeat(
            starts_N, np.diff(starts_N, append=len(ends_T))
        )
        output_T = place_T >= np.repeat(
            responses.prompt_len_N, np.diff(starts_N, append=len(ends_T))
        )
        last_N = np.append(starts_N[1:], len(ends_T)) - 1
        _expect("ends of outputs", bool((ends_T[last_N] | (output_len_N == most_N)).all()))
        ends_T[last_N] = False
        _expect("tokens after an end", not bool((ends_T & output_T).any()))
        _within("responses.end_N", responses.end_N, len(header.end_reasons))
        _within("responses.span_request_S", responses.span_request_S, len(responses))
        _within("responses.span_version_S", responses.span_version_S, len(header.versions))
        for values in (responses.temperature_N, responses.top_p_N, responses.min_p_N):
            _expect("sampling", bool(np.isfinite(values).all() and (values >= 0).all()))


def _header(data: bytes, path: Path) -> RecordHeader:
    """Return the header that the file's metadata holds."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise StartupError(f"{path} is no record of a rollout; {REMEDY}")
    try:
        metadata = msgspec.json.decode(data[8 : 8 + length])["__metadata__"]
        found, header = metadata["format"], metadata["header"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StartupError(f"{path} is no record of a rollout; {REMEDY}") from error
    if found != FORMAT:
        raise StartupError(f"{path} is a {str(found)[:80]!r}, this reads {FORMAT!r}; {REMEDY}")
    try:
        parsed = msgspec.json.decode(header, type=RecordHeader)
    except (ValueError, TypeError, RecursionError) as error:
        raise StartupError(f"{path} is damaged: {error}; {REMEDY}") from error
    for trees in parsed.trees:
        if not (1 <= trees.depth and 1 <= trees.width and trees.columns <= MAX_COLUMNS):
            raise StartupError(
                f"{path} has trees of {trees.columns} nodes, a record at most {MAX_COLUMNS}; "
                f"{REMEDY}"
            )
    unknown = {*parsed.drafters, *_drafters(parsed)} - {*DRAFTERS}
    if unknown or parsed.device not in DEVICES or not parsed.versions:
        raise StartupError(
            f"{path} is of another version: device {parsed.device[:80]!r}, drafters "
            f"{', '.join(parsed.drafters)[:80] or 'none'}; {REMEDY}"
        )
    sizes = (parsed.page_size, parsed.pages, parsed.max_running, parsed.max_rows)
    if min(*sizes, parsed.max_draft_rows, parsed.max_model_len) < 1 or max(sizes) > 2**28:
        raise StartupError(f"{path} is damaged: sizes of the engine; {REMEDY}")
    return parsed


def _drafters(header: RecordHeader) -> set[str]:
    return {trees.drafter for trees in header.trees}


def _tensors(prefix: str, part: object) -> dict[str, Array]:
    assert hasattr(part, "__dataclass_fields__")
    return {
        f"{prefix}.{field.name}": np.ascontiguousarray(getattr(part, field.name))
        for field in fields(part)  # type: ignore[arg-type]
    }


def _parsed(kind: type[Part], prefix: str, tensors: Mapping[str, Array]) -> Part:
    """Return one part; `KeyError` or `ValueError` unless its arrays are there, of their types."""
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        name = f"{prefix}.{field.name}"
        if name not in tensors:
            raise ValueError(f"{name} is missing")
        dtype = str(field.type).removeprefix("NDArray[np.").removesuffix("]")
        if tensors[name].dtype != dtype:
            raise ValueError(f"{name} is {tensors[name].dtype}, not {dtype}")
        dimensions = sum(letter.isupper() for letter in field.name.rpartition("_")[2]) or 1
        if tensors[name].ndim != dimensions:
            raise ValueError(f"{name} has {tensors[name].ndim} dimensions, not {dimensions}")
        values[field.name] = tensors[name]
    return kind(**values)


def _same_length(part: object, suffix: str) -> bool:
    assert hasattr(part, "__dataclass_fields__")
    names = [f.name for f in fields(part) if f.name.endswith(suffix)]  # type: ignore[arg-type]
    return len({len(getattr(part, name)) for name in names}) == 1


def _expect(name: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} does not fit the rest")


def _within(name: str, values: Array, limit: int) -> None:
    if values.size and not (0 <= int(values.min()) <= int(values.max()) < limit):
        raise ValueError(
            f"{name} lies between {values.min()} and {values.max()}, not in [0, {limit})"
        )


def _before(node_PM: NDArray[np.uint16], limit: int | None = None) -> bool:
    """Tell whether each is NONE or an earlier node (than its own place, or than `limit`)."""
    bound_M = np.arange(node_PM.shape[1]) if limit is None else limit
    return bool(((node_PM == NONE) | (node_PM < bound_M)).all())
