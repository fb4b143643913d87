"""Measures resident memory and CPU time of a dashboard with many workers, segments and open pages.

    python benchmarks/measure_dashboard.py [--workers 50] [--segments 10000] [--pages 3] [--seconds 60]

The workers are simulated in this process. Each open page reads the event stream and, with --ask-every, requests memory,
latency, timeline, segments and runs as a browser does for a visible page.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.reporting import Fleet

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PARTS = ("memory", "latency", "timeline", "segments", "runs")


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


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


def main() -> None:
    """Measures the dashboard and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument(
        "--ask-every", type=float, default=0.0, help="seconds between the requests of a page; 0: no requests"
    )
    options = parser.parse_args()
    with Fleet(options.workers, options.segments) as fleet:
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
        process = subprocess.Popen([*command, *fleet.addresses], stdout=subprocess.PIPE, text=True)
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
            for page in pages:
                page.start()
            time.sleep(5)  # Leaves out the costs of starting.
            began_s, used_s = time.monotonic(), cpu_s(process.pid)
            time.sleep(options.seconds)
            share = (cpu_s(process.pid) - used_s) / (time.monotonic() - began_s)
            segments = httpx.get(f"{url}/api/v1/segments?limit=1").json()["total"]
            print(f"{options.workers} workers, {segments} segments, {options.pages} open pages, {options.seconds} s")
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
