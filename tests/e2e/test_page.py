"""The built-in page in a real browser against real servers: what it shows, what it sends, and what
cannot get in.
"""

import itertools
import json
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.e2e.browser import Open, ask, ready
from tests.e2e.test_lifecycle import FAST_START, LONG, QUESTION
from tests.waiting import until
from tlt_client import Client
from tlt_client.wire import FleetStatus, ReplicaStatus
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET
from tlt_server.frontend.dialects.replies.drafter import (
    BufferState,
    CandidateState,
    DrafterState,
    ServedDrafter,
    TrainerStatus,
)
from tlt_server.wire.training import version_of

HOSTILE = "<img src=x onerror=window.inert=false>"
KEY = "the-page-test-key"


@pytest.fixture(scope="module")
def weight_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    perturbed_copy(TARGET, root / "next")
    return root


@pytest.fixture(scope="module")
def front_end() -> Iterator[str]:
    """Another site, whose origin `guarded` lists under the name localhost alone."""
    with another_site("<title>front end</title>") as url:
        yield url


@pytest.fixture(scope="module")
def guarded(weight_root: Path, front_end: str) -> Iterator[ServerProcess]:
    """A server with keys, a weight root, a listed origin, and a name that is markup."""
    (weight_root / "keys").write_text(f"{KEY}\neval-key scopes=data name=eval\n")
    with ServerProcess(
        *FAST_START,
        "--api-key-file",
        str(weight_root / "keys"),
        "--weight-root",
        str(weight_root),
        "--allowed-origins",
        by_name(front_end),
        "--served-model-name",
        HOSTILE,
    ) as running:
        yield running


def by_name(url: str) -> str:
    return url.replace("127.0.0.1", "localhost")


def without_end(route: Route) -> None:
    """Change the page's request to /generate so that it runs on after the end of the answer."""
    body = json.loads(route.request.post_data or "")
    body["sampling"]["ignore_eos"] = True
    route.continue_(post_data=json.dumps(body))


@contextmanager
def load(server: ServerProcess) -> Iterator[None]:
    """Four responses that run until the block ends."""
    with Client(server.url, timeout_s=120) as client:
        stream = client.stream([{"messages": QUESTION, "n": 4}], sampling=LONG)
        next(stream)
        draining = threading.Event()
        reader = threading.Thread(
            target=lambda: [
                None for _ in iter(lambda: draining.is_set() or next(stream, None) is None, True)
            ]
        )
        reader.start()
        try:
            yield
        finally:
            draining.set()
            reader.join()
            stream.close()


def test_the_page_names_model_weights_and_drafter(open_page: Open, server: ServerProcess) -> None:
    page = ready(open_page(server.url))
    expect(page.locator("#model")).to_have_text("target")
    expect(page.locator("#fact-numerics")).to_have_text("strict")
    expect(page.locator("#fact-policy")).to_have_text("goodput")
    expect(page.locator("#fact-weights")).to_have_text(re.compile(r"initial, live for \d+ (s|min)"))
    expect(page.locator("#fact-drafter")).to_have_text("eagle+history, initial")
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#key")).to_be_hidden()


def test_page_figures_move_under_load_and_strategy_is_shown(
    open_page: Open, server: ServerProcess, client: Client
) -> None:
    page = ready(open_page(server.url))
    try:
        for policy, strategy, shape, accepts in (
            ("off", None, "off", r"1\.00"),
            ("fixed", "eagle:7x1x8", "eagle:7x1", r"[1-8]\.\d\d"),
        ):
            client.set_strategy(policy, strategy)
            with load(server):
                expect(page.locator("#now-running")).to_have_text("4")
                expect(page.locator("#now-tokens")).to_have_text(re.compile(r"^\d*[1-9][\d,.]*$"))
                expect(page.locator("#now-accept")).to_have_text(re.compile(accepts))
                expect(page.locator(f'.band[data-strategy="{shape}"]').first).to_be_attached()
            until(lambda: look(client).open == 0)
    finally:
        client.set_strategy("goodput")
    expect(page.locator("#now-running")).to_have_text("0")
    assert page.locator("#strategies li").all_inner_texts()[0].startswith("off")
    swatches = [item.inner_html() for item in page.locator("#strategies svg").all()]
    assert "pattern" not in swatches[0] and len(set(swatches)) == len(swatches)
    assert (
        page.locator("#chart-tokens .trace").count()
        and page.locator("#chart-requests .trace.c2").count()
    )


