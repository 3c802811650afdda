"""Calibrated acceptance probabilities: how likely a draft child is the target's token if its parent
is on the path.

A neural drafter ranks children by z = log q / T + G with the target's noise. The accuracy of rank r
depends on its distance from the best: gap = z1 - z2 for rank 0, z1 - z_{r+1} for rank r. The prior
is measured when the drafter is trained (`calibration.json` in its directory), and corrected online
by verification results, so a stale table recovers. `knowledge` holds the counts per weight version.
A node's acceptance probability is the product of the table's values along its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from tlt_client.channels.checkpoint import CALIBRATION
from tlt_kernels.cpu.counts import tally
from tlt_server.errors import ModelError
from tlt_server.speculation.learnt import DOUBT

PHASES, RANKS, BUCKETS = 2, 8, 16  # phase 0: children of the root (true target features); 1: later
CELLS = PHASES * RANKS * BUCKETS
MAX_FILE_BYTES = 2**16  # ten times what a table takes
DEFAULT_EDGES = (
    0.1,
    0.2,
    0.35,
    0.5,
    0.75,
    1.0,
    1.35,
    1.75,
    2.25,
    3.0,
    4.0,
    5.0,
    6.5,
    8.5,
    11.0,
)  # nats


@dataclass(frozen=True)
class CalibrationSettings:
    prior_weight: float = 64.0  # trials that the loaded table counts for, per cell
    # Trials per cell at which its counts are halved: the memory of the online correction.
    limit: float = 4096.0


def default_acceptance() -> NDArray[np.float32]:
    """Return the default table of a drafter without its own.

    Derivation: simulated pairs p = softmax(log q + normal error) with 1 - TV of .82, 1.4 nats per
    token, shared Gumbel noise: rank 0 is right with probability 1 - .55 exp(-gap / 1.2), rank r > 0
    with .37 exp(-gap / 1.2) / r^0.7; each within .03 of the simulation in every cell with mass.
    Clipped to [.001, .995]. Both phases alike.
    """
    edges = np.array(DEFAULT_EDGES)
    middle_K = np.concatenate([[edges[0] / 2], (edges[1:] + edges[:-1]) / 2, [edges[-1] + 2]])
    decay_K = np.exp(-middle_K / 1.2)
    rank_R = np.arange(1, RANKS)
    table = np.vstack([1 - 0.55 * decay_K, 0.37 * decay_K / rank_R[:, None] ** 0.7])
    return np.broadcast_to(np.clip(table, 0.001, 0.995), (PHASES, RANKS, BUCKETS)).astype(
        np.float32
    )


class TableRecord(Struct, frozen=True, forbid_unknown_fields=True):
    prior: str  # digest of the prior, and of what its cells stand for
    hits: list[float]
    trials: list[float]


class OnlineTable:
    """Probabilities of K cells: a prior, corrected by verification results. Memory is bounded, so
    the table follows changes.
    """

    def __init__(
        self, prior_K: NDArray[np.float32], settings: CalibrationSettings = CalibrationSettings()
    ) -> None:
        self.settings = settings
        self.prior_K = np.array(prior_K, np.float32)
        self.acceptance_K = self.prior_K.copy()  # active; updated in place
        self._learnt_K = self.acceptance_K  # learned from observations; active at once, unless held
        self.hits_K = np.zeros(len(self.prior_K))
        self.trials_K = np.zeros(len(self.prior_K))
        self.observed = 0

    def hold(self) -> None:
        """Defer later updates until `renew`, so that a record can name the table of every cycle."""
        self._learnt_K = self.acceptance_K.copy()

    def renew(self) -> NDArray[np.float32]:
        """Apply the deferred updates, and return a copy of the table."""
        self.acceptance_K[:] = self._learnt_K
        return self.acceptance_K.copy()

    def observe(
        self, cell_N: NDArray[np.int32], parent_N: NDArray[np.int32], accepted_N: NDArray[np.int8]
    ) -> None:
        """Learn from a verified tree; only nodes whose parent is the root or was accepted count."""
        self.observed += tally(
            cell_N,
            parent_N,
            accepted_N,
            self.prior_K,
            self.settings.prior_weight,
            self.settings.limit,
            self.hits_K,
            self.trials_K,
            self._learnt_K,
        )

    def record(self) -> TableRecord:
        return TableRecord(self._digest(), self.hits_K.tolist(), self.trials_K.tolist())

    def check(self, record: TableRecord) -> None:
        """Raise `ValueError` unless the record has this table's form."""
        counts = [*zip(record.hits, record.trials, strict=False)]
        if not (
            len(record.hits) == len(record.trials) == len(self.prior_K)
            and all(0 <= hits <= trials <= self.settings.limit for hits, trials in counts)
        ):
            raise ValueError("the counts of a table have another form than this version writes")

    def restore(self, record: TableRecord) -> None:
        """Load the counts, unless they belong to another prior."""
        if record.prior == self._digest():
            self.count(np.array(record.hits), np.array(record.trials))

    def forget(self) -> None:
        """Discount past observations after a weight change, so that the prior counts for more."""
        self.count(self.hits_K // DOUBT, self.trials_K // DOUBT)

    def count(self, hits_K: NDArray[Any], trials_K: NDArray[Any]) -> None:
        """Replace the counts."""
        weight = self.settings.prior_weight
        self.hits_K[:], self.trials_K[:] = hits_K, trials_K
        self._learnt_K[:] = (weight * self.prior_K + hits_K) / (weight + trials_K)
        self.renew()

    def _digest(self, meaning: bytes = b"") -> str:
        return blake2b(self.prior_K.tobytes() + meaning, digest_size=8).hexdigest()

    @property
    def drift(self) -> float:
        """Return the table's mean distance from its prior, over the observed nodes."""
        seen = self.trials_K.sum()
        return (
            float(np.abs(self.acceptance_K - self.prior_K) @ self.trials_K / seen) if seen else 0.0
        )


class CalibrationFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `calibration.json`."""

    gap_edges: list[float]
    acceptance: list[list[list[float]]] = field(name="survival")


_table = msgspec.json.Decoder(CalibrationFile)


def _shortest(values: NDArray[np.float32]) -> Any:
    """Return nested lists of the shortest decimals that parse to the same float32."""
    decimals = [float(str(value)) for value in values.reshape(-1)]
    return np.array(decimals).reshape(values.shape).tolist()


class Calibration(OnlineTable):
    """A table [phases, ranks, buckets] of probabilities in [0, 1], with ascending `gap_edges`
    [buckets - 1]. A gap's bucket is the number of edges below it.
    """

    def __init__(
        self,
        acceptance: NDArray[np.float32] | None = None,
        gap_edges: NDArray[np.float32] | None = None,
        settings: CalibrationSettings = CalibrationSettings(),
        source: str = "default",
    ) -> None:
        table = default_acceptance() if acceptance is None else np.asarray(acceptance)
        edges = np.asarray(DEFAULT_EDGES if gap_edges is None else gap_edges, np.float32)
        if table.shape != (PHASES, RANKS, BUCKETS) or edges.shape != (BUCKETS - 1,):
            raise ModelError(
                f"calibration ({source}): survival must be {[PHASES, RANKS, BUCKETS]} and "
                f"gap_edges [{BUCKETS - 1}], "
                f"found {list(table.shape)} and {list(edges.shape)}; export the drafter again"
            )
        ascending = np.isfinite(edges).all() and (np.diff(edges) > 0).all()
        if not ((table >= 0) & (table <= 1)).all() or not ascending:
            raise ModelError(
                f"calibration ({source}): survival must lie in [0, 1] and gap_edges must ascend; "
                "export the drafter again"
            )
        super().__init__(table.reshape(-1), settings)
        self.gap_edges, self.source = np.ascontiguousarray(edges), source

    @property
    def acceptance(self) -> NDArray[np.float32]:
        return self.acceptance_K.reshape(PHASES, RANKS, BUCKETS)

    @classmethod
    def load(
        cls, directory: str | Path, settings: CalibrationSettings = CalibrationSettings()
    ) -> Calibration:
        """Read the table of a drafter's directory; without `calibration.json` use the default
        table.
        """
        path = Path(directory) / CALIBRATION
        if not path.is_file():
            return cls(settings=settings)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ModelError(
                f"{path}: not readable ({error}); export the drafter again or delete the file"
            ) from error
        return cls.parse(data, str(path), settings)

    @classmethod
    def parse(
        cls, data: bytes, source: str, settings: CalibrationSettings = CalibrationSettings()
    ) -> Calibration:
        """Parse the bytes of a `calibration.json`."""
        try:
            if len(data) > MAX_FILE_BYTES:
                raise ValueError(f"it has {len(data)} bytes, the limit is {MAX_FILE_BYTES}")
            table = _table.decode(data)
            with np.errstate(over="ignore"):  # what overflows is refused below
                acceptance = np.array(table.acceptance, np.float32)
                edges = np.array(table.gap_edges, np.float32)
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"{source}: not a calibration table ({error}); export the drafter again or delete "
                "the file"
            ) from error
        return cls(acceptance, edges, settings, source=source)

    def save(self, directory: str | Path) -> None:
        """Write the active table, online corrections included."""
        table = CalibrationFile(_shortest(self.gap_edges), _shortest(self.acceptance))
        (Path(directory) / CALIBRATION).write_bytes(msgspec.json.encode(table) + b"\n")

    def adopt(self, other: Calibration) -> None:
        """Become a copy of another table, without observations."""
        self.prior_K, self.gap_edges, self.source = other.prior_K, other.gap_edges, other.source
        self.count(np.zeros(CELLS), np.zeros(CELLS))

    def _digest(self, meaning: bytes = b"") -> str:
        return super()._digest(self.gap_edges.tobytes() + meaning)

    def cell(self, phase: int, rank: int, gap: float) -> int:
        """Return the index of a child's cell in the flattened table."""
        return (phase * RANKS + min(rank, RANKS - 1)) * BUCKETS + int(
            np.searchsorted(self.gap_edges, np.float32(gap), "left")
        )

    def gauges(self) -> Mapping[str, float]:
        return {"calibration_observed_nodes": float(self.observed), "calibration_drift": self.drift}
