"""Templates that requests bring: each runs in a process of its own, with bounds, and shows nothing
of it.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import descendants
from tests.waiting import in_loop_with
from tlt_server.errors import InvalidRequest, QueueFull, TooLarge, Unavailable
from tlt_server.frontend.generation import tokenizing
from tlt_server.frontend.generation.templates import ChatTemplate
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.reading import asking, renderer
from tlt_server.frontend.reading.asking import Asker
from tlt_server.frontend.reading.reader import Reader

SAID = [{"role": "user", "content": "hi"}]
DEEP = (
    "{% set n = namespace(a=[0], b=[0]) %}{% for i in range(60) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
DOUBLED = (
    "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}"
)
# Templates that would take long, or need much memory, where nothing small stands for them.
DEADLY = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}\n{% endfor %}{% endfor %}",
    "compares": DEEP + "{{ n.a == n.b }}",
    "writes": DEEP + "{{ n.a ~ '' }}",
    "doubles": DOUBLED,
    "recurses": "{% macro m(x) %}{{ m([x, x]) }}{% endmacro %}{{ m(0) }}",
    "nests": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "nests ifs": "{% if 1 %}" * 6000 + "{% endif %}" * 6000,
    "negates": "{{ " + "-" * 60_000 + "1 }}",
}
QUICK = ["loops", "doubles", "nests", "negates"]  # the processor, memory, the parser, the compiler
# Templates whose one operation makes something large. They are refused before it does.
LARGE = (
    "{{ 'a'|center(3999999999) }}",
    "{{ 'a'.center(3999999999) }}",
    "{{ 'a'.ljust(3999999999) }}",
    "{{ 'a'.zfill(3999999999) }}",
    "{{ '\t\t\t'.expandtabs(999999) }}",
    "{{ (1).to_bytes(length=3999999999, byteorder='big') }}",
    "{{ [1] | tojson(indent=2000000000) }}",
    "{{ [1] | tojson(separators=(',' * 999999, ':')) }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%.999999999f' % 1.0 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ ('%99999d' * 99) % ((1,) * 99) }}",
    "{{ '%(a)999999999d' | format(a=1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=999999999) }}",
    "{{ ('{:99999}' * 99).format(*range(99)) }}",
    "{{ '{a:.999999999f}'.format_map({'a': 1.0}) }}",
    "{{ ('<b>{:999999999}' | safe).format(1) }}",
    "{{ 'a\n' | indent(999999999) }}",
    "{{ 1 | round(999999999, 'floor') }}",
    "{{ [1] | batch(999999999, 0) | list }}",
    "{{ [1] | slice(999999999) | list }}",
    "{{ range(999999999) | list }}",
    "{{ lipsum(999999999) }}",
    "{{ 'a' * 10**9 }}",
    "{{ 9 ** (9 ** 7) % 10 }}",
    DEEP + "{{ n.a }}",
    DEEP + "{{ n.a | tojson }}",
    DEEP + "{{ n.a | join }}",
    DEEP + "{{ n.a | string }}",
)
# What a template may hold that is not data.
SHOWN = (
    "'x'.format_map",
    "'x'.format",
    "'x'.upper",
    "'x' | attr('upper')",
    "{}.items",
    "[range]",
    "{'a': cycler}",
    "range",
    "dict",
    "cycler",
    "cycler('a')",
    "cycler('a').next",
    "joiner(',')",
    "namespace",
    "namespace(a=range)",
    "raise_exception",
    "strftime_now",
    "messages | map('upper')",
    "messages | select",
    "'ab' | reverse",
    "[1] | batch(1)",
    "{} | items",
    "[1] | unique",
    "self",
    "self.block",
    "macro",
    "missing",
    "messages.upper",
)
WRITES = (
    "{{ %s }}",
    "{{ (%s) ~ '' }}",
    "{{ '%%s %%r' %% ([%s], 1) }}",
    "{{ '{} {!r}'.format(%s, 1) }}",
    "{{ (%s) | string | upper }}",
    "{{ [%s] | join }}",
    "{{ [%s] | pprint }}",
    "{{ [[%s]] | map('string') | join }}",
    "{{ (%s) | tojson }}",
    "{{ (%s) + 1 }}",
    "{{ (%s).foo.bar }}",
    "{{ raise_exception(%s) }}",
)


Render = Callable[..., Awaitable[str]]


@contextmanager
def rendering(model: Path) -> Iterator[dict[str, Any]]:
    """Give a reader, and what renders a template of a key. No process of templates may be left."""

    async def connected() -> Any:
        await asyncio.sleep(3600)

    with closing(Reader(model)) as reader:
        text = Text.load(model)

        async def render(template: str, key: str = "") -> str:
            asking._ASKER.set(Asker(reader, key, connected))
            found = await tokenizing.render(text, SAID, template=template)
            return found if isinstance(found, str) else found.whole()

        yield {"reader": reader, "render": render}
    assert not descendants(os.getpid(), b"templates")


with_renderer = in_loop_with(rendering, "reader", "render")


def forks() -> int:
    """Count the forks of the process that renders."""
    return len(descendants(os.getpid(), b"templates")) - 1


async def forked(count: int) -> None:
    async with asyncio.timeout(240):
        while forks() != count:  # noqa: ASYNC110 (no event says so)
            await asyncio.sleep(0.02)


@with_renderer
@pytest.mark.parametrize("names", [QUICK, pytest.param([*DEADLY], marks=pytest.mark.long)])
async def test_hostile_templates_are_refused_and_delay_no_request(
    reader: Reader, render: Render, names: list[str]
) -> None:
    assert await render("ready {{ messages[0].content }}") == "ready hi"

    async def deadly() -> None:
        for name in names:
            with pytest.raises(InvalidRequest, match="chat.template") as refused:
                await render(DEADLY[name], "hostile")
            assert "/" not in refused.value.message, name

    hostile, served = asyncio.create_task(deadly()), 0
    while not hostile.done():
        assert await render("on", "other") == "on"
        served += 1
    await hostile
    assert served > 2 * len(names), "another key waits for one of them at most each time"
    assert reader.pid is None, "the reading process has no part in it"


@pytest.mark.parametrize("template", LARGE)
def test_an_oversized_operation_is_refused_beforehand(template: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        ChatTemplate.brought(template, {}).render(SAID)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("shown", SHOWN)
def test_template_cannot_read_its_process(shown: str) -> None:
    macro = "{% block block %}{% endblock %}{% macro macro() %}{% endmacro %}"
    for writes in WRITES:
        try:
            found = ChatTemplate.brought(macro + writes % shown, {}).render(SAID)
        except InvalidRequest as error:
            found = error.message
        for part in ("0x", "jinja2", "tlt_server", "built-in", "<class", "object at", "/"):
            assert part not in found.lower(), found


def test_template_namespace_refuses_python_internals() -> None:
    for template in (
        "{{ namespace(__html__=range) }}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
    ):
        with pytest.raises(InvalidRequest, match="leave out the underscore"):
            ChatTemplate.brought(template, {}).render(SAID)
    for template in ("{{ namespace(self=1).self }}", "{{ dict.fromkeys([1], 2)[1] - 1 }}"):
        assert ChatTemplate.brought(template, {}).render(SAID) == "1"


@with_renderer
async def test_template_of_the_maximum_length_is_rendered(reader: Reader, render: Render) -> None:
    assert await render("\U0001f600" * 2**16) == "\U0001f600" * 2**16
    with pytest.raises(InvalidRequest, match="half a character"):
        await render(r"{{ '\ud83d' }}")
    with pytest.raises(InvalidRequest, match=r"refuses these messages: no \\ud83d"):
        await render(r"{{ raise_exception('no \ud83d') }}")


@with_renderer
async def test_overlong_text_is_refused_inside_the_template_process(
    reader: Reader, render: Render
) -> None:
    with pytest.raises(TooLarge, match="12000000 characters; the server tokenises at most"):
        await render("{% for i in range(12) %}{{ 'a' * 10**6 }}{% endfor %}")


@with_renderer
async def test_templates_of_one_key_run_one_after_the_other(
    reader: Reader, render: Render, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "MAX_WAITING_KEY", 3)
    await render("ready")
    one = [asyncio.create_task(render(DEADLY["loops"], "one")) for _ in range(3)]
    await forked(1)
    await asyncio.sleep(0.5)
    assert forks() == 1
    with pytest.raises(QueueFull, match="3 requests of this key"):
        await render("on", "one")
    for task in one:
        task.cancel()
    await asyncio.gather(*one, return_exceptions=True)
    assert await render("on", "one") == "on"
    await forked(0)


@with_renderer
async def test_without_keys_a_slow_template_delays_no_other_request(
    reader: Reader, render: Render
) -> None:
    await render("ready", "")
    slow = [asyncio.create_task(render(DEADLY["loops"], "")) for _ in range(3)]
    await asyncio.sleep(0)
    assert await render("on", "") == "on" and not any(task.done() for task in slow)
    slow += [asyncio.create_task(render(DEADLY["loops"], "")) for _ in range(3)]
    await asyncio.sleep(0.5)
    forks = len(descendants(os.getpid(), b"templates")) - 1
    assert forks <= renderer.AT_ONCE, "as many as there are for all keys"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


@with_renderer
async def test_lost_template_process_is_restarted(reader: Reader, render: Render) -> None:
    await render("ready")
    assert (pid := reader.renderer.pid)
    running = asyncio.create_task(render(DEADLY["loops"]))
    await forked(1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="send this one again"):
        await running
    assert await render("on") == "on"


@with_renderer
async def test_ending_template_process_is_replaced(reader: Reader, render: Render) -> None:
    """A socket is closed before the end of its process can be seen."""
    await render("ready")
    renderer = reader.renderer
    assert (pid := renderer.pid) and renderer._control is not None
    renderer._control.shutdown(socket.SHUT_WR)
    assert await render("on") == "on" and renderer.pid != pid