def strategies(count: int) -> Callable[[Page], None]:
    """Return what has a page see this many strategies and `off`, all in each second."""
    names = ["off", *(f"eagle:{1 + k % 10}x{1 + k // 10}" for k in range(count))]
    served = itertools.count(1)

    def metrics(route: Route) -> None:
        text = re.sub(r"^tlt_cycles_total.*\n", "", route.fetch().text(), flags=re.MULTILINE)
        steps = next(served)
        lines = (f'tlt_cycles_total{{strategy="{name}"}} {steps}' for name in names)
        route.fulfill(body="\n".join((text, *lines)))

    return lambda page: page.route("**/metrics", metrics)


@pytest.mark.parametrize("size", [(1280, 900), (375, 667)], ids=str)
def test_chart_values_are_shown_at_the_pointer(
    open_page: Open, server: ServerProcess, size: tuple[int, int]
) -> None:
    """The whole of it stays in the window, wherever the pointer or the keyboard's place is."""
    page = ready(open_page(server.url, width=size[0], before=strategies(12)))
    page.set_viewport_size({"width": size[0], "height": size[1]})
    expect(page.locator(".band").first).to_be_attached()
    tip, apart = page.locator("#readout"), 40

    def within(x: float | None = None) -> None:
        expect(tip).to_contain_text("tokens/s")
        box = tip.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= size[0]
        assert box["y"] >= 0 and box["y"] + box["height"] <= size[1]
        assert x is None or box["x"] - apart <= x <= box["x"] + box["width"] + apart

    for name in ("tokens", "requests", "accept", "strategy"):
        chart = page.locator(f"#chart-{name}")
        for block in ("start", "end"):
            chart.evaluate(f"(node) => node.scrollIntoView({{ block: '{block}' }})")
            box = chart.bounding_box()
            assert box is not None
            for x in (box["x"] + 1, box["x"] + box["width"] - 1):
                page.mouse.move(x, box["y"] + box["height"] / 2)
                within(x)
            expect(tip).to_contain_text("5 more strategies")
        page.mouse.move(0, 0)
        expect(tip).to_be_empty()
        chart.focus()
        page.keyboard.press("ArrowLeft")
        within()
        assert page.locator(".cursor").count() == 4  # the same moment in all charts
        page.keyboard.press("Escape")
        expect(tip).to_be_empty()


def test_twenty_strategies_have_distinct_looks(open_page: Open, server: ServerProcess) -> None:
    page = ready(open_page(server.url, before=strategies(20)))
    expect(page.locator("#strategies li")).to_have_count(21)
    looks = [sample.inner_html() for sample in page.locator("#strategies svg").all()]
    assert len({*looks}) == 21
    parts = [re.findall(r"hue\d|url\(#h\d\)", look) for look in looks]
    assert parts[0] == ["hue0"]
    assert all({*one}.isdisjoint(next_one) for one, next_one in itertools.pairwise(parts))


