"""Each part of the page shows what the API says."""

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, Position, expect

from backhaul_server.dashboard.collect.verdict import NOISE
from conftest import wait_until
from support.pages import OpenPage, Training, box_of
from support.shown import NONE, in_bytes, in_ms, in_percent, three_digits

pytestmark = pytest.mark.browser

LANES = ["forward", "wait", "upload", "queue", "recompute", "backward", "download"]


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def tile(page: Page, name: str) -> str:
    return squeezed(page.locator(f'[data-tile="{name}"]').inner_text())


def cells(page: Page, table: str) -> list[list[str]]:
    rows = page.evaluate(
        "selector => [...document.querySelectorAll(`${selector} tbody tr:not(.more)`)]"
        ".map(row => [...row.cells].map(cell => cell.innerText))",
        table,
    )
    return [[squeezed(cell) for cell in row] for row in rows]


def names_of(trained: Training) -> dict[str, str]:
    """What the page calls the runs of the demo, by id."""
    return {run["run"]: run["name"] for run in trained.dashboard.items("runs")}


def until_equal(shown: Callable[[], object], expected: Callable[[], object]) -> None:
    """Both are asked again until they agree: numbers may change in between."""
    last: list[object] = []

    def agree() -> bool:
        last[:] = [shown(), expected()]
        return last[0] == last[1]

    try:
        wait_until(agree, "page and API agree")
    except AssertionError:
        assert last[0] == last[1]
        raise


@pytest.fixture
def page(trained: Training, open_page: OpenPage) -> Page:
    return open_page(trained.dashboard.url)


def test_live_numbers_move_while_a_demo_trains(training: Training, open_page: OpenPage) -> None:
    page = open_page(training.dashboard.url)
    expect(page.locator("#status")).to_have_attribute("data-state", "live")
    rate = page.locator("[data-tile=rate] .figure")
    wait_until(lambda: rate.inner_text() > "0.1", "steps are told")
    recomputed = page.locator("#workers tbody tr:not(.more)").first.locator("td").nth(5)
    before = int(recomputed.inner_text().replace(",", ""))
    wait_until(lambda: int(recomputed.inner_text().replace(",", "")) > before, "more is recomputed")


def test_the_headline(page: Page, trained: Training) -> None:
    def headline() -> list[str]:
        overview = trained.dashboard.api("overview")
        added = overview["added_ms_per_step"]
        if added is None:  # no step has ended for a minute
            cost = f"{NONE} last known"
        else:
            parts = [overview[f"{part}_ms_per_step"] for part in ("wait", "overhead", "spared")]
            wait, own, spared = map(three_digits, parts)
            longer = f"{three_digits(abs(added))} ms {'longer' if added > 0 else 'shorter'}"
            figure = "equal" if abs(added) <= NOISE * parts[2] else longer
            cost = f"{figure} wait {wait} and overhead {own} ms for {spared} ms of recomputing here"
        gone = overview["remote_share"] is None  # no step has ended for five minutes
        return [
            f"Workers healthy {overview['healthy_workers']} of {overview['workers']} all healthy",
            f"Trainers connected {overview['sessions']} {trained.dashboard.api('sessions')['total']} sessions",
            f"Steps per second {three_digits(overview['steps_per_s'])} /s all runs, last 30 s",
            f"Memory saved {in_bytes(overview['saved_bytes'])} {in_bytes(overview['peak_saved_bytes'])} at the peak",
            f"Steps against torch's checkpoint {cost}",
            f"Remote share {in_percent(overview['remote_share'])} {'last known' if gone else 'last 5 min'}",
            f"Fallbacks {overview['fallbacks']} last 5 min",
        ]

    names = ["workers", "sessions", "rate", "saved", "added", "remote", "fallbacks"]
    until_equal(lambda: [re.sub(r" \d+ \w+ ago$", "", tile(page, name)) for name in names], headline)


