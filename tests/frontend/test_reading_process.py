"""The reading process: what it answers, that small work never waits for large, and what its end,
its hanging and a client's leaving do.
"""

import asyncio
import os
import random
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import UNSET, Struct, UnsetType

import tlt_server
from tests.unit.hostile_values import bodies
from tests.waiting import in_loop, in_loop_with
from tlt_server.errors import InvalidRequest, QueueFull, TltError, TooLarge, Unavailable
from tlt_server.frontend.dialects.native import FORMS
from tlt_server.frontend.dialects.weights.requests import PUSH
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.generation.tokenizing import SLICE_CHARS, encode
from tlt_server.frontend.http.parsing import PARSED_APART
from tlt_server.frontend.reading import asking, jobs
from tlt_server.frontend.reading import reader as reader_module
from tlt_server.frontend.reading.asking import Asker
from tlt_server.frontend.reading.frames import (
    FRAME_BYTES,
    PACKED_CHARS,
    Builder,
    cut,
    name_of,
    sliced,
)
from tlt_server.frontend.reading.jobs import Job, JobQueue, Patience, Slice
from tlt_server.frontend.reading.reader import CALM_S, HANG_S, DoublingWait, Reader
from tlt_server.frontend.rpc.methods import ARRIVED_APART
from tlt_server.wire.packed import PackedIds, PackedText, json_ids, json_text

T = TypeVar("T")
SIZES = {"total": 1, "largest": 1}
LARGE = 2**22  # bytes that a job says it has, so that it gets the lane for the largest


class Leaf(Struct):
    prompt: str
    ids: PackedIds | UnsetType = UNSET


class Tree(Struct, kw_only=True):
    leaves: list[Leaf]
    more: dict[str, Any] = {}


def built(value: Any) -> tuple[Any, int]:
    """Return the value as it comes out of its pieces, and the size of the largest."""
    builder, largest = Builder(), 0
    for piece in cut(value):
        builder.take(piece)
        largest = max(largest, len(piece))
    return builder.value, largest


def run(model: Path, work: Callable[[Reader], Awaitable[T]], **options: Any) -> T:
    async def main() -> T:
        with closing(Reader(model, **options)) as reader:
            return await work(reader)

    return asyncio.run(main())


def with_reader(**options: Any) -> Any:
    """Give a coroutine that is a test the argument `reader`."""

    @contextmanager
    def reading(model: Path) -> Iterator[dict[str, Any]]:
        with closing(Reader(model, **options)) as reader:
            yield {"reader": reader}

    return in_loop_with(reading, "reader")


def texts(*some: str) -> Slice:
    data = [text.encode() for text in some]
    return Slice(("encode", [*map(len, data)], True), lambda: sliced(data))


async def tokenised(reader: Reader, text: str, key: str = "", total: int = 0) -> list[int]:
    [[ids]] = await reader.ask(key, [texts(text)], total=total, largest=total)
    return ids.list()


def die() -> Slice:
    """Return a slice that ends a process with `DEADLY`, once others are under way."""
    return Slice(("die",), list)


DEADLY = """
import os, sys, time
from tlt_server.frontend.reading_process import __main__
__main__.JOBS["die"] = lambda text, payload: time.sleep(0.3) or os.abort()
__main__.JOBS["hang"] = lambda text, payload: time.sleep(600)
__main__.JOBS["wait"] = lambda text, payload: time.sleep(1)
__main__.JOBS["work"] = lambda text, payload: [None for _ in iter(int, 1)]
__main__.main(sys.argv[1:])
"""


@pytest.fixture
def _deadly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "COMMAND", (sys.executable, "-c", DEADLY))


def test_values_survive_being_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt_server.frontend.reading.frames.named", lambda name: CLASSES[name])
    rng = random.Random(1)
    leaves = [Leaf("x" * rng.randrange(900), PackedIds.of(range(i))) for i in range(400)]
    leaves += [Leaf("é" * 20_000), Leaf("y", PackedIds.of(range(70_000)))]
    deep = {"a": [[], {}, [1, [2.5, None, {"b": ["\U0001f600" * 40_000] * 3}]], *range(99_999)]}
    wide = (
        [[2**63 + i for i in range(999)]] * 40,
        {"\U0001f600" * 4000 + str(i): i for i in range(99)},
    )
    for value in (*wide, Tree(leaves=leaves, more=deep), [], {}, None, "x", [[[]] * 5000] * 40, 7):
        back, largest = built(value)
        assert back == value
        assert largest <= 3 * FRAME_BYTES