def test_narrow_page_shows_the_prompt_first(open_page: Open, server: ServerProcess) -> None:
    page = ready(open_page(server.url, width=375))
    tops = page.evaluate(
        "['try', 'facts', 'tiles', 'charts'].map((id) => $(id).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
    box = page.locator("#go").bounding_box()
    assert box is not None and box["y"] + box["height"] < 667


def test_the_page_explains_the_choice_of_the_strategy(
    open_page: Open, server: ServerProcess, client: Client
) -> None:
    page = ready(open_page(server.url))
    pin = {"batch": [1, 3], "strategy": "eagle:2x1x3"}
    try:
        client.set_strategy("goodput", pins=[pin])
        with load(server):  # more than the pin holds for
            expect(page.locator("#now-running")).to_have_text("4")
        until(lambda: look(client).open == 0)
        client.generate([{"messages": QUESTION}], sampling={"max_tokens": 40})
        switch = client.strategy()["switches"][-1]
        assert (switch["strategy"], switch["reason"]) == ("eagle:2x1x3", "pin")
    finally:
        client.set_strategy("goodput")
    expect(page.locator("#switches li").first).to_contain_text(
        f"{switch['before']} → eagle:2x1x3 · pin · {switch['batch']} decoding"
    )
    expect(page.locator("#switches li").first).to_contain_text(re.compile(r"^\d\d:\d\d:\d\d "))
    expect(page.locator("#now-strategy")).to_have_text("eagle:2x1")
    off = r"(as forecast|\d+ % (longer|shorter|more|fewer))"
    expect(page.locator("#now-predicted")).to_contain_text(re.compile(f"eagle chain {off}"))
    expect(page.locator("#now-cost-error")).to_have_text(re.compile(r"\d %$"))
    expect(page.locator("#now-calibration")).to_have_text(re.compile(f"eagle {off}"))
    expect(page.locator("#fact-pins")).to_have_text("none")


def test_the_page_shows_the_training_of_the_drafter(open_page: Open, server: ServerProcess) -> None:
    plain = ready(open_page(server.url))
    plain.wait_for_function("drafting !== null")
    expect(plain.locator("#training")).to_be_hidden()  # this server trains nothing

    body = msgspec.json.encode(training_state()).decode()
    page = open_page(
        server.url,
        before=lambda page: page.route(
            "**/drafter", lambda route: route.fulfill(body=body, content_type="application/json")
        ),
    )
    for place, said in (
        ("trainer", "paused: the disk is full"),
        ("in-force", f"{version_of(HOSTILE, 3, '0123abcd')}, for target {HOSTILE}"),
        ("trained-on", "step-8"),
        ("live-length", "4.25"),
        ("candidate", "no_gain, for target step-7: 4.40 against 4.30, gain −1.2 % (−3.0 % to +0.6 "
         "%) on 12 prompts; 1.50 ms per token against 1.25"),
        ("rounds", "5, 120 steps; next after 300 of 4,096 tokens"),
        ("adopted", "2"),
        ("refused", "no_gain 2, worse 1"),
        ("self-check", "0 of 1,234 differ"),
        ("buffer", "9,000 tokens, 2.00 MiB; features of 1,000, 1.50 GiB"),
        ("trainer-memory", "12 GiB"),
        ("parking", "7 times; median –, 99 % within –"),
        ("checkpoint", "8.25 ms"),
    ):  # fmt: skip
        expect(page.locator(f"#now-{place}")).to_have_text(said)
    depths = page.locator("#depths")
    expect(depths).to_have_attribute(
        "aria-label",
        "Share of drafts accepted to each depth: 1: 90 % in use, 95 % candidate; 2: not known in "
        "use, 80 % candidate",
    )
    depths.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#readout")).to_have_text("Depth 1: 90 % in use, 95 % candidate")
    heights = depths.locator("rect").evaluate_all(
        "all => all.map((one) => one.height.baseVal.value)"
    )
    assert heights[0] < heights[1] == heights[2] > heights[3] == heights[4], "bars, one hatched"
    assert page.locator("img").count() == 0


def test_the_page_shows_the_replicas_of_a_gateway(open_page: Open, server: ServerProcess) -> None:
    plain = ready(open_page(server.url))
    expect(plain.locator("#fleet")).to_be_hidden()  # this server is no gateway

    replicas = [
        ReplicaStatus(name="a", state="ready", running=1234, versions={"target": HOSTILE}),
        ReplicaStatus(name="b", state="lost", waiting=2, moves=3, fault=f"broke: {HOSTILE}"),
    ]
    body = msgspec.json.encode(FleetStatus(replicas)).decode()

    def as_gateway(page: Page) -> None:
        page.route("**/fleet", lambda route: route.fulfill(body=body))
        page.route("**/metrics", with_replicas)

    def with_replicas(route: Route) -> None:
        route.fulfill(body=route.fetch().text() + 'tlt_replicas{state="ready"} 1\n')

    page = open_page(server.url, before=as_gateway)
    expect(page.locator("#replicas li")).to_have_text(
        [
            f"a ready · 1,234 running · 0 waiting · {HOSTILE}",
            f"b lost · 0 running · 2 waiting · 3 moved away · broke: {HOSTILE}",
        ]
    )
    assert page.locator("img").count() == 0


def training_state() -> DrafterState:
    candidate = CandidateState(
        version="drafter-step-7-2-0123abcd",
        target_version="step-7",
        drafter_version="drafter-1",
        outcome="no_gain",
        groups=12,
        gain=-0.012,
        interval=[-0.03, 0.006],
        accept_length=4.4,
        accept_length_before=4.3,
        ms_per_cycle=6.6,
        ms_per_cycle_before=5.4,
        ms_per_token=1.5,
        ms_per_token_before=1.25,
        accepted_at_depth=[0.95, 0.8],
    )
    trainer = TrainerStatus(
        device="cpu",
        slowdown=None,
        state="paused",
        reason="the disk is full",
        pause_left_s=None,
        process="running",
        error="",
        restarts=0,
        trained_on="step-8",
        steps=120,
        rounds=5,
        tokens=90_000,
        recomputed_tokens=0,
        loss=0.5,
        undone_steps=0,
        without_features=0,
        recorded_tokens=300,
        interval_tokens=4096,
        quiet_s=0.05,
        parkings=7,
        adopted=2,
        refused={"no_gain": 2, "worse": 1},
        compared_cycles=1234,
        different_cycles=0,
        candidate=candidate,
        memory_bytes=12 * 2**30,
        micro_batch=2048,
        checkpoints=3,
        checkpoint_stall_ms=8.25,
        checkpoint_error="",
    )
    buffer = BufferState(
        sequences=100,
        tokens=9000,
        bytes=2 * 2**20,
        tokens_by_version={"step-8": 4000},
        feature_tokens=1000,
        feature_bytes=3 * 2**29,
        directory=None,
        disk_error="",
        offered=100,
        dropped=0,
        refused=0,
        refusals=[],
    )
    served = ServedDrafter(
        name="eagle",
        architecture="LlamaForCausalLMEagle3",
        weight_version=version_of(HOSTILE, 3, "0123abcd"),
        trained_for=HOSTILE,
        resting=False,
        steps=60,
        accept_length=4.25,
        accepted_at_depth=[0.9],
    )
    return DrafterState(
        target_version="step-8", drafters=[served], training="idle", trainer=trainer, buffer=buffer
    )


def test_prompt_rerun_on_the_page_with_its_seed_gives_the_same(
    open_page: Open, server: ServerProcess, client: Client
) -> None:
    seed = 2**64 - 3  # more digits than a number of the browser holds
    page = ready(open_page(server.url))
    ask(page, "Compute 3*4+5.", seed=str(seed))
    expect(page.locator("#figures")).to_contain_text(f"seed {seed}")
    (choice,) = (
        client.generate(
            [{"messages": [{"role": "user", "content": "Compute 3*4+5."}], "seed": seed}]
        )
        .results[0]
        .choices
    )
    assert page.locator("#output").text_content() == choice.text
    expect(page.locator("#figures")).to_contain_text(f"{len(choice.token_ids)} tokens")
    expect(page.locator("#figures")).to_contain_text("finish reason stop")
    page.locator("#output").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#readout")).to_contain_text(f"log-prob −{-choice.logprobs[0]:.3f}")
    page.get_by_role("radio", name="weight version").check()
    expect(page.locator("#scale-version")).to_have_text("initial")
    assert page.locator("#output .line0").count() == page.locator("#output span").count()
    page.locator("#seed").fill("")
    page.get_by_role("button", name=f"seed {seed}").click()
    expect(page.locator("#seed")).to_have_value(str(seed))
    page.get_by_label("speculate").uncheck()
    page.get_by_label("raw text").check()
    ask(page, "2+2=", **{"max-tokens": "3"})
    expect(page.locator("#figures")).to_contain_text("3 tokens")
    expect(page.locator("#figures")).to_contain_text("finish reason length")
    assert page.locator("#output span").count() == 3  # without speculation a step gives one token


def test_stopped_response_frees_its_batch_slot(
    open_page: Open, server: ServerProcess, client: Client
) -> None:
    page = ready(open_page(server.url, before=lambda page: page.route("**/generate", without_end)))
    ask(page, "Use 3,7,11 to make 300.", **{"max-tokens": "3500"})
    expect(page.locator("#output span").nth(5)).to_be_attached()
    assert look(client).open == 1 and page.locator("#go").is_disabled()
    page.click("#stop")
    expect(page.locator("#figures")).to_contain_text("stopped by you")
    until(lambda: look(client).open == 0)
    expect(page.locator("#go")).to_be_enabled()


def test_page_shows_refusals_in_the_servers_words(open_page: Open, server: ServerProcess) -> None:
    page = ready(open_page(server.url, quiet=False))
    ask(page, "1+1=", seed=str(2**64))
    expect(page.locator("#said")).to_contain_text(f"seed is {2**64}")
    expect(page.locator("#said")).to_contain_text("(400 invalid_request)")
    ask(page, "1+1=", seed="", **{"max-tokens": "100000"})
    expect(page.locator("#said")).to_contain_text("max_tokens is 100000")


def test_page_runs_only_its_own_script(open_page: Open, server: ServerProcess) -> None:
    page = ready(open_page(server.url, quiet=False))
    blocked = page.evaluate("""async () => {
      const blocked = [];
      const note = (event) => blocked.push(event.effectiveDirective);
      document.addEventListener("securitypolicyviolation", note);
      const [script, image, marked] = ["script", "img", "p"].map((n) => document.createElement(n));
      script.textContent = "window.inert = false";
      image.src = "/health";
      marked.setAttribute("onclick", "window.inert = false");
      document.body.append(script, image, marked);
      marked.click();
      await fetch("http://127.0.0.2:9/").catch(() => {});
      await new Promise((resolve) => setTimeout(resolve, 200));
      return blocked;
    }""")
    assert sorted(blocked) == ["connect-src", "img-src", "script-src-attr", "script-src-elem"]
    assert page.evaluate("window.inert") is None


def test_page_reads_a_stream_cut_at_any_byte(open_page: Open, server: ServerProcess) -> None:
    page = ready(open_page(server.url))
    frames = (
        'event: token\ndata: {"text":"é😀\\n\\n\\"seed\\":1"}\n\n'
        'event: result\ndata: {"seed":18446744073709551615}\n\nevent: cut'
    )
    found = page.evaluate(
        """async (text) => {
      const bytes = new TextEncoder().encode(text), found = [];
      const body = new ReadableStream({ start(stream) {
        for (const byte of bytes) stream.enqueue(Uint8Array.of(byte));
        stream.close();
      } });
      for await (const event of events(body)) found.push(event);
      return found;
    }""",
        frames,
    )
    assert found == [
        ["token", {"text": 'é😀\n\n"seed":1'}],
        ["result", {"seed": "18446744073709551615"}],
    ]


def test_counters_of_a_restarted_server_give_no_negative_rate(
    open_page: Open, server: ServerProcess, client: Client
) -> None:
    text, totals = client.metrics(), iter([5000.0, 6000.0, 10.0, 500.0])

    def metrics(route: Route) -> None:
        total = next(totals, 500.0)
        route.fulfill(
            body=re.sub(
                r"^tlt_generated_tokens_total .*",
                f"tlt_generated_tokens_total {total}",
                text,
                flags=re.MULTILINE,
            )
        )

    page = open_page(server.url, before=lambda page: page.route("**/metrics", metrics))
    until(
        lambda: page.evaluate(
            "points.length >= 4 && points.some((p) => p.epoch === 1 && p.tokensPerS > 0)"
        )
    )
    first, *rates = page.evaluate("points.slice(0, 4).map((p) => p.tokensPerS)")
    assert first is None and rates[0] > 0 and rates[1] is None and rates[2] > 0


def test_hidden_page_polls_less_often(open_page: Open, server: ServerProcess) -> None:
    page = ready(open_page(server.url))
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.wait_for_timeout(4000)  # the next turn, which sees it
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert asked == []
    with page.expect_request("**/metrics"):
        page.evaluate(
            "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
        )


def test_page_asks_for_a_key_and_keeps_the_key_in_the_tab(
    open_page: Open, guarded: ServerProcess
) -> None:
    page = open_page(guarded.url, quiet=False)
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#key-said")).to_contain_text("asks for an API key")
    page.fill("#key-field", "wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#key-said")).to_contain_text(
        "does not know this key. Check that all of it"
    )
    expect(page.locator("#key-said")).not_to_contain_text("header")
    expect(page.locator("#key-field")).to_be_focused()
    ask(page, "1+1=", **{"max-tokens": "2"})
    expect(page.locator("#said")).to_contain_text("does not know this key")
    expect(page.locator("#said")).not_to_contain_text("header")
    page.fill("#key-field", "eval-key")
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#key-said")).to_contain_text(
        "the key eval has the scopes data, and this needs operate"
    )
    page.fill("#key-field", KEY)
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#key")).to_be_hidden()
    ready(page)
    ask(page, "1+1=", **{"max-tokens": "2"})
    expect(page.locator("#figures")).to_contain_text("2 tokens")
    assert page.evaluate(
        "[Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
    ) == [[KEY], [], ""]
    page.reload()
    ready(page)
    expect(page.locator("#key")).to_be_hidden()


