"""Measures how the costs of a dashboard grow with the number of workers and sessions.

    python benchmarks/measure_dashboard_growth.py [--seconds 20] [--costs docs/simulation.json]

It measures several sizes with the method of measure_dashboard.py, fits a line through them, and prints the costs for
each worker and session as JSON. With --costs it also writes them to a file of `backhaul simulate --json`, for the
predictions of `backhaul simulate-fleet`. The workers and sessions are simulated in this process. Each session reports a
step of one second with eight segments.
"""

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import httpx
import numpy as np

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.version import version
from measure_dashboard import cpu_s, look
from support.reporting import FakeWorker, Training

SIZES = ((50, 50), (100, 50), (200, 50), (50, 100), (50, 200), (50, 400))
"""The numbers of workers and of sessions that are measured."""
SEGMENTS = 8


class Crowd:
    """Workers and sessions that report each second. A context manager.

    Args:
        workers: Number of simulated workers.
        sessions: Number of sessions, each on one worker.
    """

    def __init__(self, workers: int, sessions: int) -> None:
        self._workers = [FakeWorker() for _ in range(workers)]
        self.addresses = [worker.address for worker in self._workers]
        began_at_s = time.time() - 10
        self._trainings = [
            Training(segments=SEGMENTS, workers=[self.addresses[i % workers]], step_s=1.0, began_at_s=began_at_s)
            for i in range(sessions)
        ]
        for i, training in enumerate(self._trainings):
            self._workers[i % workers].telemetry.sessions.add(
                run=training.run, trainer=f"node-{i}:4711", client_version=version(), segments=SEGMENTS
            )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report)

    def _report(self) -> None:
        step = 0
        while not self._ended.wait(1.0):
            for i, training in enumerate(self._trainings):
                calls = [training.call(step, number) for number in range(SEGMENTS)]
                report = telemetry_pb2.TrainerReport(run=training.about(), steps=[training.step(step)], calls=calls)
                self._workers[i % len(self._workers)].tell(report)
            for worker in self._workers:
                worker.served("Backward", [0.03] * 20)
                with worker.lock:
                    worker.telemetry.uptime_s += 1
                    worker.telemetry.recomputed_segments += 20
                    worker.telemetry.received_bytes += 100_000_000
            step += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        for worker in self._workers:
            worker.close()


def measure(workers: int, sessions: int, seconds: float) -> dict[str, float]:
    """Returns the part of a core that a dashboard uses, and the bytes that an open page receives in a second."""
    with Crowd(workers, sessions) as crowd:
        command = [sys.executable, "-m", "backhaul", "dashboard", "--listen", "127.0.0.1:0", "--store", ":memory:"]
        process = subprocess.Popen([*command, "--worker", *crowd.addresses], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = process.stdout.readline().rpartition(" ")[2].strip()
        ended, events = threading.Event(), list[int]()
        page = threading.Thread(target=look, args=(url, 1e6, ended, events))
        try:
            while httpx.get(f"{url}/readyz").status_code != httpx.codes.OK:
                time.sleep(0.1)
            page.start()
            time.sleep(5)  # leaves out the costs of starting
            events.clear()
            began_s, used_s = time.monotonic(), cpu_s(process.pid)
            time.sleep(seconds)
            passed_s = time.monotonic() - began_s
            share, sent = (cpu_s(process.pid) - used_s) / passed_s, fmean(events)
        finally:
            ended.set()
            page.join()
            process.send_signal(signal.SIGTERM)
            process.wait(10)
    return {"workers": workers, "sessions": sessions, "cpu_share": share, "event_bytes": sent}


def fit(sizes: list[dict[str, float]]) -> dict[str, float]:
    """Returns the costs without workers, for each worker and for each session, by least squares."""
    inputs = np.array([[1.0, size["workers"], size["sessions"]] for size in sizes])
    costs: dict[str, float] = {}
    for name in ("cpu_share", "event_bytes"):
        solved, *_ = np.linalg.lstsq(inputs, np.array([size[name] for size in sizes]), rcond=None)
        for suffix, value in zip(("", "_per_worker", "_per_session"), solved, strict=True):
            costs[f"{name}{suffix}"] = max(0.0, float(f"{value:.3g}"))
    return costs


def main() -> None:
    """Measures all sizes and prints the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--costs", type=Path)
    options = parser.parse_args()
    sizes = []
    for workers, sessions in SIZES:
        sizes.append(measure(workers, sessions, options.seconds))
        print(f"{workers} workers, {sessions} sessions: {sizes[-1]['cpu_share']:.1%} of a core", file=sys.stderr)
    result: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "costs": fit(sizes), "sizes": sizes}
    print(json.dumps(result, indent=2))
    if options.costs is not None:
        content = json.loads(options.costs.read_text())
        options.costs.write_text(json.dumps({**content, "dashboard": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
