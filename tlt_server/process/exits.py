"""Words for the end of a child process, by the status that `subprocess` gives it."""

from __future__ import annotations

import signal


def exit_of(status: int) -> str:
    """Return how a process ended: with which status, or by which signal."""
    if status >= 0:
        return f"ended with status {status}"
    named = {each.value: each.name for each in signal.Signals}
    return f"was ended by {named.get(-status, f'signal {-status}')}"
