"""The dashboard below a path prefix of a reverse proxy that strips it."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from backhaul_runtime.process.credentials import make_token, read_token
from support.dashboards import Dashboard
from support.pages import SECTIONS, OpenPage, Training
from support.prefix_proxy import PrefixProxy

pytestmark = pytest.mark.browser
PREFIX = "/ml/backhaul"


def test_every_part_of_the_page_works_below_a_prefix(trained: Training, open_page: OpenPage) -> None:
    with PrefixProxy(PREFIX, trained.dashboard.url) as proxy:
        page = open_page(proxy.url)
        for section in SECTIONS:
            page.locator(f"#{section}").scroll_into_view_if_needed()
        expect(page.locator("#segments-table tbody tr")).to_have_count(36)
        expect(page.locator("#runs-table tbody tr")).to_have_count(3)
        expect(page.locator("#rpcs tbody tr").first).to_be_visible()
        assert page.evaluate(
            "document.fonts.ready.then((fonts) => [...fonts].every((font) => font.status === 'loaded'))"
        )
        for link in page.locator("a[href]:not([href^='#'])").all():
            assert page.request.get(link.evaluate("(link) => link.href")).ok
        page.get_by_role("link", name="API").first.click()
        page.locator("#operations-now-workers .opblock-summary-control").click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        expect(page.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
        page.get_by_role("link", name="Dashboard").click()
        expect(page).to_have_url(proxy.url)
        page.goto("about:blank")


@pytest.mark.parametrize("knows_prefix", [False, True])
def test_a_browser_logs_in_below_a_prefix(knows_prefix: bool, open_page: OpenPage, tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    options = ("--token-file", str(tmp_path / "token"), *(("--root-path", PREFIX) if knows_prefix else ()))
    with (
        Dashboard("127.0.0.1:1", options=options) as dashboard,
        PrefixProxy(PREFIX, dashboard.url) as proxy,
    ):
        page = open_page(proxy.url, may_be_refused=True)
        expect(page).to_have_url(f"{proxy.url}login")
        page.locator("input[name=token]").fill(read_token(tmp_path / "token"))
        page.keyboard.press("Enter")
        expect(page.locator(".alert")).to_be_visible()
        assert page.url == proxy.url
        (cookie,) = page.context.cookies()
        assert cookie["path"] == (f"{PREFIX}/" if knows_prefix else "/")
        page.goto(f"{proxy.url}api")
        expect(page.locator(".opblock").first).to_be_visible()
        page.goto("about:blank")
