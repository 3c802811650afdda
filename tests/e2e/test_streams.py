"""The costliest legal stream against a real server, in full."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from tests.hostile.streams import streams
from tlt_server.demo.server import ServerProcess


@pytest.mark.soak
@pytest.mark.parametrize("incremental", [False, True])
def test_sixteen_long_choices_with_alternatives_disturb_no_other_user(
    server: ServerProcess, incremental: bool
) -> None:
    """Others wait as if the same tokens were generated without a stream: a one-token request waits
    for the engine's steps, a probe for the loop alone.
    """
    url = urlsplit(server.url)
    assert url.hostname is not None and url.port is not None
    found = streams(url.hostname, url.port, "target", incremental=incremental)
    assert found["ratio"] < 2
    assert found["probe_p99_ms_busy"] < 50
    assert found["small_p99_ms_busy"] < max(100, 2 * found["small_p99_ms_plain"])
