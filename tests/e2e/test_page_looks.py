"""Looks of the built-in page: the system's theme or the chosen one, readable in both, and never
wider than the window.
"""

import re

import pytest
from playwright.sync_api import expect

from tests.e2e.browser import Open, ask, ready
from tlt_server.demo.server import ServerProcess

# Every visible text with its contrast (WCAG 2) to what lies below it; any CSS colour becomes bytes
# by being painted.
CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const c of colours) { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!text && !node.matches("input, textarea")) continue;
    if (!node.checkVisibility() || node.matches(":disabled")) continue;
    const style = getComputedStyle(node), grounds = [];
    for (let at = node; at; at = at.parentElement)
      grounds.unshift(getComputedStyle(at).backgroundColor);
    const ink = node.closest("svg") ? style.fill : style.color, ground = over(grounds);
    const [a, b] = [luminance(over([...grounds, ink])), luminance(ground)].sort((x, y) => y - x);
    found.push([node.id || node.getAttribute("class") || node.tagName, (a + .05) / (b + .05)]);
  }
  return found;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_have_enough_contrast(
    open_page: Open, server: ServerProcess, theme: str
) -> None:
    other = "dark" if theme == "light" else "light"
    page = ready(open_page(server.url, color_scheme=theme))
    ask(page, "Use 3,7,11 to make 300.", seed="3")
    expect(page.locator("#figures")).to_contain_text("seed 3")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    grounds = {}
    for by in ("logprob", "version"):
        page.check(f"input[name=by][value={by}]")
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 60 and min(ratio for _, ratio in contrasts) >= 4.5, sorted(
            contrasts, key=lambda found: found[1]
        )[:5]
    page.evaluate(
        "document.getElementById('model').style.color = "
        f"'{'#8c8c8c' if theme == 'light' else '#666'}'"
    )
    assert (
        dict(page.evaluate(CONTRASTS))["model"] < 4.5
    )  # the measurement sees grey that is a little too faint
    grounds[theme] = page.evaluate(ground)
    page.emulate_media(color_scheme=other)
    grounds[other] = page.evaluate(ground)
    assert (
        sum(map(int, re.findall(r"\d+", grounds["dark"])[:3]))
        < 150
        < 600
        < sum(map(int, re.findall(r"\d+", grounds["light"])[:3]))
    )
    page.get_by_role("button", name=f"{theme} theme").click()
    assert page.evaluate(ground) == grounds[theme]
    page.reload()
    assert page.evaluate(ground) == grounds[theme]


@pytest.mark.parametrize("width", [375, 700, 1000, 1920])
def test_no_element_is_wider_than_the_window(
    open_page: Open, server: ServerProcess, width: int
) -> None:
    page = ready(open_page(server.url, width=width))
    ask(page, "9" * 200, **{"max-tokens": "60"})
    expect(page.locator("#figures")).to_contain_text("seed")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    cut = "(e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1"
    assert (
        page.evaluate(
            f"[...document.querySelectorAll('dd, button, li')].filter({cut}).map((e) => e.id)"
        )
        == []
    )
