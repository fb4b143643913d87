"""The dashboard's event stream: the first event at once, then one a second, and an end within a second of SIGTERM."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import httpx
import pytest

from backhaul_server.dashboard.http.feed import MOST_LISTENERS
from conftest import wait_until
from support.cluster import Cluster
from support.dashboards import Dashboard
from support.reporting import FakeWorker, Training


@pytest.fixture
def worker_of_the_test() -> Iterator[FakeWorker]:
    with FakeWorker() as worker:
        yield worker


@pytest.mark.slow
def test_live_says_what_the_other_routes_say(worker_of_the_test: FakeWorker) -> None:
    training = Training(segments=2, began_at_s=time.time() - 1)
    worker_of_the_test.tell(training.report([0]))
    with Dashboard(worker_of_the_test.address).ready() as dashboard:
        wait_until(lambda: bool(dashboard.items("runs")), "the run is heard of")
        began_s = time.monotonic()
        first, second, third = islice(dashboard.live(), 3)
        took_s = time.monotonic() - began_s
        assert second["overview"]["at_s"] < third["overview"]["at_s"]
        assert took_s > 1
        assert [worker["address"] for worker in first["workers"]] == [worker_of_the_test.address]
        assert [run["run"] for run in first["runs"]] == [training.run]
        assert first["sessions"] == dashboard.items("sessions")
        assert first["overview"].keys() == dashboard.api("overview").keys()


@pytest.mark.slow
def test_events_are_named_and_say_when_to_come_back(worker_of_the_test: FakeWorker) -> None:
    with (
        Dashboard(worker_of_the_test.address) as dashboard,
        httpx.stream("GET", f"{dashboard.url}/api/v1/live", headers={"Accept-Encoding": "gzip"}) as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in stream.headers  # it would hold events back
        assert stream.headers["cache-control"] == "no-cache"
        assert stream.headers["content-security-policy"].startswith("default-src 'self'; ")
        event = list(islice(stream.iter_lines(), 3))
    assert [line.partition(":")[0] for line in event] == ["event", "data", "retry"]
    assert (event[0], event[2]) == ("event: live", "retry: 1000")


@pytest.mark.slow
def test_sigterm_ends_it_within_a_second_with_streams_open() -> None:
    with Cluster(20, 10_000, jobs=0) as cluster, ExitStack() as streams:
        dashboard = Dashboard(*cluster.addresses).ready()
        wait_until(lambda: dashboard.api("segments?limit=1")["total"] == 10_000, "all is told")
        opened = [
            streams.enter_context(httpx.stream("GET", f"{dashboard.url}/api/v1/live")).iter_lines() for _ in range(5)
        ]
        for lines in opened:
            assert next(lines) == "event: live"
        streams.enter_context(deaf(dashboard, "/api/v1/live"))
        stuck = streams.enter_context(deaf(dashboard, *["/api/v1/segments.csv"] * 8))
        waiting = Waiting(stuck)
        wait_until(lambda: waiting.for_s() > 0.5, "no more fits between them")
        began_s = time.monotonic()
        dashboard.close()
        assert (
            time.monotonic() - began_s < 9
        )  # less than what a stuck client is given; a second where nothing else runs
        for lines in opened:
            assert list(lines)[-1] == ""  # they end as they should, after a whole event


@pytest.mark.nightly
def test_a_listener_that_does_not_read_costs_nobody_anything() -> None:
    with (
        Cluster(50, 100, jobs=0) as cluster,
        Dashboard(*cluster.addresses).ready() as dashboard,
        deaf(dashboard, "/api/v1/live"),
        deaf(dashboard, *["/api/v1/workers"] * 500),
    ):
        first, *_, last = islice(dashboard.live(), 5)
        assert 3 < last["overview"]["at_s"] - first["overview"]["at_s"] < 8
        assert dashboard.get("/healthz").status_code == 200


@pytest.mark.slow
def test_only_so_many_follow_the_stream_at_once(worker_of_the_test: FakeWorker) -> None:
    with Dashboard(worker_of_the_test.address).ready() as dashboard, ExitStack() as streams:
        followers = [streams.enter_context(deaf(dashboard, "/api/v1/live")) for _ in range(MOST_LISTENERS)]
        for follower in followers:
            assert follower.recv(15) == b"HTTP/1.1 200 OK"
        refused = dashboard.get("/api/v1/live")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert "100 pages follow this stream already" in refused.json()["detail"]
        assert dashboard.api("overview")["workers"] == 1
        followers.pop().close()

        def follows() -> bool:
            with httpx.stream("GET", f"{dashboard.url}/api/v1/live") as stream:
                return stream.status_code == 200

        wait_until(follows, "there is room again")


class Waiting:
    """What the kernel has of a server's answer that the client does not take."""

    def __init__(self, client: socket.socket) -> None:
        self._port = client.getsockname()[1]
        self._bytes, self._since_s = 0, time.monotonic()

    def for_s(self) -> float:
        """How long nothing was added to it; 0 while there is nothing."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        queued = sum(int(fields[4].split(":")[0], 16) for fields in lines if fields[2].endswith(f":{self._port:04X}"))
        if queued != self._bytes:
            self._bytes, self._since_s = queued, time.monotonic()
        return time.monotonic() - self._since_s if queued else 0.0


def deaf(dashboard: Dashboard, *paths: str) -> socket.socket:
    """A listener that asks and never reads what comes."""
    url = httpx.URL(dashboard.url)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listener.connect((url.host, url.port or 80))
    listener.sendall("".join(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in paths).encode())
    return listener
