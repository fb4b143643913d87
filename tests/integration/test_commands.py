"""`backhaul token` and `backhaul health`, as people and probes run them."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from backhaul_runtime.process.credentials import read_token
from conftest import wait_until
from support import nursery
from support.dashboards import Dashboard
from support.processes import WorkerProcess


def run(*arguments: str) -> tuple[int, str]:
    """Exit code, and all that was said."""
    process = nursery.run(*arguments)
    return process.returncode, process.stdout + process.stderr


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    run("token", str(path))
    return path


@pytest.fixture(scope="module")
def guarded_dashboard(token_file: Path) -> Iterator[str]:
    """The URL of a dashboard with a token."""
    with Dashboard("127.0.0.1:1", options=("--token-file", str(token_file))) as dashboard:
        yield dashboard.url


@pytest.mark.slow
def test_a_token_is_made_once_and_never_said(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert run("token", str(path)) == (0, f"{path} has a new token\n")
    token = read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert run("token", str(path)) == (0, f"{path} already has a token and was not changed\n")
    assert read_token(path) == token


@pytest.mark.slow
def test_a_place_where_no_token_can_be_is_named(tmp_path: Path) -> None:
    missing, short = tmp_path / "missing/token", tmp_path / "short"
    short.write_text("secret")
    assert run("token", str(missing)) == (2, f"backhaul token: can't write {missing}: No such file or directory\n")
    code, said = run("token", str(short))
    assert (code, "holds fewer than 16 characters" in said, "secret" in said) == (2, True, False)
    assert short.read_text() == "secret"


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "/", "", ".."])
def test_a_folder_is_no_place_for_a_token(folder: str) -> None:
    assert run("token", folder) == (2, f"backhaul token: can't write {folder or '.'}: Is a directory\n")


@pytest.mark.slow
def test_a_worker_that_serves_is_well(worker: WorkerProcess) -> None:
    assert run("health", worker.address) == (0, f"{worker.address}: serving\n")


@pytest.mark.slow
def test_a_worker_with_a_token_tells_probes_too(token_file: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/b.sock"
    with WorkerProcess("--token-file", str(token_file), listen=address):
        assert run("health", address) == (0, f"{address}: serving\n")


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_not_well(own_worker: WorkerProcess) -> None:
    os.kill(own_worker.pid, signal.SIGSTOP)
    try:
        code, said = run("health", own_worker.address, "--timeout", "0.5")
    finally:
        os.kill(own_worker.pid, signal.SIGCONT)
    assert (code, said) == (1, f"{own_worker.address}: it did not answer in time\n")


@pytest.mark.parametrize("prefix", ["", "http://"])
def test_nobody_there_is_not_well(prefix: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"{prefix}127.0.0.1:{nobody.getsockname()[1]}"
        code, said = run("health", address)
    assert (code, said) == (1, f"{address}: nothing listens at its address\n")


def test_a_web_server_is_no_worker() -> None:
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        of_worker_and_dashboard = run("health", address), run("health", f"http://{address}")
        server.shutdown()
    no_worker = f"{address}: what listens there does not speak gRPC, so it is no worker\n"
    no_dashboard = (
        f"http://{address}: what listens there answers 404 File not found: it is no dashboard, or not ready\n"
    )
    assert of_worker_and_dashboard == ((1, no_worker), (1, no_dashboard))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], '"nowhere" can\'t be read'), (["a:1", "--timeout", "0"], "not a number of seconds above 0")],
)
def test_a_bad_option_is_named(arguments: list[str], message: str) -> None:
    code, said = run("health", *arguments)
    assert (code, message in said) == (2, True)


@pytest.mark.slow
def test_a_dashboard_with_a_token_is_well_and_logs_people_in(guarded_dashboard: str, token_file: Path) -> None:
    assert run("health", guarded_dashboard) == (0, f"{guarded_dashboard}: serving\n")
    assert run("health", f"{guarded_dashboard}/no/such/path")[0] == 1

    with httpx.Client(base_url=guarded_dashboard, timeout=60) as client:
        led = client.get("/", headers={"accept": "text/html"})
        assert (led.status_code, led.headers["location"]) == (303, "login")
        form = client.get("/login").text
        for path in re.findall(r'(?:src|href)="([^"]+)"', form):
            assert client.get(path).status_code == 200
        assert not re.search(r"<script|<style|style=|onclick=|https?:", form)
        assert client.post("/login", data={"token": "wrong"}).status_code == 401
        assert client.post("/login", data={"token": read_token(token_file)}).status_code == 303
        assert "<title>Backhaul</title>" in client.get("/").text


@pytest.mark.parametrize("shown", [[], ["wrong"], ["TOKEN", "TOKEN"], ["TOKEN", "wrong"]])
def test_headers_come_as_they_were_sent(shown: list[str], guarded_dashboard: str, token_file: Path) -> None:
    token, url = read_token(token_file), urlsplit(guarded_dashboard)
    headers = "".join(f"Authorization: Bearer {token if word == 'TOKEN' else word}\r\n" for word in shown)
    with socket.create_connection((str(url.hostname), url.port or 0), timeout=60) as connection:
        connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n".encode())
        wait_until(lambda: bool(connection.recv(1, socket.MSG_PEEK)), "an answer")
        assert connection.recv(100).startswith(b"HTTP/1.1 401 Unauthorized\r\n")
