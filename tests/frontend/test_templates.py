"""Templates that requests bring: none runs longer than it may, even within one line."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.generation import tokenizing
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.reading import asking
from tlt_server.frontend.reading.asking import Asker
from tlt_server.frontend.reading.reader import Reader
from tlt_server.frontend.reading_process.deadline import OutOfTime, time_limit

LINES = "{% for i in range(99999) %}{% for i in range(99999) %}\n{% endfor %}{% endfor %}"
ONE_LINE = "{% set a = [0] * 99999 %}{% set b = [0] * 99999 %}{{ ([a] * 999999).count(b) }}"


@pytest.mark.parametrize("template", [LINES, ONE_LINE], ids=["in lines", "in one line"])
def test_a_template_that_takes_too_long_is_refused_and_others_go_on(
    model: Path, template: str
) -> None:
    async def main() -> None:
        async def connected() -> Any:
            await asyncio.sleep(3600)

        with closing(Reader(model)) as reader:
            asking._ASKER.set(Asker(reader, "", connected))
            text, said = Text.load(model), [{"role": "user", "content": "hi"}]
            assert str(await tokenizing.render(text, said, template="ready")) == "ready"
            began = time.monotonic()
            with pytest.raises(InvalidRequest, match="more than 2 s"):
                await asyncio.wait_for(tokenizing.render(text, said, template=template), 20)
            assert time.monotonic() - began > 1.5
            asking._ASKER.set(Asker(reader, "other", connected))
            assert str(await tokenizing.render(text, said, template="on")) == "on"

    asyncio.run(main())


def test_the_time_limit_ends_a_loop_and_leaves_no_trace() -> None:
    with pytest.raises(OutOfTime, match=r"more than 0\.05 s"), time_limit(0.05):
        _loop()
    with time_limit(0.05):
        pass
    time.sleep(0.06)
    assert sum(range(9)) == 36


def _loop() -> None:
    while True:
        pass
