"""The record of a rollout: responses, the cycles that made them, and each drafter's tree at every
position.

A response is fixed by weights, prompt and seed, and does not depend on drafts. So the tree that a
drafter grows from a position is a property of the record, and its accepted path is known: the
longest path that the response follows. One recording therefore yields the gain of any policy. Nodes
keep the cells of their calibration table, not probabilities, so that a replay can learn the table
as the engine does.

One safetensors file; `bench/recording.py` writes it, `bench/replay.py` reads it. No torch. Legend:
N requests, C cycles, V verifications, P positions (an output token each, request after request), M
nodes of a position, D depths.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tlt_server.errors import StartupError
from tlt_server.samples.columns import expect, parsed, same_length, tensors_of, within
from tlt_server.samples.samples import Legend, Responses, SampleSet, Verifications
from tlt_server.speculation.cost import CostModel, CostRecord
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.knowledge import KnowledgeRecord

FORMAT = "tlt rollout record 4"
MAX_BYTES = 2**31  # limit of a file's size
MAX_HEADER = 2**20  # bytes
DEVICES = ("cpu", "cuda", "interpreter")
MAX_COLUMNS = 1024  # nodes of a tree
# Limits on the recorded engine, as a replay makes tables of these sizes.
MAX_SIZES = {
    "page_size": 2**10,
    "pages": 2**24,
    "max_model_len": 2**22,
    "max_running": 2**12,
    "max_rows": 2**16,
    "max_draft_rows": 2**16,
}
MAX_TABLE = 2**26  # pages of sequences that run at once
NONE = 2**16 - 1  # no node
REMEDY = "record the rollout again with `tlt bench record`"


class DraftedTrees(Struct, frozen=True, forbid_unknown_fields=True):
    """A drafter's trees of one width, grown to `depth`."""

    drafter: str
    depth: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.drafter}-{self.width}"

    @property
    def columns(self) -> int:
        """Nodes of a position: level 0 has `width`, each later one `width` squared."""
        return self.width + (self.depth - 1) * self.width**2


