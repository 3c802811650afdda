"""The work of the spot trainer: rounds over recorded sequences, each with a candidate that is
replayed against the active drafter.

A round draws sequences with features of the active weights, trains on them, and writes the
candidate with a calibration fitted to the same sequences. Held-out prompts decide, after the
self-check: a difference from the server's counts blocks the adoption. The trained state continues
over rounds and target pushes; a candidate that is proven worse is reset to the active drafter.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from tlt_server.errors import StartupError
from tlt_server.models.draft_networks import ARCHITECTURES
from tlt_server.models.training_memory import TrainingShape
from tlt_server.process.machine import resident_bytes
from tlt_server.samples.segments import Recorded
from tlt_server.samples.tables import read_tables, table_file
from tlt_server.trainer.learning.network import TrainableDrafter
from tlt_server.trainer.learning.objectives import make_objective
from tlt_server.trainer.learning.pack import Cursor, Packer, PacksAhead
from tlt_server.trainer.learning.step import AdamWSettings, Trainer, default_rate, memory_errors
from tlt_server.trainer.process.gathering import Lacking
from tlt_server.trainer.process.saved_run import NUMBER, CandidateNumbers, SavedRun
from tlt_server.trainer.process.schedule import FIRST_STEPS, TrialSpacing
from tlt_server.trainer.process.spot import Round, RoundEnd
from tlt_server.trainer.process.trial import FITTED, Trial
from tlt_server.trainer.recording import sampling
from tlt_server.trainer.recording.buffer import SampleBuffer
from tlt_server.trainer.recording.recorded import RecordedDocuments
from tlt_server.trainer.recording.state_store import StateStore, recompute_of
from tlt_server.trainer.replaying.handed import Handed, read_handed
from tlt_server.wire.kept import DrafterForm, read_form
from tlt_server.wire.training import (
    NO_DATA,
    Facts,
    HandedOver,
    TrainerSettings,
    TrainerState,
    candidate_directory,
)

EPOCHS = 3  # passes of a round over its sequences, at most
SAVED_EVERY = 12  # steps between checkpoints
JUDGED_GROUPS = 256  # held-out prompts, the newest ones of each key
LEAST_GROUPS = 4
DRAWN = 4096  # sequences of a round, at most
RESTORED = 3  # times that a run may go back to its last good state

Strata = dict[sampling.Stratum, list[Recorded]]


def make_work(
    settings: TrainerSettings, device: str, buffer: SampleBuffer, states: StateStore
) -> DrafterWork:
    """Return the work of this process, with its compute threads."""
    torch.set_num_threads(settings.threads)
    return DrafterWork(settings, device, buffer, states)


class DrafterWork:
    def __init__(
        self, settings: TrainerSettings, device: str, buffer: SampleBuffer, states: StateStore
    ) -> None:
        """`device`: cpu or cuda."""
        self._facts, self._settings, self._device = Facts(), settings, device
        self._directory = Path(settings.work)  # for candidates
        self._buffer, self._states = buffer, states
        # A replay rounds as the engine does, so its counts are the engine's.
        self._repeats = device == "cpu" or settings.numerics == "strict"
        self._handed: Handed | None = None
        self._lineage: dict[str, str] = {}  # names the drafter that the trained state follows
        self._saved_as: dict[str, str] = {}  # the lineage under which its checkpoints lie
        self._candidate = ""  # digest of the last candidate
        self._trainer: Trainer | None = None
        self._saved = SavedRun(Path(settings.checkpoints), Path(settings.model))
        self._numbers = CandidateNumbers(self._directory.with_name(NUMBER))
        self._wanted: list[Recorded] | None = None  # sequences of the next round
        self._longest = 0  # tokens of a sequence that the engine can compute again
        self._candidates = self._numbers.last  # number of the last one that was written
        self._rounds = 0
        self._spacing = TrialSpacing()
        self._halved = False

    @property
    def facts(self) -> Facts:
        """Return the present counts."""
        self._measure()
        return self._facts

    def install(self, handed: HandedOver) -> None:
        place = Path(handed.directory)
        self._handed = self._wanted = None
        self._longest = handed.longest
        self._spacing.renewed()
        # The last candidate stays for clients, until the next one is written.
        self._clear("*", place, self._candidate_directory)
        with memory_errors():
            self._handed = read_handed(
                place,
                Path(self._settings.model),
                handed.target,
                handed.drafter,
                self._device,
                handed.leaves,
                handed.quantization,
            )
            self._follow(self._handed)

    def _follow(self, handed: Handed) -> None:
        """Continue with the trained state if it belongs to the active drafter. That may have
        another version by now: a client has pushed the last candidate, or the same drafter again.
        """
        before, self._lineage = self._lineage, handed.identity()
        digest = self._lineage["digest"]
        if digest not in (before.get("digest"), self._candidate):
            self._trainer, self._saved_as = None, self._lineage
        if self._trainer is None:
            self._bound(handed.trainable(torch.device("cpu"), torch.float32))
            return
        self._trainer.frozen = self._trainer.network.frozen(handed.embedding_VH, handed.head_CH)
        if self._lineage != before:
            self._checkpoint_as(self._trainer)

    def _bound(self, network: TrainableDrafter) -> None:
        """Choose packs that fit in the memory, and limit the allocator to it."""
        on_gpu = self._device == "cuda"
        shape = TrainingShape.of(network.config, network.draft_vocab_size, on_gpu=on_gpu)
        memory = self._settings.memory or shape.most_bytes
        slots = shape.slots_in(memory)
        if not slots:
            raise StartupError(
                f"{memory // 2**20} MiB are too little for one pack; raise drafter_training_mb"
            )
        if not self._halved:
            self._facts.micro_batch = slots
        if on_gpu:
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, memory / torch.cuda.get_device_properties(0).total_memory), 0
            )

    def lacking(self) -> Lacking:
        assert self._handed is not None
        version = self._handed.target_version
        if self._wanted is None:
            entries = [*self._buffer]
            held = sampling.judging(sampling.evaluated(entries, version), JUDGED_GROUPS)
            wanted = [entry for group in held for entry in group][:JUDGED_GROUPS]
            wanted += self._draw(sampling.strata_of(entries, version))
            self._wanted = [e for e in wanted if len(e.sample.tokens) <= 4 * self._longest]
        self._wanted = self._states.missing(version, self._wanted)
        command = recompute_of(self._wanted)
        self._states.expect(command)
        return Lacking(len(self._wanted), command)

    def ready(self) -> bool:
        assert self._handed is not None
        return bool(self._with_features([*self._buffer], self._handed.target_version))

    def halve(self) -> bool:
        done, self._halved = self._halved, True
        if not done:
            self._facts.micro_batch //= 2
        return not done

    def adopted(self, version: str) -> None:
        assert self._handed is not None
        directory = self._candidate_directory
        with memory_errors():
            in_force = self._handed.replayed(directory)
        self._handed = self._handed._replace(
            drafter_version=version, directory=directory, in_force=in_force
        )
        self._lineage = self._handed.identity()
        self._spacing.renewed()
        self._numbers.adopted(self._candidates)
        if self._trainer is not None:
            self._checkpoint_as(self._trainer)

    def release(self) -> None:
        self._saved.end()
        self._trainer = None
        gc.collect()  # a trainer and what it calls before an update hold each other
        if self._device == "cuda":
            torch.cuda.empty_cache()

    # -- a round -----------------------------------------------------------------------------------

    def round(self) -> Round:
        assert self._handed is not None
        with memory_errors():
            trainer = self._trainer or self._build(self._handed)
            return (yield from self._round(self._handed, trainer))

    def _round(self, handed: Handed, trainer: Trainer) -> Round:
        entries, version = [*self._buffer], handed.target_version
        self._wanted = None
        drawn = self._draw(self._with_features(entries, version))
        documents = RecordedDocuments.of(drawn, self._states, version)
        if max(documents.lengths, default=0) < 3:
            return RoundEnd(NO_DATA)
        self._rounds += 1
        steps = trainer.objective.steps
        packer, cursor = Packer(documents, self._facts.micro_batch, steps, self._rounds), Cursor()
        yield TrainerState.TRAINING
        with PacksAhead(packer, trainer.network.device, trainer.network.compute) as packs:
            for done in range(min(self._spacing.left, EPOCHS * len(packer.plan(0)))):
                if done % SAVED_EVERY == 0:
                    self._save(trainer)
                placed = packer.plan(cursor.epoch)[cursor.pack]
                cursor = yield from self._step(trainer, packs, cursor)
                self._spacing.trained()
                for window, _ in placed:
                    self._facts.tokens += window.slots
                    self._facts.recomputed_tokens += (
                        window.slots * documents.recomputed[window.document]
                    )
        if trainer.restored > RESTORED:
            remedy = "loss or gradient is not finite again and again; start from another drafter"
            return RoundEnd("not_finite", pause=remedy)
        groups = [] if self._spacing.left else self._held_out(entries, version)
        if judged := len(groups) >= LEAST_GROUPS:
            self._numbers.take()  # the checkpoint has it, too
        self._save(trainer)
        self._saved.settle()
        if self._spacing.left:
            return RoundEnd(paid=True)
        yield TrainerState.EVALUATING
        if not judged:
            self._spacing.judged(0.0)
            return RoundEnd(NO_DATA)
        outcome = yield from self._judge(handed, trainer, groups, drawn)
        gain = outcome.judged.gain if outcome.judged else 0.0
        return outcome._replace(paid=self._spacing.judged(gain))

    def _with_features(self, entries: Sequence[Recorded], version: str) -> Strata:
        """Return the sequences with features that may be trained on, by stratum."""
        strata = sampling.strata_of(entries, version)
        found: Strata = {}
        for stratum, those in strata.items():
            if kept := self._states.having(version, those):
                found[stratum] = kept
        count = sum(map(len, strata.values())) - sum(map(len, found.values()))
        self._facts.without_features = count
        return found

    def _draw(self, strata: Strata) -> list[Recorded]:
        """Draw as many sequences as fit in a round, each once."""
        room = max(FIRST_STEPS, self._spacing.left) * self._facts.micro_batch
        drawn: dict[int, Recorded] = {}
        for entry in sampling.draw(strata, DRAWN, 0, self._rounds):
            room -= 0 if entry.number in drawn else len(entry.sample.tokens) // 4
            drawn[entry.number] = entry
            if room <= 0:
                break
        return [*drawn.values()]

    def _step(
        self, trainer: Trainer, packs: PacksAhead, cursor: Cursor
    ) -> Generator[TrainerState, None, Cursor]:
        (pack, after), last = packs.next(cursor), ""
        segments = trainer.segments([pack])
        try:
            while True:
                try:
                    last = next(segments)
                except StopIteration as end:
                    outcome = end.value
                    break
                yield TrainerState.TRAINING
        except GeneratorExit:
            if last == "optimizer":
                for _ in segments:
                    pass  # a step that changes weights already runs to its end
            else:
                trainer.abandon()
            raise
        except (RuntimeError, MemoryError):
            trainer.restore(trainer.good)
            raise
        facts = self._facts
        facts.steps, facts.undone_steps = trainer.state.step, trainer.undone
        facts.loss, facts.loss_at_depth = outcome.loss, [*outcome.loss_S]
        return after

    # -- the trained state -------------------------------------------------------------------------

    def _build(self, handed: Handed) -> Trainer:
        device = torch.device(self._device)
        network = handed.trainable(device, torch.bfloat16 if device.type == "cuda" else torch.float)
        kind = ARCHITECTURES[network.config.architecture]
        objective = make_objective(kind.objective, "total-variation")
        rate = default_rate(handed.frame.hidden_size)
        frozen = network.frozen(handed.embedding_VH, handed.head_CH)
        trainer = Trainer(network, frozen, objective, AdamWSettings(lr=rate))
        found, faults = self._saved.newest(trainer, self._saved_as)
        if found is not None:
            trainer.resume(found.state)
            self._rounds, candidates = found.state.cursor[:2]
            self._numbers.after(candidates)
        self._checkpoint_as(trainer)
        self._facts.checkpoint_error = "; ".join(faults)
        return trainer

    def _checkpoint_as(self, trainer: Trainer) -> None:
        """Write checkpoints under the active drafter from now on, and remove all others."""
        self._saved_as, self._trainer = self._lineage, trainer
        self._saved.follow(trainer, self._lineage, self._cursor)

    @property
    def _cursor(self) -> tuple[int, int]:
        return self._rounds, self._numbers.last

    def _save(self, trainer: Trainer) -> None:
        self._saved.save(trainer, self._cursor)

    def _measure(self) -> None:
        facts, written = self._facts, self._saved.checkpoints
        facts.rounds = self._rounds
        if written is not None:
            facts.checkpoints = written.written
            facts.checkpoint_error = "; ".join(
                filter(None, (written.failure, self._numbers.failure))
            )
            facts.checkpoint_stall_ms = 1e3 * written.stall_s
        facts.memory_bytes = resident_bytes()
        if self._device == "cuda":
            facts.memory_bytes += torch.cuda.memory_reserved()

    # -- the candidate -----------------------------------------------------------------------------

    @property
    def _candidate_directory(self) -> Path:
        return self._directory / candidate_directory(self._candidates)

    def _clear(self, pattern: str, *kept: Path) -> None:
        """Remove directories of handed-over weights or candidates, by name pattern."""
        for found in self._directory.glob(pattern):
            if found not in kept:
                shutil.rmtree(found, ignore_errors=True)

    def _judge(
        self,
        handed: Handed,
        trainer: Trainer,
        groups: Sequence[list[Recorded]],
        drawn: list[Recorded],
    ) -> Round:
        # A value beyond these would be written as Inf.
        most = torch.finfo(torch.bfloat16).max
        if not bool(torch.linalg.vector_norm(trainer.state.weight_P, torch.inf) <= most):
            trainer.restore(trainer.good)
            return RoundEnd("not_finite")
        self._clear(candidate_directory("*"), handed.directory)
        self._candidates = self._numbers.last
        kept = [*drawn[:FITTED], *(entry for group in groups for entry in group)]
        trial = Trial(
            handed,
            self._candidate_directory,
            self._candidates,
            self._numbers.before,
            self._states.only(handed.target_version, kept),
            self._buffer.header.vocab_size,
            self._facts if self._repeats else None,
            read_tables(table_file(Path(self._settings.ring))),
        )
        trial.write(trainer.network)
        outcome = yield from trial.run(drawn[:FITTED], groups)
        if outcome.refused in ("worse", "no_gain") and self._form_is_open(handed):
            yield from self._judge_form(trial)
        self._candidate = trial.digest
        if outcome.refused == "worse":  # got worse: begin again from the active drafter
            self._saved.forget()
            self._trainer, self._candidate = None, ""
        return outcome

    def _form_is_open(self, handed: Handed) -> bool:
        """Return True if the drafter might be faster in FP8: on a GPU, which reads its weights."""
        drafter, file = Path(self._settings.drafter), self._settings.form
        may = bool(file) and handed.quantization == "none" and self._device != "cpu"
        return may and read_form(Path(file), drafter) is None

    def _judge_form(self, trial: Trial) -> Generator[TrainerState, None, None]:
        test = yield from trial.judge_form()
        if test.passed:
            found = DrafterForm(drafter=self._settings.drafter, lost=test.lost.value)
            found.write(Path(self._settings.form))

    def _held_out(self, entries: list[Recorded], version: str) -> list[list[Recorded]]:
        """Return the held-out prompts for the judgement, each with its sequences that have
        states.
        """
        held = self._states.having(version, sampling.evaluated(entries, version))
        return sampling.judging(held, JUDGED_GROUPS)
