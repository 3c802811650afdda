"""Records for the evaluation of drafters: a file of `tlt bench record`, or the segments of a
server.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.samples.identity import identity_of, vocabulary_of
from tlt_server.samples.sample import sample_set
from tlt_server.samples.samples import SampleSet, Verifications
from tlt_server.samples.segments import SUFFIX, Refusals, SegmentHeader, read_segment
from tlt_server.speculation.cost import CostModel
from tlt_server.speculation.recorded import RolloutRecord


class EvaluatedRecord(NamedTuple):
    samples: SampleSet
    path: Path
    policies: tuple[str, ...]  # names of the runs
    run_V: NDArray[np.uint8]  # index into `policies`, of each verification
    device: str = ""  # empty: not known
    longest: int | None = None  # tokens of a sequence on that server
    cost: CostModel | None = None  # the time of its cycles
    decoding: int = 1  # requests of the median cycle
    described: dict[str, Any] = {}
    machine: str = ""
    refused: tuple[str, ...] = ()  # what was left out, and why

    def run(self, name: str | None, drafts_V: NDArray[np.bool_]) -> Verifications:
        """Return the verifications under a policy; by default, under the last one with drafts.
        `StartupError` if there are none.
        """
        named = [
            i for i in np.unique(self.run_V[drafts_V]).tolist() if name in (None, self.policies[i])
        ]
        if not named:
            raise StartupError(
                f"{self.path} has no cycle of this drafter"
                + (f" under {name!r}" if name else "")
                + f"; it has runs under {', '.join(self.policies)}: name another with --policy, or "
                "leave --as-recorded out"
            )
        return some(self.samples.verified, self.run_V == named[-1])

    def positions(self, config: ModelConfig) -> int:
        """Return the positions that a target needs for these responses. `StartupError` if it has
        fewer.
        """
        responses = self.samples.responses
        needed = int((responses.prompt_len_N + responses.output_len_N).max())
        longest = min(config.max_position, self.longest or config.max_position)
        if needed > longest:
            raise StartupError(
                f"{self.path} has a response of {needed} tokens, the target takes {longest}: name "
                "the target that was recorded"
            )
        return longest

    def expect_one_version(self) -> None:
        """Raise `StartupError` unless one version of the target computed all responses."""
        versions = self.samples.legend.versions
        if len(versions) != 1:
            raise StartupError(
                f"{self.path} has responses of the versions {', '.join(versions)}, but --target "
                "has the weights of one; give a --record of only that version"
            )

    def head(self, responses: int | None) -> SampleSet:
        """Return the record with the verifications of its first responses only."""
        if responses is None:
            return self.samples
        verified = self.samples.verified
        return replace(self.samples, verified=some(verified, verified.request_V < responses))


def some(verified: Verifications, which_V: NDArray[np.bool_]) -> Verifications:
    return Verifications(
        **{name: getattr(verified, name)[which_V] for name in Verifications.__dataclass_fields__}
    )


def load_record(path: Path, target: Path) -> EvaluatedRecord:
    """Read a record of this target. `StartupError` names the fault and the remedy."""
    if path.is_dir() or path.suffix == SUFFIX:
        return _segments(path, target)
    record = rollout_of(path, target)
    cost, decoding_C = CostModel(), record.cycles.decoding_C
    cost.restore(record.header.cost)
    return EvaluatedRecord(
        record.samples,
        path,
        tuple(run.policy for run in record.header.runs),
        record.cycles.run_C[record.cycles.cycle_V],
        record.header.device,
        record.header.max_model_len,
        cost,
        max(1, int(np.median(decoding_C[decoding_C > 0]))) if decoding_C.any() else 1,
        record.header.described,
        record.header.machine,
    )


def rollout_of(path: Path, target: Path) -> RolloutRecord:
    """Read a file of `tlt bench record`. `StartupError` if it belongs to another target."""
    record = RolloutRecord.load(path)
    recorded, found = record.header.legend.model, identity_of(target).model
    if recorded and recorded != found:
        raise StartupError(
            f"--target {target} is {found}, {path} was recorded with {recorded}: name the target "
            "that was recorded (its shape and tokenizer count, not its weights)"
        )
    return record


def _segments(path: Path, target: Path) -> EvaluatedRecord:
    """Read one segment file, or all below a directory."""
    identity, vocab_size, refusals = identity_of(target), vocabulary_of(target), Refusals()
    header = SegmentHeader.of(identity, vocab_size)
    files = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
    entries = [entry for file in files for entry in read_segment(file, header, refusals)]
    refused = tuple(refusals.take())
    if not entries:
        raise StartupError(
            f"{path} has no recorded sequence of --target {target}"
            + (f": {refused[0]}" if refused else "")
            + "; name a record of `tlt bench record`, or the segments in a server's state directory"
        )
    entries.sort(key=lambda entry: entry.number)
    samples = sample_set([entry.sample for entry in entries], identity, vocab_size)
    run_V = np.zeros(len(samples.verified), np.uint8)
    return EvaluatedRecord(samples, path, ("the server's",), run_V, refused=refused)
