"""The headless browser of the page's tests and of its screenshots: the machine's own Chromium, a
fresh profile, no traffic of its own.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SOON_MS = 120_000  # for what a busy machine may delay; nothing waits that long on a quiet one
expect.set_options(timeout=SOON_MS)
Open = Callable[..., Page]  # the fixture `open_page`


@contextmanager
def browser() -> Iterator[Browser]:
    """Open a browser; until it closes this thread cannot run asyncio loops of its own."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise FileNotFoundError(
            f"none of {', '.join(NAMES)} is on PATH; run make tools, or install one"
        )
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield running
        running.close()


def ready(page: Page) -> Page:
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#now-pages")).to_have_text(re.compile(r"[\d,]+"))
    return page


def ask(page: Page, prompt: str, **fields: str) -> None:
    for name, value in {"prompt": prompt, **fields}.items():
        page.fill(f"#{name}", value)
    page.click("#go")
