"""The time of a step as a function of its shape, profiled at start and corrected by every step.

A step's time is modelled as a sum of parts, each a piecewise-linear function of a number of rows:

    seconds = speed * (extend(R) + start(B) + depth * draft(M)
                       + (read * B + attend * R) * context + each * B)

R: rows that the target computes (roots, drafts, prompt rows and padding); B: requests that sample,
whose KV is read once; M: rows of one level of the draft pass (requests times children). `start` and
`draft` belong to a drafter: it first reads the accepted tokens, then drafts level by level. The
values at the knots are the model's parameters. A profile fits them by least squares, and every step
corrects the ones that it depends on (`correction`); either way more rows never take less time.
`speed` is a slowdown of all steps alike, such as a busy machine's, so a moment of load does not
make the current strategy look worse than the others. The slowdown while a drafter is being trained
is a separate factor (`slowdown`), so steps without training stay well predicted.

No torch. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tlt_server.speculation.correction import FactorFilter, ascending
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.wire.records import Cycle

KNOTS = (
    *(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768),
    *(1024, 2048, 4096, 8192),
)  # rows
REQUESTS = 256  # unit of the part of requests
ATTENDED = 2**14  # unit of the parts of attention: rows, or requests, times tokens of context
LEAST_S = 1e-5  # no step takes less; a fit to few steps may say so
DRAFT_SHARE = 0.1  # a level of drafting over a pass of the target, until it is measured
# A part that a profile finds to take no time is taken to be this part of a pass of the target, so
# that steps can correct it by a factor.
LEAST_SHARE = 0.01
LEAST = LEAST_SHARE * LEAST_S  # what corrections leave of any part
SLOWED = 32  # steps after which the slowdown by a trainer is known
APART_3 = np.array([0.0, 100.0, 200.0])  # octaves between numbers that have nothing in common


class StepLoad(NamedTuple):
    """The shape of a step."""

    drafter: str  # empty: nothing is drafted
    depth: int
    width: int
    batch: int  # requests that sample
    rows: int  # rows of these, drafts and roots
    prompt_rows: int
    context: float  # mean context of the requests that sample, in tokens

    @property
    def read(self) -> int:
        """Rows that the target computes."""
        return self.rows + self.prompt_rows


# A function's values at the knots, the knots that a step lies between with their weights, and a
# factor.
Part = tuple[NDArray[np.float64], Sequence[tuple[int, float]], float]


class Measured(NamedTuple):
    load: StepLoad
    seconds: float


@dataclass(frozen=True)
class CostSettings:
    stiffness: float = 0.02  # weight of a bend against a relative error, in fitting a profile
    usual: float = 0.1  # relative error from which a measured step counts less
    fits: int = 3  # each weighs the steps by their errors in the one before


def load_of(cycle: Cycle) -> StepLoad:
    """Return the shape of a finished step."""
    context, strategy = cycle.context, cycle.strategy
    return StepLoad(
        strategy.drafter,
        strategy.depth,
        strategy.width,
        context.decoding,
        cycle.rows - context.prefill_rows,
        context.prefill_rows,
        context.mean_context,
    )


class CostRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a model: seconds at the knots, and per unit of `ATTENDED`."""

    extend: list[float]
    start: dict[str, list[float]]
    draft: dict[str, list[float]]
    linear: list[float]