CLASSES = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in (Leaf, Tree, PackedIds)}


def test_long_texts_stay_packed_in_listed_fields_only() -> None:
    long = "aé\U0001f600" * PACKED_CHARS
    back, largest = built({"prompt": long})
    assert isinstance(back["prompt"], PackedText) and largest <= 3 * FRAME_BYTES
    assert back["prompt"].whole() == long and len(back["prompt"]) == len(long)
    assert msgspec.json.decode(b"".join(json_text(back["prompt"]))) == long
    with pytest.raises(InvalidRequest, match=r"^user has a text of 786432 characters; the limit"):
        built({"user": long})
    with pytest.raises(InvalidRequest, match=r"^text has a text of 786432 characters; the limit"):
        built({"metadata": {"text": long}})
    with pytest.raises(InvalidRequest, match="a field name of 5000 characters"):
        built({"x" * 5000: [1]})


def test_packed_ids_equal_the_list_of_ids() -> None:
    ids = [*range(20_000)]
    packed = PackedIds.of(ids)
    assert packed == ids and len(packed) == 20_000 and packed.greatest() == 19_999
    assert msgspec.json.decode(b"".join(json_ids(packed))) == ids
    assert msgspec.json.decode(b"".join(json_ids(PackedIds.of([])))) == []


@with_reader()
async def test_the_process_tokenises_decodes_and_renders(reader: Reader, model: Path) -> None:
    text, long = Text.load(model), "line of text\n" * 9000
    ids = await tokenised(reader, long)
    assert ids == text.encode([long])[0]
    data = PackedIds.of(ids).packed
    [back] = await reader.ask(
        "", [Slice(("decode", True), lambda: sliced([data]))], total=1, largest=1
    )
    assert back == long
    chat = [{"role": "user", "content": long}] * 2
    [said] = await reader.ask(
        "", [Slice(("render",), lambda: cut([chat, None, {}]))], total=1, largest=1
    )
    assert said == text.render(chat)


@with_reader()
async def test_errors_of_the_process_keep_their_type_or_hide_details(reader: Reader) -> None:
    long = [{"role": "user", "content": "", "name": "x" * PACKED_CHARS}]
    for slice, kind, says in (
        (Slice(("render",), lambda: cut([long, None, {}])), InvalidRequest, "^name has a te"),
        (Slice(("parse", "tlt_server.errors:from_code", 1, 2, 3), lambda: []), TltError, "^une"),
        (Slice(("parse", "os:system"), lambda: [b"true"]), TltError, "AssertionError"),
    ):
        with pytest.raises(kind, match=says):
            await reader.ask("", [slice], total=1, largest=1)
    assert await tokenised(reader, "abc") == [97, 98, 99]


@with_reader()
async def test_small_jobs_run_next_to_the_largest_job(reader: Reader) -> None:
    await tokenised(reader, "x")
    large, served = asyncio.create_task(tokenised(reader, "ab" * 10**6, total=LARGE)), 0
    while not large.done():
        assert await tokenised(reader, "2+2=") == [*b"2+2="]
        served += 1
    assert len(await large) == 2 * 10**6
    assert served > 20, "one that waits for the large one is the only one"


@with_reader()
async def test_killed_process_is_replaced_and_its_jobs_are_resendable(reader: Reader) -> None:
    await tokenised(reader, "x")
    for number in (signal.SIGKILL, signal.SIGSEGV):
        large = asyncio.create_task(tokenised(reader, "ab" * 10**6, total=LARGE))
        await under_way(reader)
        waits = asyncio.create_task(tokenised(reader, "waits", total=LARGE))
        await asyncio.sleep(0)
        before = reader.pid
        assert before is not None
        os.kill(before, number)
        with pytest.raises(Unavailable, match="send it again"):
            await large
        assert await waits == [*b"waits"]
        assert reader.pid not in (None, before)


async def under_way(reader: Reader) -> None:
    while reader._under_way[-1] is None:  # noqa: ASYNC110 (a test of what has no event)
        await asyncio.sleep(0.005)


