"""Compares a replay with the server's counts, cycle by cycle.

The active drafter, replayed with the recorded rows, accepts exactly the drafts that it accepted on
the server. A difference means that features and tokens are paired wrongly, that a norm or a
vocabulary map is wrong, or that weights or calibration are of another version: the trained or
adopted drafter would not be the served one. So a difference blocks adoption.

A replayed tree equals the recorded one only under its cycle's calibration table, which
`samples.tables` keeps; a chain of a given number of rows is the same under any table. Legend: V
verifications, B staged verifications, K cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_server.samples.samples import SampleSet
from tlt_server.samples.tables import drafter_of
from tlt_server.trainer.replaying.evaluate import ReplayStage
from tlt_server.trainer.replaying.plans import own_rows
from tlt_server.trainer.replaying.replay import DraftReplay, ReplayedDrafter, Roots

SHOWN = 100  # differences that are kept
NO_TABLES: Mapping[str, NDArray[np.float32]] = {}


class Difference(NamedTuple):
    """A verification that a replay does not repeat."""

    response: int
    position: int  # the root's, in prompt and output
    strategy: str
    rows: int  # the drafter's own and the root
    recorded: int  # accepted drafts
    replayed: int

    def __str__(self) -> str:
        return (
            f"response {self.response}, root at position {self.position} ({self.strategy}, "
            f"{self.rows} rows): the server accepted {self.recorded}, the replay {self.replayed}"
        )


class SelfCheck(NamedTuple):
    """The result. `unknown` counts the verifications that cannot be compared, by reason."""

    compared: int
    different: int
    shown: list[Difference]  # the first ones, by response and position
    unknown: Mapping[str, int]


def self_check(
    samples: SampleSet,
    drafter: ReplayedDrafter,
    stage: ReplayStage,
    *,
    version: str,
    tables: Mapping[str, NDArray[np.float32]] = NO_TABLES,
    drafter_version: str | None = None,
    on_response: Callable[[int], None] = lambda count: None,
) -> SelfCheck:
    """Compare all verifications of the drafter. `version`: the target's weights. `tables`: the
    known calibration tables [K], by version. `drafter_version`: the drafter's key, if several were
    recorded.
    """
    verified, responses = samples.verified, samples.responses
    rows_V = own_rows(samples.legend.strategies, verified, drafter.kind)
    reasons = _unknown(samples, version, tables, drafter_version)
    open_V = rows_V > 0
    unknown = {}
    for reason, which_V in reasons.items():
        if count := int((open_V & which_V).sum()):
            unknown[reason] = count
        open_V &= ~which_V
    chosen = np.unique(verified.request_V[open_V]).tolist()
    if not chosen:
        return SelfCheck(0, 0, [], unknown)
    found: list[Difference] = []
    compared = different = 0
    for part, (replay,) in stage.parts(responses, chosen, [drafter]):
        place_N = np.full(len(responses), -1, np.int64)
        place_N[part] = np.arange(len(part))
        here = np.flatnonzero(open_V & (place_N[verified.request_V] >= 0))
        roots = Roots(
            place_N[verified.request_V[here]], verified.root_V[here].astype(np.int64), rows_V[here]
        )
        replayed_B = _replayed(replay, roots, samples, here, tables)
        recorded_B = verified.own_accepted_V[here]
        wrong = np.flatnonzero(replayed_B != recorded_B)
        compared, different = compared + len(here), different + len(wrong)
        for b in wrong[np.lexsort((roots.position_B[wrong], verified.request_V[here[wrong]]))]:
            v = int(here[b])
            if len(found) < SHOWN:
                found.append(
                    Difference(
                        int(verified.request_V[v]),
                        int(verified.root_V[v]),
                        samples.legend.strategies[verified.strategy_V[v]].name,
                        int(rows_V[v]),
                        int(recorded_B[b]),
                        int(replayed_B[b]),
                    )
                )
        on_response(len(part))
    return SelfCheck(compared, different, sorted(found), unknown)


def _unknown(
    samples: SampleSet,
    version: str,
    tables: Mapping[str, NDArray[np.float32]],
    drafter_version: str | None,
) -> dict[str, NDArray[np.bool_]]:
    """Return masks of the verifications that cannot be compared, by reason."""
    verified, legend = samples.verified, samples.legend
    width_V = np.array([strategy.width for strategy in legend.strategies])[verified.strategy_V]
    of_table_V = np.array([name in tables for name in legend.calibrations])
    made_by = [drafter_of(name) for name in legend.calibrations]
    other_V = np.array([drafter_version not in (None, name) for name in made_by])
    return {
        "computed by another version of the target": ~of_version(samples, version)[
            verified.request_V
        ],
        "drafted by another version of the drafter": other_V[verified.calibration_V],
        "branches of history are not told apart": verified.own_rows_V == 0,
        "a tree under a calibration that is not kept": (width_V > 1)
        & ~of_table_V[verified.calibration_V],
    }


def of_version(samples: SampleSet, version: str) -> NDArray[np.bool_]:
    """Return a mask of the responses that this target version computed completely."""
    responses, names = samples.responses, np.array(samples.legend.versions)
    other_S = names[responses.span_version_S] != version
    found_N = np.zeros(len(responses), np.bool_)
    found_N[responses.span_request_S] = True
    found_N[responses.span_request_S[other_S]] = False
    return found_N


def _replayed(
    replay: DraftReplay,
    roots: Roots,
    samples: SampleSet,
    here: NDArray[np.int64],
    tables: Mapping[str, NDArray[np.float32]],
) -> NDArray[np.int32]:
    """Draft again at these roots, whose verifications are `here`: each tree by its own table;
    chains, which need no table, together.
    """
    strategies = samples.legend.strategies
    chain_S = np.array([strategy.width == 1 for strategy in strategies])
    strategy_B = samples.verified.strategy_V[here]
    table_B = samples.verified.calibration_V[here].astype(np.int64)
    calibration_B = np.where(chain_S[strategy_B], -1, table_B)
    replayed_B = np.zeros(len(here), np.int32)
    in_force_K = replay.drafter.weights.calibration.acceptance_K
    own_K = in_force_K.copy()
    for index, table in sorted({*zip(strategy_B.tolist(), calibration_B.tolist(), strict=True)}):
        strategy = strategies[index]
        same = np.flatnonzero((strategy_B == index) & (calibration_B == table))
        name = samples.legend.calibrations[table] if table >= 0 else ""
        in_force_K[:] = tables.get(name, own_K)
        replayed_B[same] = replay.accepted(
            roots.part(same), strategy.depth, strategy.width, floored=strategy.width > 1
        )
    in_force_K[:] = own_K
    return replayed_B
