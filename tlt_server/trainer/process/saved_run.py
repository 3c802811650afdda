"""The files of a training run: the checkpoints of its state, in a directory per active drafter, and
the number of its last candidate.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import xxhash

from tlt_server.process.private import private_file
from tlt_server.trainer.learning.checkpoint import Checkpoints, Found, newest
from tlt_server.trainer.learning.step import Trainer

NUMBER = "last-candidate"  # file next to the directory of candidates


class SavedRun:
    """Checkpoints of a run. `lineage` names the active drafter: its version and a digest."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory, self._model = directory, model
        self._checkpoints: Checkpoints | None = None

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Return the writer of checkpoints; None before a state is trained."""
        return self._checkpoints

    def newest(
        self, trainer: Trainer, lineage: Mapping[str, str]
    ) -> tuple[Found | None, list[str]]:
        """Return the newest checkpoint of a lineage, if any, and the faults of others."""
        directory, identity = self._place(trainer, lineage)
        return newest(directory, identity) if directory.is_dir() else (None, [])

    def follow(self, trainer: Trainer, lineage: Mapping[str, str], cursor: tuple[int, ...]) -> None:
        """Write checkpoints of this trainer under a lineage from now on, and remove all others."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        directory, identity = self._place(trainer, lineage)
        self._checkpoints = Checkpoints(directory, trainer, identity)
        self.save(trainer, cursor)
        self.settle()
        for other in self._directory.glob("*"):
            if other != directory:
                shutil.rmtree(other, ignore_errors=True)

    def save(self, trainer: Trainer, cursor: tuple[int, ...]) -> None:
        """Start a checkpoint of the present state."""
        trainer.state.cursor = cursor
        assert self._checkpoints is not None
        self._checkpoints.begin()

    def settle(self) -> None:
        """Write the checkpoint that was started."""
        assert self._checkpoints is not None
        self._checkpoints.settle()

    def end(self) -> None:
        """Write the last state and release it."""
        if self._checkpoints is not None:
            self._checkpoints.finish()
        self._checkpoints = None

    def forget(self) -> None:
        """Remove all checkpoints and release the state."""
        if self._checkpoints is not None:
            self._checkpoints.close()  # nothing is written after the removal
        self._checkpoints = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _place(self, trainer: Trainer, lineage: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
        """Return the directory of a lineage's checkpoints, and their identity."""
        identity = {
            **lineage,
            "weights": str(len(trainer.state.weight_P)),
            "model": str(self._model),
        }
        name = xxhash.xxh3_64_hexdigest(repr(sorted(identity.items())).encode())
        return self._directory / name, identity


class CandidateNumbers:
    """Numbers of candidates, each used once: the file has a number before it is used, so the
    process after a killed one continues with the next. Clients may still read the last candidate,
    and each candidate is tested at its own level. The file has the last number, and the number of
    the last adopted candidate.
    """

    def __init__(self, file: Path) -> None:
        """`file`: kept as long as the server."""
        self._file, self.failure = file, ""
        self.last = self._adopted = 0
        try:
            self.last, self._adopted = map(int, self._file.read_text().split())
        except FileNotFoundError:
            pass
        except (ValueError, OSError) as error:
            self.failure = f"{self._file}: no numbers can be read from it ({error})"

    @property
    def before(self) -> int:
        """Return how many candidates were tested between the last adoption and the last
        candidate.
        """
        return max(0, self.last - self._adopted - 1)

    def adopted(self, number: int) -> None:
        self._adopted = number
        self._write()

    def after(self, number: int) -> None:
        """Continue with numbers above this one."""
        self.last = max(self.last, number)

    def take(self) -> int:
        """Return the next number. If it cannot be written, `failure` has the reason."""
        self.last += 1
        self._write()
        return self.last

    def _write(self) -> None:
        draft = self._file.with_suffix(".part")
        try:
            with open(draft, "w", opener=private_file) as file:
                file.write(f"{self.last} {self._adopted}")
            os.replace(draft, self._file)
            self.failure = ""
        except OSError as error:
            self.failure = f"{self._file}: the number {self.last} was not written ({error})"
