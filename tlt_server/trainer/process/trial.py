"""The trial of a candidate: written as for a push, calibrated, and replayed on held-out prompts
against the active drafter.

Each part starts with the self-check: if the active drafter's replay does not repeat the server's
counts, nothing is adopted on this record.

Legend: B roots, N responses.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tlt_client.channels.checkpoint import CALIBRATION, SINGLE
from tlt_server.errors import ModelError
from tlt_server.models.draft_layouts import write_flat
from tlt_server.process.private import private_directory
from tlt_server.samples.identity import Identity
from tlt_server.samples.sample import sample_set
from tlt_server.samples.samples import SampleSet
from tlt_server.samples.segments import Recorded
from tlt_server.trainer.judging import figures
from tlt_server.trainer.judging.adoption_test import AdoptionTest
from tlt_server.trainer.judging.form_test import FormTest
from tlt_server.trainer.learning.network import TrainableDrafter
from tlt_server.trainer.process.spot import Round, RoundEnd
from tlt_server.trainer.recording.recorded import CapturedFeatures
from tlt_server.trainer.recording.state_store import StateStore
from tlt_server.trainer.replaying.evaluate import (
    ReplayStage,
    Task,
    Walked,
    evaluate,
    fit_calibration,
)
from tlt_server.trainer.replaying.handed import Handed, digest_of
from tlt_server.trainer.replaying.plans import PinnedPlan, usual_tree
from tlt_server.trainer.replaying.replay import ReplayedDrafter
from tlt_server.trainer.replaying.self_check import self_check
from tlt_server.wire.training import Facts, Judged, Offer, TrainerState, version_of

FITTED = 48  # sequences that a calibration is fitted to
PART = 8  # prompts between two looks at the engine


class Trial:
    def __init__(
        self,
        handed: Handed,
        directory: Path,
        number: int,
        before: int,
        states: StateStore,
        vocab_size: int,
        checked: Facts | None,
        tables: Mapping[str, NDArray[np.float32]],
    ) -> None:
        """`number`: of the candidate, from 1. `before`: how many were tested before it since the
        last adoption. `states`: of all sequences of the trial. `checked`: counts of the self-check;
        None: the engine rounds differently from this replay. `tables`: calibration tables that the
        engine grew its trees by.
        """
        self._handed, self._directory, self._number = handed, directory, number
        self.digest = ""  # the candidate's; empty before it was read
        self._vocab_size, self._checked, self._tables = vocab_size, checked, tables
        self._strategy = usual_tree(handed.in_force.kind)
        source = CapturedFeatures(states, handed.target_version, handed.frame.feature_width)
        self._source, self._stage = source, ReplayStage(source)
        self._test = AdoptionTest(before)
        self._walked: list[list[Walked]] = []  # both drafters, by part
        self._judged: list[SampleSet] = []  # by part

    def write(self, network: TrainableDrafter) -> None:
        """Write the candidate with the active calibration."""
        shutil.rmtree(self._directory, ignore_errors=True)
        private_directory(self._directory, parents=True)
        write_flat(self._handed.directory, self._directory)
        network.save(self._directory)
        shutil.copyfile(self._handed.directory / CALIBRATION, self._directory / CALIBRATION)

    def run(self, fitted: Sequence[Recorded], groups: Sequence[Sequence[Recorded]]) -> Round:
        """Fit the calibration to sequences, then judge prompt groups until the test decides."""
        parts = [
            [entry for group in groups[at : at + PART] for entry in group]
            for at in range(0, len(groups), PART)
        ]
        for together in (*([entry] for entry in fitted), *parts):
            lengths = [len(entry.sample.tokens) // 4 for entry in together]
            self._stage.reserve(np.array(lengths, np.int64))
        candidate = self._handed.replayed(self._directory)
        self.digest = digest_of(candidate)
        yield from self._fit(candidate, fitted)
        for part in parts:
            samples = self._samples(part)
            if not self._as_served(samples):
                return self._outcome("self_check")
            self._observe(candidate, samples)
            yield TrainerState.EVALUATING
            if self._test.better:
                return self._outcome("")
            if self._test.gain.high < 0:
                return self._outcome("worse")
        return self._outcome("no_gain")

    def judge_form(self) -> Generator[TrainerState, None, FormTest]:
        """Replay the judged prompts once more, with the active drafter in FP8. The test stays empty
        for a drafter whose widths have no FP8 on this device.
        """
        self._stage = ReplayStage(self._source)  # gives back the candidate's memory
        plan, test = PinnedPlan(self._strategy), FormTest()
        try:
            drafter = self._handed.replayed(self._handed.directory, "fp8")
        except ModelError:
            return test
        for samples, (in_force, _) in zip(self._judged, self._walked, strict=True):
            task, every = Task(drafter, plan), range(len(samples))
            (walked,) = evaluate(samples.responses, every, [task], self._stage)
            sums = figures.by_response(in_force), figures.by_response(walked)
            test.observe(*sums, samples.responses.group_N)
            yield TrainerState.EVALUATING
        return test

    def _fit(
        self, candidate: ReplayedDrafter, entries: Sequence[Recorded]
    ) -> Generator[TrainerState, None, None]:
        """Fit the candidate's calibration and write it, in full precision."""
        responses = self._samples(entries).responses
        for n in range(len(entries)):
            fit_calibration(candidate, responses, [n], self._stage, self._strategy)
            yield TrainerState.EVALUATING
        candidate.weights.calibration.save(self._directory)

    def _as_served(self, samples: SampleSet) -> bool:
        if self._checked is None:
            return True
        handed = self._handed
        check = self_check(
            samples,
            handed.in_force,
            self._stage,
            version=handed.target_version,
            tables=self._tables,
            drafter_version=handed.drafter_key,
        )
        self._checked.compared_cycles += check.compared
        self._checked.different_cycles += check.different
        return not check.different

    def _observe(self, candidate: ReplayedDrafter, samples: SampleSet) -> None:
        plan = PinnedPlan(self._strategy)
        both = evaluate(
            samples.responses,
            range(len(samples)),
            [Task(self._handed.in_force, plan), Task(candidate, plan)],
            self._stage,
        )
        before, after = (figures.by_response(walked) for walked in both)
        self._test.observe(
            before.cycles_N.astype(np.float64),
            after.cycles_N.astype(np.float64),
            samples.responses.group_N[before.response_N],
        )
        self._walked.append(both)
        self._judged.append(samples)

    def _outcome(self, refused: str) -> RoundEnd:
        before, after = (Walked.joined([both[i] for both in self._walked]) for i in range(2))
        handed, gain = self._handed, self._test.gain
        ms_before, ms = self._mean_ms(before), self._mean_ms(after)
        digest = xxhash.xxh3_64_hexdigest((self._directory / SINGLE).read_bytes())[:8]
        version = version_of(handed.target_version, self._number, digest)
        judged = Judged(
            candidate=self._number,
            version=version,
            target_version=handed.target_version,
            drafter_version=handed.drafter_version,
            outcome=refused or "offered",
            groups=self._test.groups,
            gain=float(gain.value),
            gain_low=float(gain.low),
            gain_high=float(gain.high),
            accept_length=figures.accept_length(after),
            accept_length_before=figures.accept_length(before),
            ms_per_cycle=ms.per_cycle,
            ms_per_cycle_before=ms_before.per_cycle,
            ms_per_token=ms.per_token,
            ms_per_token_before=ms_before.per_token,
            accepted_at_depth=figures.by_depth(after, self._strategy.depth),
        )
        if refused:
            return RoundEnd(refused, judged)
        offer = Offer(
            directory=str(self._directory), version=version, target_version=handed.target_version
        )
        return RoundEnd("", judged, offer)

    def _mean_ms(self, walked: Walked) -> figures.MeanMs:
        """Return the time of the cycles for a sequence that runs alone."""
        cost = self._handed.cost
        ms_C = figures.cycle_ms(walked, [self._strategy], cost, 1) if cost is not None else None
        return figures.mean_ms(walked, ms_C)

    def _samples(self, entries: Sequence[Recorded]) -> SampleSet:
        return sample_set([entry.sample for entry in entries], Identity("", ""), self._vocab_size)