class CostModel:
    """Predicts the seconds of steps. `trained` once it has a profile or a measured step."""

    def __init__(self, settings: CostSettings = CostSettings()) -> None:
        self._settings = settings
        self._knot_K = np.array(KNOTS, np.float64)
        self._octave_K = np.log2(self._knot_K)
        self._extend_K = np.zeros(len(KNOTS))
        self._start_K: dict[str, NDArray[np.float64]] = {}
        self._draft_K: dict[str, NDArray[np.float64]] = {}
        self._linear_3 = np.zeros(3)  # reading a request's KV, attending with a row, a request
        self.error = 0.0  # mean relative error of predictions, of the recent past
        self.trained = False
        self.profiled = False  # by more than the steps that happened to run
        self._start_correcting()

    @property
    def speed(self) -> float:
        """The factor by which all steps are currently slower than their long-run expectation."""
        return self._correction.common

    @property
    def slowdown(self) -> float | None:
        """The slowdown factor of steps while a drafter is trained; None until enough of them were
        measured.
        """
        return self._training if self._slowed >= SLOWED else None

    @property
    def _training(self) -> float:
        return math.exp(self._correction.log_N[self._training_at])

    def seconds(
        self,
        drafter: str,
        depth: NDArray[np.int64] | int,
        width: NDArray[np.int64] | int,
        batch: int,
        rows: NDArray[np.int64] | int,
        prompt_rows: int = 0,
        context: float = 0.0,
    ) -> NDArray[np.float64]:
        """Predict the time of steps. Arguments as in `StepLoad`: arrays of one shape, or
        numbers.
        """
        read = np.asarray(rows) + prompt_rows
        kv, row, request = self._linear_3
        found = self._at(self._extend_K, read) + request * batch / REQUESTS
        found = found + (kv * batch + row * read) * context / ATTENDED
        if drafter:
            start_K, draft_K = self._drafting(drafter)
            found = found + self._at(start_K, np.asarray(batch))
            found = found + np.asarray(depth) * self._at(draft_K, batch * np.asarray(width))
        return np.maximum(self.speed * found, LEAST_S)

    def predict(self, load: StepLoad) -> float:
        return float(self.seconds(*load))

    def profile(self, measured: Iterable[Measured]) -> None:
        """Fit the model to the steps measured at start, by least squares of relative errors.
        Between and beyond the measured sizes, its functions are as straight as possible.
        """
        steps = [step for step in measured if step.seconds > 0]
        if not steps:
            return
        drafters = sorted({step.load.drafter for step in steps} - {""})
        self._extend_K = np.zeros(len(KNOTS))
        self._start_K = {name: np.zeros(len(KNOTS)) for name in drafters}
        self._draft_K = {name: np.zeros(len(KNOTS)) for name in drafters}
        functions = [self._extend_K, *self._start_K.values(), *self._draft_K.values()]
        first = {id(values_K): i * len(KNOTS) for i, values_K in enumerate(functions)}
        first[id(self._linear_3)] = len(functions) * len(KNOTS)
        equations = np.zeros((len(steps), len(functions) * len(KNOTS) + 3))
        for row, step in zip(equations, steps, strict=True):
            for values_K, knots, scale in self._parts(step.load):
                for at, weight in knots:
                    row[first[id(values_K)] + at] += scale * weight / step.seconds
        straight = self._straight(len(functions), min(step.seconds for step in steps))
        # The unknowns are what a knot adds to the knot before it.
        added = np.eye(equations.shape[1])
        for at in range(0, len(functions) * len(KNOTS), len(KNOTS)):
            added[at : at + len(KNOTS), at : at + len(KNOTS)] = np.tri(len(KNOTS))
        weight_S = np.ones(len(steps))
        for _ in range(self._settings.fits):
            found = added @ not_negative(
                np.vstack((equations * weight_S[:, None], straight)) @ added,
                np.concatenate((weight_S, np.zeros(len(straight)))),
            )
            missed_S = np.abs(1 - equations @ found)
            weight_S = np.sqrt(self._settings.usual / np.maximum(missed_S, self._settings.usual))
        for values_K in (*functions, self._linear_3):
            at = first[id(values_K)]
            values_K[:] = found[at : at + len(values_K)]
        self._start_correcting()
        self.trained = self.profiled = True

    def observe(self, load: StepLoad, seconds: float, *, training: bool = False) -> float:
        """Correct the model by a finished step. `training`: a drafter was trained during the step.
        Return the predicted seconds; 0 without a prediction.
        """
        if seconds <= 0 or not load.read:
            return 0.0
        if not self.trained:
            self.profile([Measured(load._replace(drafter="", depth=0, width=0), seconds)])
            self.profiled = False
        expected = self.predict(load) * (self._training if training else 1.0)
        self._slowed += training
        self.error += 0.05 * (min(abs(seconds / expected - 1), 1.0) - self.error)
        self._correct(load, math.log(seconds / expected), training)
        return expected

    def record(self) -> CostRecord:
        start = {name: values_K.tolist() for name, values_K in self._start_K.items()}
        draft = {name: values_K.tolist() for name, values_K in self._draft_K.items()}
        return CostRecord(self._extend_K.tolist(), start, draft, self._linear_3.tolist())

    def restore(self, record: CostRecord) -> None:
        """Replace the parameters by a record's. `ValueError` if its form differs."""
        for values in (record.extend, *record.start.values(), *record.draft.values()):
            if len(values) != len(KNOTS) or not all(0 <= value < 1e4 for value in values):
                raise ValueError(f"the time of steps must be {len(KNOTS)} numbers of seconds")
            if values != sorted(values):
                raise ValueError("the time of steps must not fall with more rows")
        if {*record.start} != {*record.draft} or not {*record.start} <= {*DRAFTERS}:
            raise ValueError("the time of drafts must have two parts for each drafter")
        if not any(record.extend):
            raise ValueError("some steps must take more than 0 seconds")
        if len(record.linear) != 3 or not all(0 <= value < 1e4 for value in record.linear):
            raise ValueError("the time of requests must be 3 numbers of seconds")
        self._extend_K = np.array(record.extend)
        self._start_K = {name: np.array(values) for name, values in record.start.items()}
        self._draft_K = {name: np.array(values) for name, values in record.draft.items()}
        self._linear_3 = np.array(record.linear)
        self._start_correcting()
        self.trained = self.profiled = True

    def _straight(self, functions: int, least_s: float) -> NDArray[np.float64]:
        """Return equations that penalize bends."""
        bends = np.zeros((len(KNOTS) - 2, len(KNOTS)))
        width_K = np.diff(self._knot_K)
        for k, row in enumerate(bends):
            row[k : k + 3] = 1, -1 - width_K[k] / width_K[k + 1], width_K[k] / width_K[k + 1]
        bends *= self._settings.stiffness / least_s
        straight = np.kron(np.eye(functions), bends)
        return np.hstack((straight, np.zeros((len(straight), 3))))

    def _start_correcting(self) -> None:
        """Start to correct the current parameters by steps."""
        self._extend_K = np.maximum(self._extend_K, LEAST_S)
        self._linear_3 = np.maximum(self._linear_3, LEAST_SHARE * self._extend_K[0])
        self._correction = FactorFilter()
        self._training_at = self._correction.add(np.zeros(1)).start
        self._slowed = 0  # steps seen while a drafter was trained
        self._linear = self._correction.add(APART_3)
        self._curves = [(self._correction.add(self._octave_K), self._extend_K)]
        for name in self._draft_K:
            self._correct_drafter(name)

    def _correct_drafter(self, name: str) -> None:
        for values_by in (self._start_K, self._draft_K):
            values_by[name] = np.maximum(values_by[name], LEAST_SHARE * self._extend_K)
            self._curves.append((self._correction.add(self._octave_K), values_by[name]))

    def _correct(self, load: StepLoad, error: float, training: bool) -> None:
        """Move the parameters of this shape by an error: the logarithm of a ratio of times."""
        correction, parts = self._correction, self._parts(load)
        share_N = np.zeros(len(correction.log_N))
        places = {id(values): place.start for place, values in self._curves}
        places[id(self._linear_3)] = self._linear.start
        for values, knots, scale in parts:
            for at, weight in knots:
                share_N[places[id(values)] + at] = scale * weight * values[at]
        share_N /= share_N.sum()
        share_N[0] = 1.0
        share_N[self._training_at] = training
        factor_N = np.exp(-correction.log_N)
        correction.observe(share_N, error)
        factor_N *= np.exp(correction.log_N)
        np.maximum(self._linear_3 * factor_N[self._linear], LEAST, out=self._linear_3)
        by_curve = -1, len(KNOTS)
        factor_CK = factor_N[self._linear.stop :].reshape(by_curve)
        weight_CK = 1 / correction.variance_N[self._linear.stop :].reshape(by_curve)
        log_CK = np.log(np.array([values_K for _, values_K in self._curves]) * factor_CK)
        log_CK[:] = [*map(ascending, log_CK.tolist(), weight_CK.tolist())]
        for (_, values_K), new_K in zip(self._curves, np.exp(log_CK), strict=True):
            np.maximum(new_K, LEAST, out=values_K)

    def _parts(self, load: StepLoad) -> list[Part]:
        """Return the functions whose sum is the time of a step."""
        parts: list[Part] = [
            (self._extend_K, self._weights(load.read), 1.0),
            (
                self._linear_3,
                (
                    (0, load.batch * load.context / ATTENDED),
                    (1, load.read * load.context / ATTENDED),
                    (2, load.batch / REQUESTS),
                ),
                1.0,
            ),
        ]
        if load.drafter:
            start_K, draft_K = self._drafting(load.drafter)
            parts.append((start_K, self._weights(load.batch), 1.0))
            level = self._weights(load.batch * load.width)
            parts.append((draft_K, level, float(load.depth)))
        return parts

    def _drafting(self, drafter: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the seconds of a drafter's start and of a level."""
        if drafter not in self._draft_K:
            self._start_K[drafter] = np.zeros(len(KNOTS))
            self._draft_K[drafter] = DRAFT_SHARE * self._extend_K
            self._correct_drafter(drafter)
        return self._start_K[drafter], self._draft_K[drafter]

    def _at(self, values_K: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Interpolate between the knots."""
        return np.interp(rows, self._knot_K, values_K)

    def _weights(self, rows: int) -> Sequence[tuple[int, float]]:
        """Return the knots around a number of rows, each with its weight."""
        rows = min(max(rows, KNOTS[0]), KNOTS[-1])
        at = int(np.searchsorted(self._knot_K, rows, "right")) - 1
        if at == len(KNOTS) - 1:
            return ((at, 1.0),)
        share = (rows - KNOTS[at]) / (KNOTS[at + 1] - KNOTS[at])
        return ((at, 1 - share), (at + 1, share))


def not_negative(equations: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares with non-negative unknowns (Lawson and Hanson, 1974)."""
    rotated, square = np.linalg.qr(equations)
    right = rotated.T @ right
    found = np.zeros(equations.shape[1])
    used = np.zeros(len(found), bool)
    least = 1e-10 * float(np.abs(square.T @ right).max(initial=0.0))
    for _ in range(3 * len(found)):
        slope = np.where(used, 0.0, square.T @ (right - square @ found))
        if slope.max() <= least:
            break
        used[slope.argmax()] = True
        while used.any():
            solved = np.zeros(len(found))
            solved[used] = np.linalg.lstsq(square[:, used], right, rcond=None)[0]
            below = used & (solved <= 0)
            if not below.any():
                found = solved
                break
            # Go as far towards the solution as no number falls below zero.
            share = (found[below] / (found[below] - solved[below])).min()
            found = found + share * (solved - found)
            used &= found > 1e-12 * found.max()
            found[~used] = 0.0
    return found