def test_alerts(page: Page, trained: Training) -> None:
    def summaries() -> list[str]:
        alerts = sorted(trained.dashboard.items("alerts"), key=lambda alert: (alert["severity"], alert["since_s"]))
        return [f"{alert['summary']}." for alert in alerts[:3]]

    until_equal(lambda: page.locator(".alert-summary").all_inner_texts(), summaries)


def test_memory(page: Page, trained: Training) -> None:
    page.locator("#memory").scroll_into_view_if_needed()
    for number, worker in enumerate(trained.workers):
        page.locator("#memory-of").select_option(f"worker {worker.address}")

        def figures(number: int = number) -> list[str]:
            history = trained.dashboard.api("memory")["workers"][number]
            fields = ["segment_bytes", "working_bytes", "result_bytes", "cached_bytes"]
            marks = {
                kind: sum(m["count"] for m in history["marks"] if m["kind"] == kind) for kind in ("eviction", "refusal")
            }
            return [
                *[in_bytes(history[field][-1]) for field in fields],
                in_bytes(history["budget_bytes"]),
                f"{marks['eviction']:,}",
                f"{marks['refusal']:,}",
            ]

        until_equal(lambda: page.locator("#memory-held .legend b").all_inner_texts(), figures)
    label = page.locator("#memory-held .plot").get_attribute("aria-label")
    assert label is not None
    assert label.startswith(f"Held by worker {trained.workers[1].address}, last 10 min: now ")

    (run, *_) = trained.dashboard.api("memory")["runs"]
    page.locator("#memory-of").select_option(f"run {run['run']}")
    shown = [in_bytes(run["trainer_peak_bytes"][-1]), in_bytes(run["saved_bytes"][-1])]
    until_equal(lambda: page.locator("#memory-trainer .legend b").all_inner_texts(), lambda: shown)
    expect(page.locator("#memory-held figcaption")).to_contain_text(names_of(trained)[run["run"]])


def test_latency(page: Page, trained: Training) -> None:
    page.locator("#latency").scroll_into_view_if_needed()

    def latency_rows() -> list[list[str]]:
        rpcs = trained.dashboard.api("latency")["rpcs"]
        return [
            [rpc["method"], f"{rpc['calls']:,}", f"{rpc['errors']:,}", *[in_ms(rpc[f"p{p}_ms"]) for p in (50, 90, 99)]]
            for rpc in rpcs
            if rpc["method"] in {"Backward", "Recompute", "Save", "PutTensors"}
        ]

    def shown() -> list[list[str]]:
        rows = [[row[0].split(" ")[0], *row[1:]] for row in cells(page, "#rpcs")]  # without what the RPC is for
        return [row for row in rows if row[0] in {"Backward", "Recompute", "Save", "PutTensors"}]

    until_equal(shown, latency_rows)

    page.locator("#rpcs tbody tr", has_text="Backward").click()
    expect(page.locator("#heat figcaption")).to_have_text("Duration of Backward calls")
    heat = trained.dashboard.api("latency?method=Backward")["heat"]
    calls = sum(map(sum, heat["counts"]))
    expect(page.locator("#heat .plot")).to_have_attribute("aria-label", re.compile(f"^Heat map: {calls:,} calls"))


def test_phases_of_steps(page: Page, trained: Training) -> None:
    page.locator("#phases").scroll_into_view_if_needed()
    names = ["upload", "queue", "recompute", "backward", "download", "wait"]
    for phases in trained.dashboard.api("latency")["phases"]:
        page.locator("#run").select_option(phases["run"])
        expected = [in_ms(phases[f"{name}_ms"][-1]) for name in names]
        until_equal(lambda: page.locator("#phases .legend b").all_inner_texts(), partial(list, expected))


