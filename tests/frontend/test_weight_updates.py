"""Begins, pushes, ends and aborts of weights across each other: slow, in parts, refused by the body
or by the engine.

Against a twin of the engine's transaction, which does commands in the order in which they were
sent. In every order, an end commits or names exactly the pushes of its own update.
"""

import asyncio
import itertools
from collections import deque
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import in_loop
from tlt_server.errors import Conflict, InvalidRequest, TltError
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.standing import WantedVersions
from tlt_server.frontend.weights.session import WeightSession
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    LookAtWeights,
    Manifest,
    NameWeights,
    PushRole,
    PushWeights,
    WeightCommand,
)
from tlt_server.wire.events import WeightReport, WeightState

PARTS = 2  # parts of a divided version


class Came(NamedTuple):
    """A call's push: its number, and the part it brings; None: everything."""

    call: int
    part: int | None


class Open:
    """The twin's one push."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.content = [came_of(manifest)]
        self.state = "staging"
        self.asked = list[str]()
        self.aborted = False  # while it was staged, which takes until something arrives

    @property
    def name(self) -> str:
        """Name the version; a push without one has a name only once it is complete."""
        return self.manifest.version or (
            "" if self.state in ("staging", "gathering") else str(self.content)
        )


def came_of(manifest: Manifest) -> Came:
    call, _, part = manifest.path.partition(".")
    return Came(int(call), int(part) if part else None)


class Twin:
    """The engine, and the link to it."""

    def __init__(self, *, stages: bool = True) -> None:
        ids = itertools.count()
        self.queue: deque[WeightCommand] = deque()
        self.answers: dict[str, asyncio.Future[WeightReport]] = {}
        self.open: Open | None = None
        self.adopting = asyncio.Lock()
        self.live: tuple[str, list[Came]] = ("initial", [])
        self.command_id, self.versions = lambda: str(next(ids)), WantedVersions()
        self.session = WeightSession(cast(EngineClient, self), stages=stages)

    async def weights(self, command: WeightCommand) -> WeightReport:
        self.queue.append(command)
        self.answers[command.id] = asyncio.get_running_loop().create_future()
        return await self.answers[command.id]

    def answer(
        self, id: str, result: str, version: str = "", error: tuple[str, str] | None = None
    ) -> None:
        self.answers.pop(id).set_result(
            WeightReport(
                id=id,
                state=WeightState(target=self.live[0]),
                result=result,
                version=version,
                role="target",
                error=error,
            )
        )

    def do(self) -> None:
        """The next command."""
        command = self.queue.popleft()
        match command:
            case PushWeights(id, manifest):
                self.begin(id, manifest)
            case AbortWeights(id, version, session) | CommitWeights(id, version, _, session) if (
                self.open is None
                or (
                    version not in ("", self.open.name)
                    or session not in ("", self.open.manifest.session)
                )
            ):
                self.answer(id, "not_found", error=("not_found", "no such push"))
            case AbortWeights(id):
                assert self.open is not None
                if self.open.state == "staging":
                    self.open.aborted = True
                else:
                    self.close("conflict")
                self.answer(id, "aborted")
            case CommitWeights(id, _, name):
                assert self.open is not None
                if self.open.state != "staged":
                    self.answer(id, "conflict", error=("conflict", "not staged"))
                    return
                self.live, self.open = (name or self.open.name, self.open.content), None
                self.answer(id, "committed", self.live[0])
            case NameWeights(id, version, of):
                if self.open is not None or of not in ("", self.live[0]):
                    self.answer(id, "conflict", error=("conflict", "cannot be named"))
                    return
                self.live = (version, self.live[1])
                self.answer(id, "named", version)
            case LookAtWeights(id):
                self.answer(id, "looked")

    def begin(self, id: str, manifest: Manifest) -> None:
        push, came = self.open, came_of(manifest)
        if (
            push is not None
            and push.state in ("gathering", "staged")
            and push.manifest.partial
            and manifest.partial
        ):
            if push.manifest.session == manifest.session and came.part not in [
                part for _, part in push.content
            ]:
                push.content.append(came)
            else:
                self.close("conflict")
                push = None
        elif push is not None:
            self.answer(id, "conflict", error=("conflict", "another push"))
            return
        if push is None:
            push = self.open = Open(manifest)
        push.state = "staging"
        push.asked.append(id)

    def arrive(self) -> None:
        """Deliver the tensors of the open push."""
        push = self.open
        if push is None or push.state != "staging":
            return
        if push.aborted:
            self.close("conflict")
            return
        if push.manifest.partial and len(push.content) < PARTS:
            push.state = "gathering"
        else:
            push.state = "staged"
            if push.manifest.commit:
                self.live, self.open = (push.name, push.content), None
        for id in push.asked:
            self.answer(id, "committed" if self.open is None else push.state, push.name)
        push.asked.clear()

    def close(self, code: str) -> None:
        push, self.open = self.open, None
        for id in push.asked if push is not None else []:
            self.answer(id, code, error=(code, "out of luck"))


class Story:
    """The calls of clients, and the session of each."""

    def __init__(self, *, stages: bool) -> None:
        self.twin = Twin(stages=stages)
        self.stages = stages
        self.number = 0
        self.calls = itertools.count()
        self.pushes: dict[
            int, list[tuple[int, asyncio.Task[Any]]]
        ] = {}  # session -> its calls and their outcomes, in order of their starts
        self.tasks: list[asyncio.Task[Any]] = []
        self.ended: list[WeightReport] = []
        self.bodies: list[asyncio.Future[None]] = []  # on their way

    async def after(self, *steps: str) -> None:
        for step in steps:
            settles = step == "settle"
            self.go(step)
            for _ in range(4):
                await asyncio.sleep(0)
            while settles and (
                self.twin.queue
                or (self.twin.open is not None and self.twin.open.state == "staging")
            ):
                await self.after("do", "arrive")
            self.check()

    def go(self, step: str) -> None:
        session, twin, call = self.twin.session, self.twin, next(self.calls)
        kind, _, how = step.partition(" ")
        match kind:
            case "start":
                self.number += 1
                self.spawn(session.begin("target"))
            case "push":
                task = self.spawn(
                    self.push(
                        call,
                        how,
                        asyncio.get_running_loop().create_future() if "slow" in how else None,
                    )
                )
                self.pushes.setdefault(self.number, []).append((call, task))
            case "body":
                for waiting in [waiting for waiting in self.bodies if not waiting.done()][:1]:
                    waiting.set_result(None)
            case "finish":
                self.spawn(
                    self.finish(self.number, f"step {self.number}" if how == "named" else "")
                )
            case "abort":
                self.spawn(twin.session.ask(AbortWeights))
            case "do" if twin.queue:
                twin.do()
            case "arrive":
                twin.arrive()
            case "fail" if twin.open is not None and twin.open.state == "staging":
                twin.close("weights_refused")

    def spawn(self, what: Any) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(what))
        return self.tasks[-1]

    async def push(self, call: int, how: str, body: asyncio.Future[None] | None) -> WeightReport:
        with self.twin.session.pushing() as update:
            if body is not None:
                self.bodies.append(body)
                await body
            if "bad" in how:
                raise InvalidRequest("the body is bad")
            part = how[-1:] if how[-1:].isdecimal() else ""
            return await update.push(
                Manifest(
                    path=f"{call}.{part}".rstrip("."),
                    partial=bool(part),
                    version="v" if "v" in how else "",
                )
            )

    def check(self) -> None:
        version, content = self.twin.live
        if version.startswith("step"):
            pushes = self.pushes.get(int(version.partition(" ")[2]), [])
            assert content and {call for call, _ in content} <= {call for call, _ in pushes}

    async def finish(self, number: int, name: str) -> None:
        pushes = [*self.pushes.get(number, [])]  # those that begin from now on are refused
        report = await self.twin.session.end(name)
        if report.result == "unchanged" or any(report is earlier for earlier in self.ended):
            return  # a repeated end is answered as the first
        self.ended.append(report)
        version, content = self.twin.live
        assert report.result == ("committed" if self.stages else "named")
        assert version == (name or report.version)
        assert len(content) == (1 if content[0].part is None else PARTS)
        last, task = pushes[-1]
        assert task.done() and task.exception() is None and last in {call for call, _ in content}, (
            "the last call is of what is live"
        )


STEPS = st.sampled_from(
    [
        *("start", "push", "push v", "push slow", "push bad", "push part 0", "push part 1"),
        *("push slow part 1", "push bad part 1", "body", "finish", "finish named", "abort"),
        *("do", "arrive", "fail", "settle", "settle"),
    ]
)


@given(st.lists(STEPS, max_size=25), st.booleans())
@settings(deadline=None, max_examples=600)
def test_update_end_commits_and_names_only_its_own_pushes(steps: list[str], stages: bool) -> None:
    asyncio.run(told(steps, stages=stages))


async def told(steps: list[str], *, stages: bool) -> Story:
    story = Story(stages=stages)
    await story.after("start", *steps)
    while not all(task.done() for task in story.tasks):
        await story.after("body", "settle")
    live = story.twin.live
    if story.twin.open is not None and not story.twin.open.manifest.session:
        await story.after("abort")
    await story.after("start", "settle", "push", "settle", "finish named", "settle")
    assert story.twin.live[0] == f"step {story.number}", (
        "nothing is left of earlier sessions that keeps a new one from its end"
    )
    story.twin.live = live
    for outcome in await asyncio.gather(*story.tasks, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, TltError):
            raise outcome
    return story


def run(*steps: str, stages: bool = True) -> tuple[str, list[Came]]:
    """Return the live version and content after these steps."""

    async def live() -> tuple[str, list[Came]]:
        return (await told([*steps], stages=stages)).twin.live

    return asyncio.run(live())


def test_late_push_does_not_join_the_next_update() -> None:
    assert run("push", "do", "start", "push", "do", "do", "settle", "finish named", "settle") == (
        "initial",
        [],
    )
    assert run("push slow", "start", "body", "settle", "finish named", "settle") == (
        "initial",
        [],
    ), "its body came too late"
    assert (
        run("push", "do", "start", "settle", "push", "settle", "finish named", "settle")[0]
        == "step 2"
    )


def test_refused_push_leaves_no_version_to_commit() -> None:
    assert run("push bad", "finish named", "settle") == ("initial", []), (
        "nor a name for what was live before"
    )
    assert run("push", "settle", "push bad", "finish named", "settle") == ("initial", [])
    assert run("push", "do", "finish named", "settle") == ("initial", []), (
        "nor one that is under way"
    )
    assert run("push bad", "push", "settle", "finish named", "settle") == (
        "step 1",
        [Came(2, None)],
    )
    assert run("finish named", "settle") == ("initial", []), "nor one that never came"


async def done(twin: Twin, what: Any) -> WeightReport | None:
    """Return the report from an engine that does all that it is asked."""
    task = asyncio.ensure_future(what)
    while not task.done():
        await asyncio.sleep(0)
        if twin.queue:
            twin.do()
            twin.arrive()
    report: WeightReport | None = task.result()
    return report


async def pushed(twin: Twin, call: int, role: PushRole) -> WeightReport:
    with twin.session.pushing() as update:
        return await update.push(Manifest(path=str(call), role=role))


def test_end_of_update_reports_a_refused_push() -> None:
    async def story(role: PushRole) -> None:
        twin = Twin()
        await done(twin, twin.session.begin("all"))
        refused = asyncio.ensure_future(pushed(twin, 1, role))
        await asyncio.sleep(0)
        twin.do()
        twin.close("weights_refused")
        with pytest.raises(TltError):
            await refused
        assert await done(twin, pushed(twin, 2, "drafter"))
        with pytest.raises(
            Conflict, match="the last push of the target in this weight update failed"
        ):
            await done(twin, twin.session.end("step"))
        assert twin.live == ("initial", [])
        await done(twin, twin.session.begin("all"))
        assert await done(twin, pushed(twin, 3, "all"))
        assert await done(twin, twin.session.end("step"))
        assert twin.live == ("step", [Came(3, None)])

    for role in ("target", "all"):
        asyncio.run(story(role))


@in_loop
async def test_drafter_update_keeps_pushes_to_the_target() -> None:
    twin = Twin()
    await done(twin, twin.session.begin("target"))
    await done(twin, twin.session.begin("draft"))  # it held nothing
    await done(twin, pushed(twin, 1, "drafter"))
    await done(twin, twin.session.begin("target"))
    assert twin.open is None, "one of the drafter is dropped"
    await done(twin, pushed(twin, 2, "target"))
    with pytest.raises(
        Conflict, match="holds weights of the target, which this would drop; finish it first"
    ):
        await done(twin, twin.session.begin("draft"))
    await done(twin, twin.session.end("step"))
    assert twin.live == ("step", [Came(2, None)])
    await done(twin, twin.session.begin("draft"))
    await done(twin, twin.session.begin("target"))
    await done(twin, pushed(twin, 3, "target"))
    await done(twin, twin.session.begin("target"))
    assert twin.open is None, "begun again, it is dropped, too"


def test_end_of_unstaged_update_names_its_active_parts() -> None:
    version, content = run(
        "push part 0", "settle", "push part 1", "settle", "finish named", "settle", stages=False
    )
    assert version == "step 1" and [part for _, part in content] == [0, 1]


@in_loop
async def test_end_of_update_does_not_rename_a_foreign_active_version() -> None:
    story = Story(stages=False)
    await story.after("start", "push", "settle")
    story.twin.live = ("initial", [])
    end = asyncio.ensure_future(story.twin.session.end("8"))
    await asyncio.sleep(0)
    story.twin.do()
    with pytest.raises(Conflict, match="cannot be named"):
        await end
    assert story.twin.live == ("initial", [])


@in_loop
async def test_adoption_outlives_its_caller_and_delays_pushes() -> None:
    twin = Twin()
    own = asyncio.create_task(twin.session.adopt(Manifest(role="drafter", version="d1", path="0")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    own.cancel()
    await asyncio.wait({own})
    assert own.cancelled() and len(twin.queue) == 1
    with twin.session.pushing() as update:
        push = asyncio.create_task(update.push(Manifest(version="v1", path="1")))
        await asyncio.sleep(0)
        assert len(twin.queue) == 1  # the drafter's
        with pytest.raises(Conflict, match="push is in progress"):
            await twin.session.adopt(Manifest(role="drafter", version="d2", path="2"))
        twin.do()
        twin.arrive()
        assert twin.live[0] == "d1"
        for _ in range(4):
            await asyncio.sleep(0)
        twin.do()
        twin.arrive()
        assert (await push).version == twin.live[0] == "v1"
