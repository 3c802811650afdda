"""Renew `docs/images/page-*.png`: the shipped pair serves a few steps of a small rollout, with new
weights before each step but the first.

`make screenshots` runs it, in about 90 s. The font is Inter where the machine has it (Debian:
fonts-inter).
"""

from __future__ import annotations

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.e2e.browser import SOON_MS, ask, browser, ready
from tlt_client import Client
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.task import problem
from tlt_server.demo.workload import DRAFTER, TARGET

IMAGES = Path(__file__).parents[2] / "docs" / "images"
STEPS = 6
PROBLEMS, RESPONSES, MAX_TOKENS = 20, 4, 1200
FIRST = 436  # evaluation problem; some of those after it take long, so each step has a tail


def rollout(url: str, step: int) -> None:
    items = [
        {
            "messages": [{"role": "user", "content": problem(FIRST + i).prompt_text}],
            "n": RESPONSES,
            "seed": 1000 * step + i,
        }
        for i in range(PROBLEMS)
    ]
    with Client(url, timeout_s=300) as client:
        client.generate(items, sampling={"max_tokens": MAX_TOKENS})


def watch(page: Page, work: Future[None]) -> None:
    """Wait for the work while the page runs on."""
    while not work.done():
        page.wait_for_timeout(100)
    work.result()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(1) as pool, browser() as running:
        for step in range(1, STEPS):
            perturbed_copy(TARGET, Path(root) / f"step-{step}", seed=step)
        flags = (
            "--model",
            str(TARGET),
            "--drafter",
            str(DRAFTER),
            "--weight-root",
            root,
            "--served-model-name",
            "demo-pair",
        )
        with ServerProcess(*flags) as server, Client(server.url, timeout_s=60) as trainer:
            page = running.new_page(viewport={"width": 1280, "height": 1130})
            page.goto(server.url)
            ready(page)
            for step in range(STEPS):
                if step:
                    trainer.update_weights(f"step-{step}", f"step-{step}")
                watch(page, pool.submit(rollout, server.url, step))
                page.wait_for_timeout(3000)
            following = pool.submit(rollout, server.url, STEPS)
            page.wait_for_timeout(2000)
            ask(page, problem(FIRST).prompt_text, seed="7")
            expect(page.locator("#figures")).to_contain_text("seed", timeout=SOON_MS)
            page.hover("#chart-strategy", position={"x": 460, "y": 40})
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                page.wait_for_timeout(300)
                page.screenshot(path=IMAGES / f"page-{theme}.png")
            watch(page, following)


if __name__ == "__main__":
    main()
