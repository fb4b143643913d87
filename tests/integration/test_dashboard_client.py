"""A client that openapi-python-client generates from the description of the API reads every route of it."""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from backhaul_proto.v1 import telemetry_pb2
from conftest import wait_until
from support.dashboards import Dashboard
from support.reporting import FakeWorker, Training

TOKEN = "0123456789abcdef0123456789abcdef"
PACKAGE = "generated_backhaul_api"
ARGUMENTS: dict[str, dict[str, Any]] = {"workers": {"limit": 1}, "memory": {"seconds": 60}, "timeline": {"steps": 2}}
"""Query parameters of some routes, by their operation ids. Paths have a parameter "run" in addition."""


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(segments=4, workers=["a:1", "b:2"], began_at_s=time.time() - 10)


@pytest.fixture(scope="module")
def dashboard(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    token_file = tmp_path_factory.mktemp("token") / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    report = training.report(range(5))
    report.run.MergeFrom(telemetry_pb2.Run(name="lora", tags=["a"], notes="n", rank=1, world_size=2))
    report.events.add(at_s=time.time(), kind="fell_back", text="Segment Block ran on the trainer: busy", count=3)
    report.links.add(worker="a:1", round_trip_s=0.001, clock_error_s=0.001, up_bytes=1, connected=True)
    report.sent_at_s = time.time()
    with FakeWorker() as worker, FakeWorker() as other:
        with worker.lock:
            worker.telemetry.accelerator.CopyFrom(telemetry_pb2.Accelerator(name="GPU", used_bytes=1, total_bytes=2))
            worker.telemetry.sessions.add(run=training.run, trainer="gpu-box:4711", segments=1)
        worker.tell(report)
        other.close()  # so that an alert fires
        options = ("--token-file", str(token_file))
        with Dashboard(worker.address, other.address, options=options).ready() as opened:
            opened._client.headers["Authorization"] = f"Bearer {TOKEN}"
            wait_until(lambda: opened.api("segments")["total"] == 4, "the training is told")
            wait_until(lambda: bool(opened.items("alerts")), "the alert fires")
            yield opened


@pytest.fixture(scope="module")
def document(dashboard: Dashboard) -> Any:
    return dashboard.api("openapi.json")


@pytest.fixture(scope="module")
def generated(document: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the client is a package, which can be imported."""
    folder = tmp_path_factory.mktemp("client")
    (folder / "openapi.json").write_text(json.dumps(document))
    (folder / "config.yml").write_text("post_hooks: []\n")
    command = [str(Path(sys.executable).with_name("openapi-python-client")), "generate", "--meta", "none"]
    files = ["--path", "openapi.json", "--config", "config.yml", "--output-path", PACKAGE, "--fail-on-warning"]
    done = subprocess.run([*command, *files], cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.mark.slow
def test_a_generated_client_reads_every_route(
    generated: Path, dashboard: Dashboard, document: Any, training: Training
) -> None:
    read = set()
    with importlib.import_module(PACKAGE).AuthenticatedClient(base_url=dashboard.url, token=TOKEN) as client:
        for path, methods in document["paths"].items():
            name, (tag,) = methods["get"]["operationId"], methods["get"]["tags"]
            module = importlib.import_module(f"{PACKAGE}.api.{tag.replace(' ', '_')}.{name}")
            if name == "live":
                _read_stream(client.get_httpx_client(), module)
            else:
                given = {"run": training.run} if "{run}" in path else {}
                answer = module.sync_detailed(client=client, **given, **ARGUMENTS.get(name, {}))
                assert answer.status_code == 200, (path, answer.content)
                if "application/json" in answer.headers["content-type"] and name != "timeline_trace":
                    # Nothing is lost on the way through the models of the client, so all of it is described.
                    assert answer.parsed.to_dict() == json.loads(answer.content), path
            read.add(path)
    assert read == set(document["paths"])


def _read_stream(client: httpx.Client, module: Any) -> None:
    """Reads the first event. The stream never ends, so the client's own function would never return."""
    with client.stream(**module._get_kwargs()) as stream:
        assert stream.status_code == 200
        assert next(line for line in stream.iter_lines() if line.startswith("data: "))


@pytest.mark.slow
def test_a_generated_client_turns_pages(generated: Path, dashboard: Dashboard) -> None:
    module = importlib.import_module(f"{PACKAGE}.api.events.events")
    ids, cursor = list[str](), ""
    with importlib.import_module(PACKAGE).AuthenticatedClient(base_url=dashboard.url, token=TOKEN) as client:
        while True:
            page = module.sync(client=client, limit=1, cursor=cursor)
            ids += [item.id for item in page.items]
            if page.next_ is None:
                break
            cursor = page.next_
    assert len(ids) == len(set(ids)) == page.total >= 3


@pytest.mark.slow
def test_a_generated_client_without_the_token_is_told_so(generated: Path, dashboard: Dashboard) -> None:
    package = importlib.import_module(PACKAGE)
    module = importlib.import_module(f"{PACKAGE}.api.now.overview")
    with package.Client(base_url=dashboard.url) as client:
        answer = module.sync_detailed(client=client)
    assert (answer.status_code, "token" in answer.parsed.detail) == (401, True)
