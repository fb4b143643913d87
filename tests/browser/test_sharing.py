"""Charts as images, links to a view, and the whole page on paper."""

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from conftest import wait_until
from support.pages import SECTIONS, OpenPage, Training, box_of

pytestmark = pytest.mark.browser

FIGURES = ["memory-held", "memory-trainer", "heat", "phases", "timeline-chart", "topology-chart", "fleet-memory"]
CLIPBOARD = ["clipboard-read", "clipboard-write"]


@pytest.fixture
def page(trained: Training, open_page: OpenPage) -> Page:
    page = open_page(f"{trained.dashboard.url}/?all=1", permissions=CLIPBOARD)
    expect(page.locator("body")).to_have_attribute("data-loaded", "true")
    return page


def colours(png: bytes) -> int:
    """The number of different pixels in a picture, as Chromium writes them: 8 bits for each of 4 channels."""
    assert png.startswith(b"\x89PNG")
    (width,) = struct.unpack(">I", png[16:20])
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    raw = zlib.decompress(data)
    return len({raw[i : i + 4] for i in range(0, len(raw) - width, 4)})


def test_each_chart_is_copied_as_an_image(page: Page) -> None:
    pictures = set()
    for figure in FIGURES:
        button = page.locator(f"#{figure} .copy")
        button.scroll_into_view_if_needed()
        button.click()
        expect(button).to_have_text("Copied")
        copied = page.evaluate(
            """async () => {
              const [item] = await navigator.clipboard.read();
              const blob = await item.getType("image/png");
              return [...new Uint8Array(await blob.arrayBuffer())];
            }"""
        )
        pictures.add(bytes(copied))
        assert colours(bytes(copied)) > 8, figure
    assert len(pictures) == len(FIGURES)


def test_an_image_is_downloaded_where_the_clipboard_is_refused(trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url)
    page.evaluate("() => { navigator.clipboard.write = () => Promise.reject(new Error('refused')); }")
    expect(page.locator("#memory-held .u-over")).to_be_visible()
    with page.expect_download() as download:
        page.locator("#memory-held .copy").click()
    assert re.fullmatch(r"backhaul-Held-by-worker-[\d-]+\.png", download.value.suggested_filename)
    assert colours(Path(download.value.path()).read_bytes()) > 8
    expect(page.locator("#memory-held .copy")).to_have_text("Downloaded")


def test_a_link_to_the_view_is_copied(trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url, permissions=CLIPBOARD)
    page.locator("#range").select_option("900")
    page.locator("#share").click()
    expect(page.locator("#share")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"{trained.dashboard.url}/?range=900"


def test_a_picture_of_the_whole_page_has_every_section(page: Page) -> None:
    height = page.evaluate("document.documentElement.scrollHeight")
    for section in SECTIONS:
        box = box_of(page.locator(f"#{section}"))
        assert 0 <= box["y"] < box["y"] + box["height"] <= height
    expect(page.locator("#segments-table tbody tr")).to_have_count(36)
    expect(page.locator("#runs-table tbody tr")).to_have_count(3)
    for figure in FIGURES:
        expect(page.locator(f"#{figure} :is(canvas, svg.diagram)").first).to_be_visible()
    cut = page.evaluate(
        """() => [...document.querySelectorAll(".scroll")]
             .filter((node) => node.scrollHeight > node.clientHeight + 1).map((node) => node.ariaLabel)"""
    )
    assert cut == []
    assert len(page.screenshot(full_page=True)) > 50_000


@pytest.fixture
def printed(browser: Browser, trained: Training) -> Iterator[Page]:
    """A page whose print dialog only notes that it was opened, and what the page looked like then."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    context.add_init_script(
        """window.print = () => {
          dispatchEvent(new Event("beforeprint"));
          window.printed = {
            rows: document.querySelectorAll("#segments-table tbody tr").length,
            theme: document.documentElement.dataset.theme,
            loaded: document.body.dataset.loaded,
          };
          dispatchEvent(new Event("afterprint"));
        }"""
    )
    page = context.new_page()
    page.goto(trained.dashboard.url)
    expect(page.locator("#status")).to_have_attribute("data-state", "live")
    yield page
    context.close()


@pytest.mark.parametrize("way", ["button", "keys"])
def test_everything_is_loaded_before_a_print(way: str, printed: Page) -> None:
    if way == "button":
        printed.locator("#print").click()
    else:
        printed.keyboard.press("Control+p")
    wait_until(lambda: printed.evaluate("window.printed !== undefined"), "it prints")
    assert printed.evaluate("window.printed") == {"rows": 36, "theme": "light", "loaded": "true"}
    assert printed.evaluate("document.documentElement.dataset.theme") is None
    expect(printed.locator("body")).not_to_have_class(re.compile("is-printed"))


def test_paper_has_every_section_and_no_controls(page: Page, tmp_path: Path) -> None:
    page.emulate_media(media="print")
    for section in SECTIONS:
        expect(page.locator(f"#{section}")).to_be_visible()
    for control in ("#theme", "#print", "#range", "#segments-filter", "#memory-held .copy"):
        expect(page.locator(control)).to_be_hidden()
    page.pdf(path=tmp_path / "page.pdf", prefer_css_page_size=True)
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    printed = page.locator("#print-details").inner_text()
    assert re.match(r"All runs · \d+ \w+ [\d:]{8} to [\d:]{8} · printed on \d+ \w+ [\d:]{5} \d{4} · ", printed)
    assert printed.endswith(f"{urlsplit(page.url).netloc}/")
