"""Measures a dashboard of 50 workers and 200 sessions: its page in a browser, and its memory and CPU time.

    cd tests && python -m support.measure_dashboard [--workers 50] [--segments 10000] [--pages 3] [--seconds 60]

The workers and their trainers are simulated in this process. First, the page is opened in the machine's Chromium: the
time to its first numbers, and the time from a click to the frame that shows its effect. Then clients act as open pages:
each reads the event stream and, with --ask-every, requests memory, latency, timeline, segments and runs as a browser
does for a visible page.
"""

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from backhaul_lab.harness.core_times import process_ran_s
from support.chromium import chromium
from support.cluster import Cluster

_PARTS = ("memory", "latency", "timeline", "segments", "runs")
_FIRST_CONTENT_LIMIT_MS = 2_000
_CLICK_LIMIT_MS = 100
_SECTIONS = ("memory", "latency", "timeline", "segments", "events", "topology", "fleet", "runs", "overview")
_CLICKS = {
    "sort a table": ("#segments-table th:nth-child(4) button", "#segments-table th:nth-child(4)"),
    "turn a page": ("#segments-pager button:last-child", "#segments-pager p"),
    "unfold a worker": ("#workers tbody tr:first-child .expander", "#workers tbody tr:nth-child(2)"),
    "pick an RPC": ("#rpcs tbody tr:nth-child(2)", "#rpcs tbody tr:nth-child(2)"),
    "select a node": ("#topology-chart .node", "#topology-chart .node"),
    "enlarge the topology": ("#topology-in", "#topology-chart svg"),
    "fit the topology": ("#topology-fit", "#topology-chart svg"),
    "pause the timeline": ("#timeline-pause", "#timeline-pause"),
    "change the theme": ("#theme", "#theme"),
    "compare a run": ("#runs-table input:not(:disabled)", "#runs-hint"),
}
"""What is clicked, and what shows the effect. Both are CSS selectors."""
_FIRST_NUMBERS = """() => new Promise((resolve) => {
  const look = () => {
    const figures = [...document.querySelectorAll(".tile .figure")];
    if (figures.length > 0 && figures.every((figure) => figure.textContent !== "\u2013")) resolve(performance.now());
    else requestAnimationFrame(look);
  };
  look();
})"""
# The click is timed in the page, because the way from here to the browser takes longer than most effects. The message
# arrives once the frame with the effect has been painted.
_TIMED_CLICK = """([selector, shown]) => new Promise((resolve) => {
  const signature = () => [...document.querySelectorAll(shown)].map((node) => node.outerHTML.slice(0, 400)).join();
  const before = signature();
  const begunMs = performance.now();
  document.querySelector(selector).dispatchEvent(new MouseEvent("click", { bubbles: true }));
  const look = () => requestAnimationFrame(() => {
    if (signature() === before) return look();
    const channel = new MessageChannel();
    channel.port1.onmessage = () => resolve(performance.now() - begunMs);
    channel.port2.postMessage(0);
  });
  look();
})"""


def memory_mb(pid: int, key: str) -> float:
    """Returns a memory field of a process' status, such as "VmRSS", in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{key}:"))


def look(url: str, every_s: float, ended: threading.Event, events: list[int]) -> None:
    """Acts as an open page until `ended` is set, and appends the size of each event in bytes to `events`."""
    with httpx.Client(base_url=url, timeout=30) as client:

        def ask() -> None:
            while not ended.wait(every_s):
                for part in _PARTS:
                    client.get(f"/api/v1/{part}").raise_for_status()

        asking = threading.Thread(target=ask)
        asking.start()
        with httpx.stream("GET", f"{url}/api/v1/live", timeout=30) as stream:
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    events.append(len(line))
                if ended.is_set():
                    break
        asking.join()


def first_content_ms(browser: Browser, url: str) -> float:
    """Returns the time from the request for the page until its figures are shown, in a new browser profile."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(url, wait_until="commit")
    took_ms: float = page.evaluate(_FIRST_NUMBERS)
    context.close()
    return took_ms


