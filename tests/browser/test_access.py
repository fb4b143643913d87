"""The page by keyboard, on a phone, in both themes, and for readers of screens."""

import re

import pytest
from playwright.sync_api import Page, expect

from support.pages import SECTIONS, OpenPage, Training

pytestmark = pytest.mark.browser


@pytest.fixture
def trained_page(trained: Training, open_page: OpenPage) -> Page:
    return open_page(trained.dashboard.url)


def test_a_keyboard_is_enough(trained_page: Page) -> None:
    page = trained_page
    for section in SECTIONS:
        page.locator(f"#{section}").scroll_into_view_if_needed()
    expect(page.locator("#segments-table tbody tr")).to_have_count(12)
    expect(page.locator("#runs-table tbody tr")).to_have_count(2)
    expect(page.locator("#rpcs tbody tr").first).to_be_visible()
    page.evaluate("scrollTo(0, 0); document.activeElement.blur()")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    expect(page.locator(".skip")).to_be_in_viewport()

    walked = []
    for _ in range(120):
        found = page.evaluate(
            """() => {
              const node = document.activeElement;
              if (node === document.body) return null;
              const style = getComputedStyle(node);
              const section = node.closest("section")?.id ?? (node.closest("header.bar") ? "bar" : "rest");
              const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
              return [section, isSeen || node.matches(".skip"), node.id || node.className || node.tagName];
            }"""
        )
        if found is None:
            break
        walked.append(found)
        page.keyboard.press("Tab")
    assert [name for section, is_seen, name in walked if not is_seen] == []
    order = [section for i, (section, _, _) in enumerate(walked) if i == 0 or walked[i - 1][0] != section]
    assert [section for section in order if section in SECTIONS] == [s for s in SECTIONS if s in order]
    assert {"bar", "memory", "latency", "timeline", "segments", "fleet", "runs"} <= set(order)

    row = page.locator("#rpcs tbody tr").first
    row.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#rpcs tbody tr").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#rpcs tbody tr").nth(1)).to_have_attribute("aria-selected", "true")

    page.locator("#segments-table th button").nth(1).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#segments-table th").nth(1)).to_have_attribute("aria-sort", "ascending")

    page.locator("#runs-table input").first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#runs-table input").nth(1)).to_be_focused()

    canvas = page.locator("#timeline-chart canvas")
    canvas.focus()
    for key in ("ArrowRight", "ArrowDown", "Enter", "+", "-", "0"):
        page.keyboard.press(key)
    expect(page.locator("#call")).to_be_visible()
    expect(page.locator("#spoken")).to_contain_text("ms")


def test_a_phone_is_enough(trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url, width=360, height=740, device_scale_factor=3, has_touch=True)
    for section in SECTIONS:
        page.locator(f"#{section}").scroll_into_view_if_needed()
        assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    expect(page.locator("#runs-table tbody tr")).to_have_count(2)
    wide = page.evaluate(
        """() => [...document.querySelectorAll("main *")]
             .filter((node) => node.getBoundingClientRect().right > innerWidth + 1)
             .filter((node) => !node.closest(".scroll, .hidden"))
             .map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert wide == []
    ratio = page.evaluate(
        "(() => { const c = document.querySelector('#timeline-chart canvas'); return c.width / c.clientWidth; })()"
    )
    assert ratio == pytest.approx(3, abs=0.1)


CONTRAST = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || !node.getClientRects().length) continue;
    if (node.closest(".hidden, noscript, :disabled, [aria-hidden=true]")) continue;
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${node.className} ${node.textContent.slice(0, 30)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(scheme: str, trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url, scheme=scheme)
    for section in SECTIONS:
        page.locator(f"#{section}").scroll_into_view_if_needed()
    expect(page.locator("#runs-table tbody tr")).to_have_count(2)
    red, *_ = map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert (red > 200) == (scheme == "light")
    assert page.evaluate(CONTRAST) == []


def test_a_theme_that_was_chosen_is_remembered(trained_page: Page) -> None:
    page = trained_page
    root = page.locator("html")
    for theme, label in (("light", "light"), ("dark", "dark")):
        page.locator("#theme").click()
        expect(root).to_have_attribute("data-theme", theme)
        expect(page.locator("#theme")).to_have_attribute("aria-label", f"Theme: {label}")
    page.reload()
    expect(root).to_have_attribute("data-theme", "dark")
    page.locator("#theme").click()
    assert root.get_attribute("data-theme") is None


BASICS = """() => {
  const wrong = [];
  const nameOf = (node) => node.getAttribute("aria-label") || node.getAttribute("aria-labelledby")
    || node.labels?.[0]?.textContent.trim() || node.textContent.trim() || node.title;
  for (const node of document.querySelectorAll("button, a, input, select, [role=img], [role=region], section, nav")) {
    if (!node.closest("[hidden]") && !nameOf(node)) wrong.push(`no name: ${node.outerHTML.slice(0, 80)}`);
  }
  for (const node of document.querySelectorAll("img:not([alt])")) wrong.push(`no alt: ${node.outerHTML}`);
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) wrong.push(`twice: #${id}`);
  for (const node of document.querySelectorAll("[aria-labelledby]")) {
    const label = node.getAttribute("aria-labelledby");
    if (!document.getElementById(label)) wrong.push(`dangling: ${label}`);
  }
  let level = 0;
  for (const node of document.querySelectorAll("h1, h2, h3, h4")) {
    const now = Number(node.tagName[1]);
    if (now > level + 1) wrong.push(`skips to ${node.outerHTML}`);
    level = now;
  }
  for (const node of document.querySelectorAll("table")) if (!node.caption) wrong.push(`no caption: ${node.id}`);
  for (const node of document.querySelectorAll("th:not([scope])")) wrong.push(`no scope: ${node.outerHTML}`);
  if (document.querySelectorAll("main").length !== 1) wrong.push("not one main");
  if (!document.documentElement.lang) wrong.push("no language");
  return wrong;
}"""


@pytest.mark.parametrize("path", ["/", "/api"])
def test_nothing_that_readers_of_screens_need_is_missing(path: str, trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url + path)
    expect(page.locator("h2").nth(3)).to_be_visible()
    for section in SECTIONS if path == "/" else []:
        page.locator(f"#{section}").scroll_into_view_if_needed()
    assert page.evaluate(BASICS) == []