def test_timeline(page: Page, trained: Training) -> None:
    page.locator("#timeline").scroll_into_view_if_needed()
    timeline = trained.dashboard.api("timeline")
    expected = [
        ["0", str(step["number"]), in_ms(step["duration_ms"]), in_percent(step["overlap"]), in_ms(step["wait_ms"])]
        for step in timeline["steps"]
    ]
    until_equal(lambda: cells(page, "#steps"), lambda: expected)

    plot = page.locator("#timeline-chart .plot")
    first = min((span for span in timeline["spans"] if span["lane"] == "forward"), key=lambda span: span["start_ms"])
    plot.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#spoken")).to_contain_text(f"{first['segment']} forward")
    expect(page.locator("#timeline-pause")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Enter")
    call = timeline["calls"][first["call"]]
    panel = page.locator("#call")
    expect(panel.locator("h3")).to_have_text(call["segment"])
    facts = dict(zip(panel.locator("dt").all_inner_texts(), panel.locator("dd").all_inner_texts(), strict=True))
    assert facts["Worker"] == (call["worker"] or "none")
    assert facts["Decision"] == call["decision"]
    assert facts["Program"] == "recorded"
    assert facts["Why"] == call["reason"]
    assert facts["Sent"] == in_bytes(call["up_bytes"])
    for lane in {span["lane"] for span in timeline["spans"] if span["call"] == first["call"]}:
        total = sum(s["duration_ms"] for s in timeline["spans"] if s["call"] == first["call"] and s["lane"] == lane)
        assert facts[lane.capitalize()] == in_ms(total)
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


def test_an_accumulation_block_is_shown_with_its_shares_and_micro_batches(page: Page, trained: Training) -> None:
    (run,) = [
        run["run"]
        for run in trained.dashboard.items("runs")
        if trained.dashboard.api(f"timeline?run={run['run']}")["steps"][-1]["block"]
    ]

    def block() -> dict[str, Any]:
        shown: dict[str, Any] = trained.dashboard.api(f"timeline?run={run}")["steps"][-1]["block"]
        return shown

    def shares() -> list[list[str]]:
        return [
            [
                share["worker"] or "trainer",
                in_percent(share["share"]),
                in_ms(share["segment_ms"]) if share["segments"] else NONE,
                NONE if share["speed"] is None else f"{share['speed']:.2f}",
            ]
            for share in block()["shares"]
        ]

    page.locator("#timeline").scroll_into_view_if_needed()
    page.locator("#run").select_option(run)
    until_equal(lambda: cells(page, "#shares"), shares)
    expect(page.locator("#block-about")).to_contain_text(f"2 micro-batches in {in_ms(block()['took_ms'])}")

    page.locator("#timeline-rows").select_option("micro-batches")
    plot = page.locator("#timeline-chart .plot")
    for key, number in [("ArrowRight", "1"), *[("ArrowDown", "")] * 5]:  # to the last row
        plot.focus()
        page.keyboard.press(key)
        page.keyboard.press("Enter")
        facts = page.locator("#call dl").inner_text()
        assert f"Micro-batch\n{number}" in facts
    assert "Micro-batch\n2" in facts


def test_a_click_on_a_bar_shows_its_segment(page: Page, trained: Training) -> None:
    page.locator("#timeline").scroll_into_view_if_needed()
    page.locator("#timeline-steps").select_option("1")
    expect(page.locator("#steps tbody tr")).to_have_count(1)
    plot = page.locator("#timeline-chart .plot")
    box = box_of(plot)
    timeline = trained.dashboard.api("timeline?steps=1")
    span = max((s for s in timeline["spans"] if s["lane"] == "forward"), key=lambda s: s["duration_ms"])
    middle = (span["start_ms"] + span["duration_ms"] / 2) / timeline["duration_ms"]
    point: Position = {"x": 106 + middle * (box["width"] - 134), "y": 22 + 9}  # the first lane
    tip = page.locator("#tip")

    def is_told() -> bool:
        """Points there again: a chart that is drawn anew takes its tip away."""
        page.mouse.move(0, 0)
        plot.hover(position=point)
        return f"{span['segment']}\nforward: {in_ms(span['duration_ms'])}" in tip.inner_text()

    wait_until(is_told, "the bar is told of")
    plot.click(position=point)
    expect(page.locator("#call h3")).to_have_text(span["segment"])


def test_an_exported_trace_opens_and_no_bars_of_a_thread_overlap(page: Page) -> None:
    page.locator("#timeline").scroll_into_view_if_needed()
    expect(page.locator("#timeline-export")).to_have_attribute("href", re.compile("run="))
    with page.expect_download() as download:
        page.locator("#timeline-export").click()
    with open(download.value.path()) as file:  # noqa: PTH123  a path of Playwright's
        trace = json.load(file)
    assert re.fullmatch(r"backhaul-[0-9a-f]+-\d+\.json", download.value.suggested_filename)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) >= len(LANES)
    for bars in threads.values():
        bars.sort()
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(bars))