def click_times(page: Page, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds from each click to the frame with its effect, for `rounds` clicks of each kind."""
    for section in _SECTIONS:
        page.locator(f"#{section}").scroll_into_view_if_needed()
        page.wait_for_timeout(500)  # each section loads when it is seen
    page.wait_for_selector("#segments-table tbody tr")
    page.wait_for_selector("#topology-chart .node")
    page.wait_for_selector("#runs-table input")
    took_ms: dict[str, list[float]] = {name: [] for name in _CLICKS}
    for _ in range(rounds):
        for name, selectors in _CLICKS.items():
            took_ms[name].append(page.evaluate(_TIMED_CLICK, list(selectors)))
    return took_ms


def measure_page(url: str, rounds: int) -> None:
    """Opens the page in a browser and prints how long its first content and its clicks take."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium())
        first_ms = [first_content_ms(browser, url) for _ in range(5)]
        print(
            f"first content: median {statistics.median(first_ms):.0f} ms, at most {max(first_ms):.0f} ms of "
            f"{len(first_ms)} visits (limit {_FIRST_CONTENT_LIMIT_MS:,} ms)"
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        took_ms = click_times(page, rounds)
        browser.close()
    every_ms = [ms for times_ms in took_ms.values() for ms in times_ms]
    nine_tenths_ms = statistics.quantiles(every_ms, n=10)[-1]
    print(
        f"clicks: median {statistics.median(every_ms):.0f} ms, 90 % within {nine_tenths_ms:.0f} ms "
        f"of {len(every_ms)} clicks (limit of the median {_CLICK_LIMIT_MS} ms)"
    )
    for name, times_ms in took_ms.items():
        print(f"  {name:22} median {statistics.median(times_ms):5.0f} ms, at most {max(times_ms):5.0f} ms")


def main() -> None:
    """Measures the dashboard and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=15, help="clicks of each kind; 0: do not open a browser")
    parser.add_argument(
        "--ask-every", type=float, default=0.0, help="seconds between the requests of a page; 0: no requests"
    )
    options = parser.parse_args()
    with Cluster(options.workers, options.segments) as cluster:
        command = [
            sys.executable,
            "-m",
            "backhaul",
            "dashboard",
            "--listen",
            "127.0.0.1:0",
            "--store",
            ":memory:",
            "--worker",
        ]
        process = subprocess.Popen([*command, *cluster.addresses], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = process.stdout.readline().rpartition(" ")[2].strip()
        ended, events = threading.Event(), list[int]()
        every_s = options.ask_every or float("inf")
        pages = [
            threading.Thread(target=look, args=(url, min(every_s, 1e6), ended, events)) for _ in range(options.pages)
        ]
        try:
            while httpx.get(f"{url}/readyz").status_code != httpx.codes.OK:
                time.sleep(0.1)
            cluster.start_jobs()
            print(
                f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, "
                f"Python {platform.python_version()}"
            )
            print(f"{options.workers} workers, {cluster.sessions} sessions, {options.segments} segments")
            if options.rounds:
                measure_page(url, options.rounds)
            for page in pages:
                page.start()
            time.sleep(5)  # Leaves out the costs of starting.
            began_s, used_s = time.monotonic(), (process_ran_s(process.pid) or 0.0)
            time.sleep(options.seconds)
            share = ((process_ran_s(process.pid) or 0.0) - used_s) / (time.monotonic() - began_s)
            segments = httpx.get(f"{url}/api/v1/segments?limit=1").json()["total"]
            print(f"{segments} segments known, {options.pages} open pages, {options.seconds} s")
            print(
                f"resident memory: {memory_mb(process.pid, 'VmRSS'):.1f} MB, at its peak "
                f"{memory_mb(process.pid, 'VmHWM'):.1f} MB"
            )
            print(f"CPU: {share:.1%} of one core")
            print(f"events: {len(events)}, {sum(events) / max(1, len(events)) / 1e3:.1f} KB each")
        finally:
            ended.set()
            for page in pages:
                page.join()
            process.send_signal(signal.SIGTERM)
            process.wait(10)


if __name__ == "__main__":
    main()