def test_a_failed_launch_is_tried_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, refusals = Reader._launch, [OSError(24, "Too many open files")] * 2

    def refused(reader: Reader, sockets: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return launch(reader, sockets)

    monkeypatch.setattr(Reader, "_launch", refused)
    assert run(model, lambda reader: tokenised(reader, "ab"))
    assert not refusals


@with_reader()
@pytest.mark.usefixtures("_deadly")
@pytest.mark.parametrize("leaves", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_job_crashing_the_process_is_identified_among_several(
    reader: Reader, leaves: bool
) -> None:
    await tokenised(reader, "x")
    crashing = asyncio.create_task(reader.ask("greedy", [die()], total=LARGE, largest=LARGE))
    await under_way(reader)
    if leaves:
        crashing.cancel()
    while not reader._waits:
        assert await tokenised(reader, "ab" * 2**9, "small") == [*b"ab"] * 2**9
    assert {*reader._waits} == {"greedy"}
    with pytest.raises(asyncio.CancelledError if leaves else TooLarge):
        await crashing


@with_reader(memory_mb=777)
@pytest.mark.usefixtures("_deadly")
async def test_only_the_key_of_crashing_jobs_is_delayed(reader: Reader) -> None:
    for _ in range(3):
        with pytest.raises(TooLarge, match="more than the 777 MiB that the reading process"):
            await reader.ask("greedy", [die()], total=LARGE, largest=LARGE)
    rests = asyncio.create_task(tokenised(reader, "rests", "greedy", total=LARGE))
    await asyncio.sleep(0)
    assert await tokenised(reader, "at once", "small", total=LARGE) == [*b"at once"]
    assert not rests.done()
    assert await rests == [*b"rests"]


@with_reader()
@pytest.mark.usefixtures("_deadly")
async def test_hung_trial_job_delays_other_jobs_only_briefly(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "TRIAL_S", 0.5)
    await tokenised(reader, "x")
    hangs = asyncio.create_task(reader.ask("a", [Slice(("hang",), list)], **SIZES))
    crashes = asyncio.create_task(reader.ask("a", [die()], total=LARGE, largest=LARGE))
    await under_way(reader)
    with pytest.raises(Unavailable):
        await hangs
    with pytest.raises(TooLarge):
        await crashes
    assert await tokenised(reader, "y", "b") == [ord("y")]


def test_restart_delay_doubles_while_failures_repeat() -> None:
    now_s = 0.0
    wait = DoublingWait(lambda: now_s)
    assert [wait.longer() for _ in range(9)] == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30]
    now_s = CALM_S
    assert [wait.longer() for _ in range(2)] == [0.25, 0.5]


@with_reader()
async def test_hung_reading_process_is_replaced(reader: Reader) -> None:
    await tokenised(reader, "x")
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, reader.pid, os.WSTOPPED | os.WNOWAIT)
    reader._hang_s = 1.0
    hangs = asyncio.create_task(tokenised(reader, "y"))
    while reader._under_way[0] is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    reader._hang_s = HANG_S
    bystander = asyncio.create_task(tokenised(reader, "w", total=LARGE))
    with pytest.raises(Unavailable, match="send it again"):
        await hangs
    assert await bystander == [ord("w")]
    assert await tokenised(reader, "z") == [ord("z")]


@with_reader()
@pytest.mark.usefixtures("_deadly")
async def test_job_time_limit_counts_cpu_time_not_waiting(reader: Reader) -> None:
    """A slice that waits is not refused, as one that gets no core; one that works for long is."""
    patience = Patience(0.2, lambda: InvalidRequest("too much work"))

    async def does(name: str) -> Any:
        slices = [Slice((name,), list)]
        return await reader.ask("", slices, total=LARGE, largest=1, patience=patience)

    assert await does("wait") == [None]
    with pytest.raises(InvalidRequest, match="too much work"):
        await does("work")
    assert await tokenised(reader, "served") == [*b"served"]


@with_reader(memory_mb=128)
async def test_a_job_needing_more_memory_is_too_large(reader: Reader) -> None:
    for text in ("a" * 2**21, "b" * 2**22):  # one does without memory in Python, one in Rust
        with pytest.raises(TooLarge, match="smaller parts"):
            await tokenised(reader, text, total=LARGE)
    assert await tokenised(reader, "still here") == [*b"still here"]