def _programs(row: dict[str, Any]) -> str:
    """What the table says of the programs of a segment that nobody has compiled."""
    text = f"{row['calls']:,} recorded"
    return f"{text} {row['programs']:,} programs" if row["programs"] > 1 else text


def test_segments(page: Page, trained: Training) -> None:
    page.locator("#segments").scroll_into_view_if_needed()

    def segment_rows(**query: str) -> list[list[str]]:
        return [
            [
                f"{row['segment']} {names_of(trained)[row['run']]}",
                f"{row['calls']:,}",
                in_bytes(row["up_bytes"]),
                in_bytes(row["down_bytes"]),
                in_ms(row["local_ms"]),
                in_ms(row["remote_ms"]) if row["remote_ms"] else NONE,
                in_ms(row["wait_ms"]),
                in_ms(row["overhead_ms"]),
                row["decision"],
                " ".join(dict.fromkeys([row["reason"], *[reason["reason"] for reason in row["reasons"]]])),
                _programs(row),
                row["worker"] or NONE,
                *[f"{row[field]:,}" for field in ("fallbacks", "mismatches")],
                "0",
                f"{row['retries']:,}",
            ]
            for row in trained.dashboard.api(f"segments?{urlencode({'limit': 50, **query})}")["rows"]
        ]

    def shown() -> list[list[str]]:
        """Without what changes as time passes."""
        rows = cells(page, "#segments-table")
        return [[re.sub(r" [\d,]+ calls?, last \S+ \S+ ago", "", cell) for cell in row] for row in rows]

    assert len(segment_rows()) == 36  # two micro-batches of six segments in three runs
    until_equal(shown, segment_rows)
    expect(page.locator("#segments-pager p")).to_have_text(f"1{NONE}36 of 36 segments")

    head = page.locator("#segments-table th", has_text="Received")
    head.locator("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    head.locator("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    until_equal(shown, lambda: segment_rows(sort="down_bytes", descending="true"))

    page.locator("#segments-filter").fill("#3")
    until_equal(shown, lambda: segment_rows(sort="down_bytes", descending="true", filter="#3"))
    link = page.locator("#segments-csv").get_attribute("href")
    assert link is not None
    lines = trained.dashboard.get(link).text.splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == ["Block #3"] * 3

    page.locator("#segments-filter").fill("no such")
    expect(page.locator("#segments > .empty")).to_have_text(
        "No segment matches these filters. Choose another word, reason or run."
    )


def test_workers_and_sessions(page: Page, trained: Training) -> None:
    page.locator("#fleet").scroll_into_view_if_needed()

    def told_workers() -> list[list[str]]:
        return [
            [
                worker["address"],
                worker["state"],
                f"{in_percent(worker['memory_share'])} of {in_bytes(worker['memory']['budget_bytes'])}",
                str(worker["sessions"]),
                f"{worker['recomputed_segments']:,}",
                in_bytes(worker["received_bytes"]),
                in_bytes(worker["sent_bytes"]),
            ]
            for worker in trained.dashboard.items("workers")
        ]

    def shown_workers() -> list[list[str]]:
        return [[*row[:2], *row[3:8]] for row in cells(page, "#workers")]

    until_equal(shown_workers, told_workers)

    def told_sessions() -> list[list[str]]:
        return [
            [
                names_of(trained)[session["run"]],
                session["trainer"],
                session["worker"],
                f"{in_percent(session['quota_share'])}, {in_bytes(session['held_bytes'])}",
                str(session["segments"]),
                session["client_version"],
                session["last_error"] or NONE,
            ]
            for session in trained.dashboard.items("sessions")
        ]

    until_equal(lambda: [[*row[:3], *row[4:6], *row[7:]] for row in cells(page, "#sessions")], told_sessions)

    page.locator("#workers .expander").first.click()
    more = page.locator("#workers tr.more").inner_text()
    (worker, _) = trained.dashboard.items("workers")
    for name, value in worker["fingerprint"].items():
        assert f"{name}\n{value}" in more
    assert worker["epoch"] in more
    assert f"Version\n{worker['version']}" in more


def test_runs(page: Page, trained: Training) -> None:
    page.locator("#runs").scroll_into_view_if_needed()

    def added(verdict: dict[str, Any]) -> str:
        difference = verdict["added_ms"] - verdict["spared_ms"]
        return f"{'+' if difference > 0 else ''}{in_ms(difference)}"

    def run_rows() -> list[list[str]]:
        return [
            [
                names_of(trained)[run["run"]],
                run["state"],
                in_percent(run["verdict"]["saved_share"]),
                added(run["verdict"]),
                run["trainer"],
                f"{run['steps']:,}",
                in_ms(run["median_step_ms"]),
                in_bytes(run["peak_bytes"]),
                in_bytes(run["up_bytes"]),
                in_bytes(run["down_bytes"]),
                f"{run['fallbacks']:,}",
                f"{run['last_loss']:.4f}",
            ]
            for run in trained.dashboard.items("runs")
        ]

    until_equal(lambda: [[*row[1:6], *row[7:]] for row in cells(page, "#runs-table")], run_rows)

    page.locator("#runs-table input").nth(2).check()  # the page selects two runs by itself
    runs = trained.dashboard.items("runs")
    shown = [(run["run"], trained.dashboard.api(f"runs/{run['run']}/steps")) for run in runs]
    for field, text in (("step_ms", in_ms), ("peak_bytes", in_bytes), ("moved_bytes", in_bytes)):
        last = ", ".join(f"{names_of(trained)[run]} {text(series[field][-1])}" for run, series in shown)
        expect(page.locator(f"#compare-{field} .plot")).to_have_attribute("aria-label", re.compile(re.escape(last)))
    expect(page.locator("#compare-loss .plot")).to_have_attribute("aria-label", re.compile(r"^Loss at the last step: "))
    differing = page.locator("#differences tbody :is(th, td)").all_inner_texts()
    assert set(differing) == {"returns", "gradients", "activations"}

    page.locator("#runs-table input").first.uncheck()
    expect(page.locator("#compare-legend li")).to_have_text([names_of(trained)[run["run"]] for run in runs[1:]])
    expect(page.locator("#runs-hint")).to_have_text("2 of at most 6 selected")


def test_the_api_page_tells_every_route(page: Page, trained: Training, open_page: OpenPage) -> None:
    described = trained.dashboard.get("/api/v1/openapi.json").json()
    api = open_page(f"{trained.dashboard.url}/api")
    routes = api.locator(".opblock-summary-path")
    expect(routes).to_have_count(len(described["paths"]))
    shown = [text.replace("\u200b", "") for text in routes.all_inner_texts()]
    assert sorted(shown) == sorted(described["paths"])
    api.locator("#operations-memory_and_latency-memory .opblock-summary-control").click()
    memory = api.locator("#operations-memory_and_latency-memory")
    for parameter in described["paths"]["/api/v1/memory"]["get"]["parameters"]:
        expect(memory).to_contain_text(parameter["description"].replace("`", ""))  # it is Markdown
    memory.get_by_role("button", name="Try it out").click()
    memory.get_by_role("button", name="Execute").click()
    expect(memory.locator(".live-responses-table")).to_contain_text("segment_bytes")