class RecordedRun(Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the rollout."""

    policy: str
    seconds: float
    known: KnowledgeRecord | None  # at its start; None where no step had been measured


class RecordHeader(Struct, frozen=True, forbid_unknown_fields=True):
    device: str
    legend: Legend
    eos_token_ids: tuple[int, ...]
    page_size: int
    pages: int
    max_model_len: int
    max_running: int
    max_rows: int
    max_draft_rows: int
    drafters: tuple[str, ...]
    trees: tuple[DraftedTrees, ...]
    runs: tuple[RecordedRun, ...]
    cost: CostRecord  # fitted to all recorded cycles
    described: dict[str, Any]  # what a reader of figures has to know
    machine: str = ""  # processor, memory, GPU


@dataclass(frozen=True)
class RecordedCycles:
    """The cycles of all runs."""

    run_C: NDArray[np.uint8]
    strategy_C: NDArray[np.int32]  # index into `strategies`
    decoding_C: NDArray[np.int32]
    prompt_rows_C: NDArray[np.int32]
    context_C: NDArray[np.float32]  # mean, in tokens
    rows_C: NDArray[np.int32]  # prompt rows included
    drafted_C: NDArray[np.int32]
    emitted_C: NDArray[np.int32]
    seconds_C: NDArray[np.float32]
    cycle_V: NDArray[np.int32]  # cycle of each verification


@dataclass(frozen=True)
class RecordedTrees:
    """Trees at every position that was drafted from. Nodes are in the order of their creation, so a
    shallower tree is a prefix of these.
    """

    count_P: NDArray[np.uint16]  # nodes; 0 also where the position never was a root
    cell_PM: NDArray[np.uint8]  # in the drafter's calibration table
    parent_PM: NDArray[np.uint16]  # NONE: the root
    own_PD: NDArray[np.uint16]  # node that is the response's own token; NONE from the first miss on


@dataclass(frozen=True)
class Table:
    """A drafter's calibration table, as shipped."""

    survival_K: NDArray[np.float32]
    gap_edges: NDArray[np.float32]


@dataclass(frozen=True)
class RolloutRecord:
    header: RecordHeader
    responses: Responses
    verified: Verifications  # all runs
    cycles: RecordedCycles
    trees: Mapping[str, RecordedTrees]  # by `DraftedTrees.name`
    tables: Mapping[str, Table]  # by drafter

    @property
    def samples(self) -> SampleSet:
        return SampleSet(self.header.legend, self.responses, self.verified)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        tensors = {
            **tensors_of("responses", self.responses),
            **tensors_of("verified", self.verified),
            **tensors_of("cycles", self.cycles),
            **{
                k: v for name, part in self.trees.items() for k, v in tensors_of(name, part).items()
            },
            **{
                k: v
                for name, part in self.tables.items()
                for k, v in tensors_of(name, part).items()
            },
        }
        header = msgspec.json.encode(self.header).decode()
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(save(tensors, {"format": FORMAT, "header": header}))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> RolloutRecord:
        """Read a file. `StartupError` names the fault and the remedy."""
        try:
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise StartupError(
                    f"{path} has {size} bytes, the limit is {MAX_BYTES}; record fewer requests"
                )
            data = path.read_bytes()
            header = _header(data, path)
            tensors = load(data)
        except OSError as error:
            raise StartupError(
                f"{path}: {error.strerror}; name a file of `tlt bench record`"
            ) from error
        except (SafetensorError, KeyError) as error:  # KeyError: a type that numpy lacks
            raise StartupError(f"{path} is not a safetensors file ({error}); {REMEDY}") from error
        try:
            record = cls(
                header,
                parsed(Responses, "responses", tensors),
                parsed(Verifications, "verified", tensors),
                parsed(RecordedCycles, "cycles", tensors),
                {trees.name: parsed(RecordedTrees, trees.name, tensors) for trees in header.trees},
                {name: parsed(Table, name, tensors) for name in _drafters(header)},
            )
            record.check()
        except (ValueError, KeyError) as error:
            raise StartupError(f"{path} is damaged: {error}; {REMEDY}") from error
        return record

    def check(self) -> None:
        """Raise `ValueError` unless all arrays match."""
        CostModel().restore(self.header.cost)
        self.samples.check()
        self._check_ends()
        cycles, header = self.cycles, self.header
        expect("cycles", same_length(cycles, "_C") and len(cycles.cycle_V) == len(self.verified))
        within("cycles.run_C", cycles.run_C, len(header.runs))
        within("cycles.strategy_C", cycles.strategy_C, len(header.legend.strategies))
        within("cycles.cycle_V", cycles.cycle_V, len(cycles.run_C))
        finite = np.isfinite(cycles.seconds_C) & np.isfinite(cycles.context_C)
        expect("cycles.seconds_C", bool(finite.all() and (cycles.seconds_C >= 0).all()))
        positions = int(self.responses.output_len_N.sum())
        for drafted in header.trees:
            trees, table = self.trees[drafted.name], self.tables[drafted.drafter]
            shape = (positions, drafted.columns)
            expect(drafted.name, trees.cell_PM.shape == trees.parent_PM.shape == shape)
            expect(drafted.name, trees.own_PD.shape == (positions, drafted.depth))
            expect(drafted.name, trees.count_P.shape == (positions,))
            within(drafted.name, trees.count_P, drafted.columns + 1)
            expect(drafted.name, _before(trees.parent_PM))
            expect(drafted.name, _before(trees.own_PD, trees.count_P[:, None]))
            within(drafted.name, trees.cell_PM, len(table.survival_K))
            good = (table.survival_K >= 0) & (table.survival_K <= 1)
            expect(drafted.drafter, bool(good.all() and (np.diff(table.gap_edges) > 0).all()))

    def _check_ends(self) -> None:
        """Check that every response ends with a stop token or at its limit, and not before."""
        responses, header = self.responses, self.header
        expect("responses", len(responses) > 0)
        output_len_N = responses.output_len_N
        starts_N = responses.start_N
        expect("outputs", bool((output_len_N > 0).all()))
        most_N = responses.max_tokens_N
        lengths_N = responses.prompt_len_N + most_N.astype(np.int64)
        expect("responses.max_tokens_N", bool((lengths_N <= header.max_model_len).all()))
        ends_T = np.isin(responses.token_T, header.eos_token_ids)
        place_T = np.arange(len(ends_T)) - np.repeat(
            starts_N, np.diff(starts_N, append=len(ends_T))
        )
        output_T = place_T >= np.repeat(
            responses.prompt_len_N, np.diff(starts_N, append=len(ends_T))
        )
        last_N = np.append(starts_N[1:], len(ends_T)) - 1
        expect("ends of outputs", bool((ends_T[last_N] | (output_len_N == most_N)).all()))
        ends_T[last_N] = False
        expect("tokens after an end", not bool((ends_T & output_T).any()))


def _header(data: bytes, path: Path) -> RecordHeader:
    """Return the header in the file's metadata."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
        raise StartupError(f"{path} is not a record of a rollout; {REMEDY}")
    try:
        metadata = msgspec.json.decode(data[8 : 8 + length])["__metadata__"]
        found, header = metadata["format"], metadata["header"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StartupError(f"{path} is not a record of a rollout; {REMEDY}") from error
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
    if unknown or parsed.device not in DEVICES or not parsed.legend.versions:
        raise StartupError(
            f"{path} is of another version: device {parsed.device[:80]!r}, drafters "
            f"{', '.join(parsed.drafters)[:80] or 'none'}; {REMEDY}"
        )
    if not all(1 <= getattr(parsed, name) <= most for name, most in MAX_SIZES.items()):
        raise StartupError(f"{path} is damaged: sizes of the engine; {REMEDY}")
    longest_pages = -(-parsed.max_model_len // parsed.page_size)
    if longest_pages > parsed.pages or longest_pages * parsed.max_running > MAX_TABLE:
        raise StartupError(f"{path} is damaged: pages of its sequences; {REMEDY}")
    return parsed


def _drafters(header: RecordHeader) -> set[str]:
    return {trees.drafter for trees in header.trees}


def _before(node_PM: NDArray[np.uint16], limit: NDArray[np.uint16] | None = None) -> bool:
    """Return True if each value is NONE or names an earlier node (earlier than itself, or than
    `limit`).
    """
    bound_M = np.arange(node_PM.shape[1]) if limit is None else limit
    return bool(((node_PM == NONE) | (node_PM < bound_M)).all())
