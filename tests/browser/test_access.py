"""The page by keyboard, on a phone, in both themes, and for readers of screens."""

import re
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, expect

from backhaul_runtime.process.credentials import make_token, read_token
from support.dashboards import Dashboard
from support.pages import SECTIONS, OpenPage, Training, broken_rules

pytestmark = pytest.mark.browser
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


@pytest.fixture
def trained_page(trained: Training, open_page: OpenPage) -> Page:
    return open_page(trained.dashboard.url)


def test_a_keyboard_is_enough(trained_page: Page) -> None:
    page = trained_page
    for section in SECTIONS:
        page.locator(f"#{section}").scroll_into_view_if_needed()
    expect(page.locator("#segments-table tbody tr")).to_have_count(36)
    expect(page.locator("#runs-table tbody tr")).to_have_count(3)
    expect(page.locator("#rpcs tbody tr").first).to_be_visible()
    page.evaluate("scrollTo(0, 0); document.activeElement.blur()")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    expect(page.locator(".skip")).to_be_in_viewport()

    walked = []
    for _ in range(120):
        focused = page.evaluate(
            """() => {
              const node = document.activeElement;
              if (node === document.body) return null;
              const style = getComputedStyle(node);
              const section = node.closest("section")?.id ?? (node.closest("header.bar") ? "bar" : "rest");
              const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
              return [section, isSeen || node.matches(".skip"), node.id || node.className || node.tagName];
            }"""
        )
        if focused is None:
            break
        walked.append(focused)
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

    plot = page.locator("#timeline-chart .plot")
    plot.focus()
    for key in ("ArrowRight", "ArrowDown", "Enter", "+", "-", "0"):
        page.keyboard.press(key)
    expect(page.locator("#call")).to_be_visible()
    expect(page.locator("#spoken")).to_contain_text("ms")


def test_a_phone_is_enough(trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url, width=360, height=740, device_scale_factor=3, has_touch=True)
    for section in SECTIONS:
        page.locator(f"#{section}").scroll_into_view_if_needed()
        assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    expect(page.locator("#runs-table tbody tr")).to_have_count(3)
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


def test_everybody_can_read_and_use_the_page_in_both_themes(trained_page: Page) -> None:
    page = trained_page
    for section in SECTIONS:
        page.locator(f"#{section}").scroll_into_view_if_needed()
    expect(page.locator("#runs-table tbody tr")).to_have_count(3)
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        red, *_ = map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")))
        assert (red > 200) == (scheme == "light")
        assert broken_rules(page) == []


def test_everybody_can_read_and_use_the_other_pages(open_page: OpenPage, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    make_token(token_file)
    shown = {"authorization": f"Bearer {read_token(token_file)}"}
    with Dashboard("127.0.0.1:1", options=("--token-file", str(token_file))) as dashboard:
        login = open_page(f"{dashboard.url}/login")
        expect(login.locator("form")).to_be_visible()
        empty = open_page(dashboard.url, extra_http_headers=shown, may_be_refused=True)
        expect(empty.locator(".alert")).to_be_visible()
        api = open_page(f"{dashboard.url}/api", extra_http_headers=shown)
        expect(api.locator(".opblock").first).to_be_visible()
        for scheme in SCHEMES:
            for page in (login, empty):
                page.emulate_media(color_scheme=scheme)
                assert broken_rules(page) == []


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
