"""Words for the end of a child process."""

from __future__ import annotations

import pytest

from tlt_server.process.faults import exit_of


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with status 0"),
        (3, "ended with status 3"),
        (-9, "was ended by SIGKILL"),
        (-11, "was ended by SIGSEGV"),
        (-40, "was ended by signal 40"),
    ],
)
def test_an_end_is_named_by_its_status_or_its_signal(status: int, words: str) -> None:
    assert exit_of(status) == words
