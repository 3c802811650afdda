"""The lock of a state directory, which one process holds."""

import errno
import fcntl
from pathlib import Path

import pytest

from tlt_server.errors import StartupError
from tlt_server.frontend.rollouts.owning import owned


def test_volume_without_locks_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StartupError, match=r"No locks available.*--state-dir"), owned(tmp_path):
        raise AssertionError("it is not taken")


def test_later_lack_of_resources_is_not_taken_for_another_server(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), owned(tmp_path):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