@with_reader()
async def test_remaining_slices_of_a_departed_client_are_dropped(reader: Reader) -> None:
    sent = []

    def slices() -> Iterator[Slice]:
        for i in range(1000):
            sent.append(i)
            yield texts("ab" * 20_000)

    asked = asyncio.create_task(reader.ask("", slices(), total=LARGE, largest=40_000))
    while len(sent) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    began = len(sent)
    await tokenised(reader, "x" * 10, total=2**17)
    assert len(sent) <= began + 1


def test_the_process_ends_with_the_server_and_gets_no_keys(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLT_API_KEYS", "secret")

    async def work(reader: Reader) -> int:
        await tokenised(reader, "x")
        assert reader.pid is not None
        check(Path(f"/proc/{reader.pid}"))
        return reader.pid

    def check(process: Path) -> None:
        environment = (process / "environ").read_text()
        assert "secret" not in environment and "RAYON_NUM_THREADS=1" in environment
        assert "libtorch" not in (process / "maps").read_text()

    assert not Path(f"/proc/{run(model, work, secrets=('TLT_API_KEYS',))}").exists()


@with_reader()
async def test_running_process_ignores_replaced_source_files(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tlt_server"
    shutil.copytree(Path(tlt_server.__file__).parent, package, ignore=only_modules)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    kinds: list[tuple[str, tuple[str, ...] | None]]
    kinds = [(name_of(kind), None) for kind in bodies().values()]
    kinds += [(name_of(form.choose), form.names) for form in (FORMS, PUSH)]
    await tokenised(reader, "x")
    shutil.rmtree(package)
    for kind in kinds:
        arguments = (PARSED_APART, *kind, [8, 100, 101, 4, 4, 8])
        with pytest.raises(InvalidRequest):
            await reader.ask("", [Slice(("parse", *arguments), lambda: [b"[]"])], **SIZES)
    message = Slice(("parse", ARRIVED_APART, "Generate"), lambda: [b"\xff"])
    with pytest.raises(InvalidRequest):
        await reader.ask("", [message], **SIZES)
    chat = [{"role": "user", "content": "x"}]
    await reader.ask("", [Slice(("render",), lambda: cut([chat, None, {}]))], **SIZES)
    await reader.ask("", [Slice(("decode", True), lambda: [bytes(4)])], **SIZES)


def only_modules(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if "." in name and not name.endswith((".py", ".pyc"))}


@with_reader()
async def test_closed_reading_process_refuses_jobs(reader: Reader) -> None:
    reader.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await tokenised(reader, "x")


@in_loop
async def test_keys_share_the_reading_process_by_time() -> None:
    queue = JobQueue()
    for _ in range(40):
        queue.add(Job("greedy", [texts("a")] * 3))
    served = []
    for i in range(40):
        if i == 10:
            for _ in range(10):
                queue.add(Job("small", [texts("b")]))
        job = await queue.next()
        served.append(job.key)
        job.take(None)
        if not job.done.done():
            queue.again(job)
        queue.charge(job, 0.05)
    assert served[10:30].count("small") >= 9


@in_loop
async def test_reading_queue_is_bounded_for_each_key() -> None:
    queue = JobQueue()
    for _ in range(jobs.MAX_WAITING_KEY):
        queue.add(Job("a", [texts("a")]))
    with pytest.raises(QueueFull, match="of this key wait to be read; the limit is 256: send"):
        queue.add(Job("a", [texts("a")]))
    queue.add(Job("b", [texts("a")]))


@with_reader()
async def test_texts_are_tokenised_in_slices_and_stay_in_order(reader: Reader, model: Path) -> None:
    text, rng = Text.load(model), random.Random(2)
    some = ["x" * rng.choice((0, 1, 50, 3000, SLICE_CHARS + 1)) + str(i) for i in range(60)]

    async def connected() -> Any:
        await asyncio.sleep(3600)

    asking._ASKER.set(Asker(reader, "", connected))
    found = await encode(text, some, some, 10**6, special=True)
    assert [ids.list() for ids in found] == text.encode(some)