def with_key(page: Page) -> None:
    page.add_init_script(f"sessionStorage.setItem('tlt-key', '{KEY}')")


def test_markup_from_server_or_model_is_shown_as_text(
    open_page: Open, guarded: ServerProcess
) -> None:
    hostile = {"id": "0", "index": 0, "token_ids": [1], "logprobs": [-1.0], "text": HOSTILE}
    body = (
        f"event: token\ndata: {json.dumps(hostile)}\n\nevent: error\ndata: "
        + json.dumps(
            {"id": "0", "error": {"code": HOSTILE, "message": HOSTILE, "retryable": False}}
        )
        + "\n\nevent: done\ndata: {}\n\n"
    )
    page = ready(open_page(guarded.url, before=with_key))
    expect(page.locator("#model")).to_have_text(HOSTILE)
    page.route(
        "**/generate", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    ask(page, HOSTILE)
    expect(page.locator("#output")).to_have_text(HOSTILE)
    expect(page.locator("#said")).to_have_text(f"{HOSTILE} ({HOSTILE})")
    assert page.locator("img").count() == 0 and page.evaluate("window.inert") is None


def test_new_weights_are_marked_in_the_charts_and_in_a_response(
    open_page: Open, guarded: ServerProcess
) -> None:
    page = ready(open_page(guarded.url, before=with_key))
    expect(page.locator(".version-marker")).to_have_count(0)
    page.route("**/generate", without_end)
    page.get_by_role("radio", name="weight version").check()
    ask(page, "Use 3,7,11 to make 300.", **{"max-tokens": "400"})
    expect(page.locator("#output span").nth(5)).to_be_attached()
    with Client(guarded.url, api_key=KEY, timeout_s=60) as trainer:
        trainer.update_weights("next", HOSTILE)
    expect(page.locator(".version-marker")).to_have_count(4)  # one in each chart
    expect(page.locator(".version-marker").first).to_contain_text(HOSTILE[:20])
    expect(page.locator("#fact-weights")).to_contain_text(f"{HOSTILE}, live for")
    expect(page.locator("#figures")).to_contain_text("400 tokens")
    expect(page.locator("#scale-version li")).to_have_text(["initial", HOSTILE])
    classes = page.evaluate("answer.blocks.map(({ node }) => node.className.includes('line1'))")
    assert (
        classes == sorted(classes) and len(set(classes)) == 2
    )  # the old version's tokens, then the new one's
    assert page.locator("img").count() == 0


@pytest.mark.parametrize(
    ("failing", "reason", "state"),
    [
        (("startupz",), "reason, limit and remedy", "starting"),
        pytest.param(
            *((), "the engine is gone and is being restarted: status 9", "restarting"),
            marks=pytest.mark.long,
        ),
        pytest.param(*((), "reason, limit and remedy", "not ready"), marks=pytest.mark.long),
    ],
)
def test_the_page_shows_the_state_of_the_probes(
    open_page: Open, server: ServerProcess, failing: tuple[str, ...], reason: str, state: str
) -> None:
    def probes(page: Page) -> None:
        for name in ("readyz", *failing):
            page.route(
                f"**/{name}",
                lambda route: route.fulfill(
                    status=503,
                    json={"error": {"code": "unavailable", "message": reason, "retryable": True}},
                ),
            )

    page = open_page(server.url, quiet=False, before=probes)
    expect(page.locator("#state")).to_have_text(state)
    expect(page.locator("#banner")).to_have_text(reason)
    page.unroute_all()
    ready(page)
    expect(page.locator("#banner")).to_be_hidden()


@pytest.mark.long
def test_page_shows_a_server_drain_stop_and_return(open_page: Open) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = (*FAST_START, "--port", port)
    with ServerProcess(*flags) as first:
        page = ready(
            open_page(
                first.url, quiet=False, before=lambda page: page.route("**/generate", without_end)
            )
        )
        ask(page, "Use 3,7,11 to make 300.", **{"max-tokens": "3500"})
        expect(page.locator("#output span").nth(5)).to_be_attached()
        first.process.send_signal(signal.SIGTERM)
        expect(page.locator("#state")).to_have_text("draining")
        expect(page.locator("#banner")).to_contain_text("send the request to another replica")
        page.click("#stop")
        assert first.process.wait(60) == 0
    expect(page.locator("#state")).to_have_text("unreachable")
    expect(page.locator("#banner")).to_contain_text("start it again with tlt serve")
    assert set(page.locator("[id^=now-]").all_inner_texts()) == {
        "–"
    }  # no figure of a server that is gone
    with ServerProcess(*flags):
        ready(page)
        assert page.evaluate("points.every((p) => !(p.tokensPerS < 0))")
        assert page.evaluate(
            "points.some((p, k) => k && p.from === p.t && points[k - 1].t < p.t)"
        )  # a gap, not a line across it


def test_page_checks_notice_console_messages(open_page: Open, server: ServerProcess) -> None:
    said: list[str] = []
    page = ready(
        open_page(
            server.url,
            quiet=False,
            before=lambda page: page.on("console", lambda message: said.append(message.text)),
        )
    )
    page.evaluate("console.error('seen')")
    assert said == ["seen"]


@contextmanager
def another_site(html: str) -> Iterator[str]:
    """Serve one page on another port of this machine."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{site.server_port}"
        finally:
            site.shutdown()


def test_page_on_a_foreign_port_cannot_change_the_server(
    browser: Browser, server: ServerProcess
) -> None:
    send = f'fetch(`{server.url}${{path}}`, {{method: "POST", mode: "no-cors", body}})'
    html = f"""<img src="{server.url}/flush_cache"><script>
        const send = (path, body) => {send}
        send("/pause"), send("/engine/abort", '{{"all": true}}')
        </script>"""

    def refused() -> float:
        text = urlopen(f"{server.url}/metrics").read().decode()
        (value,) = re.findall(r'^tlt_auth_refusals_total{reason="foreign_page"} (.*)$', text, re.M)
        return float(value)

    before = refused()
    with another_site(html) as url:
        page = browser.new_context().new_page()
        page.goto(url)
        until(lambda: page.wait_for_timeout(20) or refused() == before + 3)
        page.context.close()
    with Client(server.url, timeout_s=60) as client:
        assert client.generate([{"messages": QUESTION}], sampling={"max_tokens": 1}).results


def test_page_of_an_allowed_origin_streams_and_reads_errors(
    browser: Browser, guarded: ServerProcess, front_end: str
) -> None:
    """A page of an origin that is not listed gets nothing, with the same key."""
    calls = """async ([url, key]) => {
      const call = async (path, key, body) => {
        const headers = { authorization: `Bearer ${key}`, "x-request-id": "front-end" };
        if (body) headers["content-type"] = "application/json";
        try {
          const sent = { method: body ? "POST" : "GET", headers, body: JSON.stringify(body) };
          const reply = await fetch(url + path, sent), id = reply.headers.get("x-request-id");
          let chunks = 0, text = "";
          for await (const chunk of reply.body.pipeThrough(new TextDecoderStream())) {
            chunks += 1;
            text += chunk;
          }
          return { status: reply.status, id, chunks, text };
        } catch (error) { return error.name; }
      };
      const sampling = { max_tokens: 40, ignore_eos: true };
      const ask = { requests: [{ prompt: "1+1=" }], stream: true, sampling };
      return [
        await call("/version", key), await call("/generate", "wrong", ask),
        await call("/generate", key, { ...ask, requests: 1 }), await call("/generate", key, ask),
      ];
    }"""
    page = browser.new_context().new_page()
    found = []
    for url in (by_name(front_end), front_end):
        page.goto(url)
        found.append(page.evaluate(calls, [guarded.url, KEY]))
    page.context.close()
    listed, other = found
    assert [reply["status"] for reply in listed] == [200, 401, 400, 200]
    assert {reply["id"] for reply in listed} == {"front-end"}
    assert "known API key" in listed[1]["text"] and "requests" in listed[2]["text"]
    assert listed[3]["chunks"] > 1 and "event: done" in listed[3]["text"]
    assert other == ["TypeError"] * 4
