"""docker-compose.yml, really run: `make compose-test`.

Pytest collects no files of this name by itself: a container engine is needed. COMPOSE is the command (default: docker
compose), COMPOSE_UP the options of its `up` (default: --build).
"""

import json
from collections.abc import Iterator
from subprocess import CalledProcessError

import pytest
import yaml

from support.stack import DASHBOARD_TOKEN, WORKER_TOKEN, Stack, compose_config

pytestmark = pytest.mark.timeout(2400)  # with a build, and on a machine that is busy

DEMO_S = 900.0
CERTIFICATES = "/run/backhaul/certificates"
SERVING = ["worker-1", "worker-2", "dashboard"]

ASK = f"""
import grpc
from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.tls import TlsFiles
from backhaul_runtime.wire.stubs import stub
token = open("{WORKER_TOKEN}").read().strip()
files = TlsFiles.in_directory("/run/backhaul/certificates/worker")
with grpc.secure_channel("worker-2:50051", grpc.ssl_channel_credentials(**files.of_channel)) as channel:
    services = stub(channel, telemetry_pb2.DESCRIPTOR.services_by_name["TelemetryService"])
    for shown in (), (("authorization", "Bearer " + token[::-1]),), (("authorization", "Bearer " + token),):
        try:
            request = telemetry_pb2.GetTelemetryRequest()
            services.GetTelemetry(request, timeout=60, metadata=shown)
            print("OK")
        except grpc.RpcError as error:
            print(error.code().name)
"""


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The default profile after its demo has ended. What it logged is shown if anything failed."""
    failed = request.session.testsfailed
    with Stack() as stack:
        try:
            stack.ended("trainer", DEMO_S)
            yield stack
        finally:
            if request.session.testsfailed > failed or stack.exit_code("trainer") != 0:
                request.config.get_terminal_writer().line(stack.logs())


@pytest.fixture(scope="module")
def token(stack: Stack) -> str:
    """What the dashboard wants to be shown, as users learn it."""
    return stack.execute("dashboard", "cat", DASHBOARD_TOKEN).strip()


@pytest.mark.parametrize(
    ("profiles", "added"), [((), set()), (("monitoring",), {"prometheus", "grafana"}), (("gpu",), {"worker-gpu"})]
)
def test_the_file_is_understood_with_every_profile(profiles: tuple[str, ...], added: set[str]) -> None:
    services = yaml.safe_load(compose_config(*profiles))["services"]
    assert added | {"secrets", "trainer", *SERVING} <= set(services)


def test_the_demo_is_bitwise_equal_and_all_of_it_remote(stack: Stack) -> None:
    assert stack.exit_code("trainer") == 0
    command = ("run", "--rm", "-T", "--no-deps", "--entrypoint", "cat", "trainer", "/var/lib/backhaul/demo.json")
    results = json.loads(stack.compose(*command))
    assert results["all_equal"]
    plain, _, *remote = results["variants"]
    assert len(remote) == 3
    for variant in remote:
        assert variant["losses"] == plain["losses"]
        assert variant["segments_remote"] > 0
        assert variant["fallbacks"] == 0


def test_the_dashboard_shows_both_workers_at_work(stack: Stack, token: str) -> None:
    workers = stack.get_json("/api/v1/workers", token)["items"]
    assert [(worker["address"], worker["state"]) for worker in workers] == [
        ("worker-1:50051", "serving"),
        ("worker-2:50051", "serving"),
    ]
    assert all(worker["recomputed_segments"] > 0 for worker in workers)


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/workers", "/api/v1/openapi.json"])
def test_nothing_is_shown_without_the_token(path: str, stack: Stack, token: str) -> None:
    assert stack.get(path)[0] in {303, 401}
    assert stack.get(path, token[::-1])[0] in {303, 401}
    assert stack.get(path, token)[0] == 200


def test_the_api_denies_rather_than_leads_to_the_form(stack: Stack) -> None:
    assert stack.get("/api/v1/workers")[0] == 401
    assert stack.get("/healthz")[0] == 200  # tells nothing, and probes have no token


def test_a_worker_answers_nobody_without_a_certificate(stack: Stack) -> None:
    asked = 'import backhaul; backhaul.connect("worker-2:50051", settings=backhaul.Settings(connect_timeout_s=5))'
    with pytest.raises(CalledProcessError) as raised:
        stack.execute("worker-1", "env", "BACKHAUL_TLS=", "python", "-c", asked)
    assert "it requires TLS" in raised.value.stderr + raised.value.stdout


def test_a_worker_answers_no_other_container_without_the_token(stack: Stack) -> None:
    assert stack.execute("worker-1", "python", "-c", ASK).split() == ["UNAUTHENTICATED", "UNAUTHENTICATED", "OK"]


@pytest.mark.parametrize("service", SERVING)
def test_containers_can_change_nothing(service: str, stack: Stack) -> None:
    status = dict(line.split(":", 1) for line in stack.execute(service, "cat", "/proc/1/status").splitlines())
    assert set(status["Uid"].split()) == {"10001"}
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert int(status["NoNewPrivs"]) == 1
    with pytest.raises(CalledProcessError) as raised:
        stack.execute(service, "touch", "/opt/backhaul/it")
    assert "Read-only file system" in raised.value.stderr + raised.value.stdout


@pytest.mark.parametrize("service", ["worker-1", "worker-2"])
def test_workers_have_no_way_out(service: str, stack: Stack) -> None:
    routes = [line.split() for line in stack.execute(service, "cat", "/proc/net/route").splitlines()[1:]]
    assert routes
    assert "00000000" not in {destination for _, destination, *_ in routes}


def test_each_container_has_the_tokens_it_needs_for_its_own_eyes(stack: Stack) -> None:
    assert stack.execute("worker-1", "stat", "-c", "%a %u", WORKER_TOKEN).split() == ["600", "10001"]
    assert stack.execute("dashboard", "stat", "-c", "%a %u", DASHBOARD_TOKEN).split() == ["600", "10001"]
    assert stack.execute("worker-1", "stat", "-c", "%a %u", f"{CERTIFICATES}/worker/tls.key").split() == [
        "600",
        "10001",
    ]
    for path in (f"{CERTIFICATES}/ca.key", f"{CERTIFICATES}/trainer/tls.key"):
        with pytest.raises(CalledProcessError):
            stack.execute("worker-1", "cat", path)
    with pytest.raises(CalledProcessError):
        stack.execute("worker-1", "cat", DASHBOARD_TOKEN)  # one who breaks into a worker sees no dashboard


def test_tokens_stay_out_of_logs_and_arguments(stack: Stack, token: str) -> None:
    secrets = [token, stack.execute("worker-1", "cat", WORKER_TOKEN).strip()]
    assert len(set(secrets)) == 2
    output = stack.logs() + "".join(stack.execute(service, "cat", "/proc/1/cmdline") for service in SERVING)
    assert [secret for secret in secrets if secret in output] == []


def test_tokens_and_history_outlive_a_restart(stack: Stack, token: str) -> None:
    runs = [run["run"] for run in stack.get_json("/api/v1/runs", token)["items"]]
    assert runs  # the demo's
    stack.compose("run", "--rm", "-T", "--no-deps", "secrets")
    stack.compose("restart", "dashboard")
    assert stack.execute("dashboard", "cat", DASHBOARD_TOKEN).strip() == token
    _until_ready(stack)
    assert [run["run"] for run in stack.get_json("/api/v1/runs", token)["items"]] == runs


def test_all_end_by_themselves_when_asked_to(stack: Stack) -> None:
    stack.compose("stop")
    assert {service: stack.exit_code(service) for service in SERVING} == dict.fromkeys(SERVING, 0)


def _until_ready(stack: Stack) -> None:
    from conftest import wait_until

    def is_ready() -> bool:
        try:
            return stack.get("/readyz")[0] == 200
        except OSError:
            return False

    wait_until(is_ready, "the dashboard is back", timeout_s=60)
