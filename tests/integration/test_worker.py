"""The worker as a process: its addresses, its options, and its end."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from torch import nn

import backhaul
from backhaul import ConnectError
from backhaul_runtime.version import version
from conftest import QUIET, quiet, wait_until
from support.bits import grad_of
from support.nursery import run
from support.processes import WorkerProcess, is_running


def test_its_first_line_says_what_it_is_and_ends_with_its_address(worker: WorkerProcess) -> None:
    wanted = f"backhaul worker {version()} on cpu, torch {torch.__version__}, budget 2 GiB, listening on 127.0.0.1:"
    assert worker.line.startswith(wanted)
    assert worker.line == f"{wanted}{int(worker.address.rpartition(':')[2])}"


@pytest.mark.slow
def test_a_budget_that_the_machine_does_not_have_is_said(worker: WorkerProcess) -> None:
    with WorkerProcess("--memory", "64TiB") as generous:
        assert "budget 64 TiB" in generous.line
        assert "--memory 64 TiB is more than the " in generous.logged()
    assert "is more than the" not in worker.logged()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "0.0.0.0:0"], "can be reached from other machines"),
        (["--listen", "nowhere"], '"nowhere" can\'t be read'),
        (["--listen", "127.0.0.1:0", "--device", "abacus"], '"abacus" is no device of a worker'),
        (["--listen", "unix:/no/such/folder/b.sock"], "can't listen on /no/such/folder/b.sock"),
        (["--memory", "lots"], '"lots" is not a size: write a number with B, K, M, G or T, as in 8GiB'),
        (["--memory", "64"], '"64" has no unit: write 64GiB, 64MiB or another'),
        (["--memory", "0"], '"0" leaves no room: omit it to take half of the memory'),
        (["--token-file", "."], "can't be read: Is a directory. `backhaul token token` makes one"),
        (["--memory", "99999999T"], "more memory than any machine has"),
        (["--lease", "0"], '"0" is not a number of seconds above 0'),
    ],
)
def test_a_bad_option_is_named(arguments: list[str], message: str) -> None:
    process = run("worker", *arguments)
    assert process.returncode == 2
    assert message in process.stderr


def test_a_port_belongs_to_one_worker(worker: WorkerProcess) -> None:
    process = run("worker", "--listen", worker.address)
    assert process.returncode == 2
    assert f'can\'t listen on "{worker.address}": Address already in use' in process.stderr


@pytest.mark.slow
def test_a_socket_belongs_to_one_worker_and_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    with WorkerProcess(listen=f"unix:{path}"):
        process = run("worker", "--listen", f"unix:{path}")
        assert (process.returncode, process.stderr) == (2, f"backhaul worker: another worker listens on {path}\n")
        with backhaul.connect(f"unix:{path}", settings=QUIET) as session:
            session.checkpoint(torch.sin, torch.randn(3, requires_grad=True)).sum().backward()
            assert session.report().remote == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "important.txt"
    path.write_text("hello")
    process = run("worker", "--listen", f"unix:{path}")
    assert (process.returncode, path.read_text()) == (2, "hello")
    assert "it is a file, not a socket" in process.stderr


@pytest.mark.slow
def test_a_socket_left_behind_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    with WorkerProcess(listen=f"unix:{path}") as first:
        first.kill()
        assert path.exists()
        with WorkerProcess(listen=f"unix:{path}") as second:
            assert second.telemetry().draining is False


def test_health_and_reflection(worker: WorkerProcess) -> None:
    with grpc.insecure_channel(worker.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "backhaul_proto.v1.SegmentService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert "backhaul_proto.v1.SessionService" in services


@pytest.mark.slow
def test_sigterm_finishes_what_is_in_flight_and_ends_idle_streams() -> None:
    with WorkerProcess() as worker, grpc.insecure_channel(worker.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        statuses = health.Watch(health_pb2.HealthCheckRequest())
        assert next(statuses).status == health_pb2.HealthCheckResponse.SERVING
        with backhaul.connect(worker.address, settings=QUIET) as session:
            block, x = nn.Linear(1500, 1500), torch.randn(1500, 1500, requires_grad=True)
            y = session.checkpoint(lambda x: block(block(block(x))), x, returns="gradients")
            expected = torch.autograd.grad(block(block(block(x))).sum(), x)[0]
            wait_until(lambda: worker.telemetry().sessions[0].segments == 1, "the segment is saved")
            worker.process.send_signal(signal.SIGTERM)
            assert next(statuses).status == health_pb2.HealthCheckResponse.NOT_SERVING
            y.sum().backward()
            assert torch.equal(grad_of(x), expected)
        assert worker.process.wait(240) == 0
        with pytest.raises(grpc.RpcError):
            next(statuses)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_also_while_it_starts(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "backhaul", "worker", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as starting:
        children = Path(f"/proc/{starting.pid}/task/{starting.pid}/children")
        wait_until(lambda: children.read_text() != "", "the process that will serve is there")
        starting.send_signal(number)
        assert starting.communicate(timeout=240) == (b"", b"")
    assert starting.returncode == 128 + number


def serving_again(worker: WorkerProcess, before: int) -> None:
    """Waits until the supervisor has started another worker."""
    wait_until(lambda: worker.serving() not in {0, before}, "another process is started")
    assert not worker.telemetry().draining


@pytest.mark.slow
def test_a_worker_that_dies_is_started_again_at_the_same_address() -> None:
    with WorkerProcess(supervised=True) as worker:
        epoch, first = worker.telemetry().epoch, worker.pid
        os.kill(first, signal.SIGSEGV)
        serving_again(worker, first)
        assert worker.telemetry().epoch != epoch
        with backhaul.connect(worker.address, settings=QUIET) as session:
            session.checkpoint(torch.sin, torch.randn(3, requires_grad=True), returns="gradients").sum().backward()
            assert session.report().remote == 1
        second = worker.serving()
        worker.process.terminate()
        assert worker.process.wait(15) == 0
        assert not is_running(second)
        logged = worker.logged()
    assert "The worker was ended by SIGSEGV: it is restarted in 0 s" in logged
    assert f"The worker runs again as process {second}" in logged
    assert "Traceback" not in logged


@pytest.mark.slow
def test_the_worker_ends_with_a_supervisor_that_is_killed() -> None:
    with WorkerProcess(supervised=True) as worker:
        mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
        assert "/torch/" not in mapped
        assert "cygrpc" not in mapped
        worker.process.kill()
        worker.process.wait()
        wait_until(lambda: not is_running(worker.pid), "the worker is gone")


@pytest.mark.slow
def test_memory_that_a_step_freed_is_kept_until_the_last_trainer_has_gone(own_worker: WorkerProcess) -> None:
    def resident() -> int:
        return own_worker.telemetry().memory.resident_bytes

    def sines(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x.sin()
        return x

    before, saved_bytes = resident(), 8 * (16 << 20)
    with backhaul.connect(own_worker.address, settings=quiet(shared_memory=False)) as session:
        session.checkpoint(sines, torch.randn(4 << 20, requires_grad=True), returns="gradients").sum().backward()
        assert session.report().fallbacks == 0
        assert resident() > before + saved_bytes
    wait_until(lambda: resident() < before + saved_bytes // 2, "the worker gives its memory back")


@pytest.mark.slow
def test_an_embedded_worker_ends_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import backhaul, os, signal\n"
        "session = backhaul.connect()\n"
        "print(session._embedded.pid, session.workers.removeprefix('unix:'), flush=True)\n"
        "signal.pause()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert trainer.stdout is not None
    pid, path = trainer.stdout.readline().split()
    assert Path(path).is_relative_to(tmp_path)
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the worker ends with its trainer")
    assert not Path(path).parent.exists()


@pytest.mark.slow
def test_it_listens_where_a_name_points() -> None:
    with WorkerProcess(listen="localhost:0") as worker:
        assert not worker.telemetry().draining


def test_nobody_there_is_said_with_what_to_start() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectError, match=f"backhaul worker --listen {address}") as caught:
            backhaul.connect(address, settings=backhaul.Settings(connect_timeout_s=2))
    assert vars(caught.value)["address"] == address
    assert isinstance(caught.value, ConnectionError)


def test_a_server_of_another_kind_is_said_to_be_one() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(ConnectError, match="not a Backhaul worker"):
            backhaul.connect(f"127.0.0.1:{port}", settings=backhaul.Settings(connect_timeout_s=5))
        server.stop(None).wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is what the test must not find")
def test_a_device_that_is_missing_is_named_with_what_to_do() -> None:
    process = run("worker", "--device", "cuda", "--memory", "1GiB")
    assert process.returncode == 2
    assert process.stderr.startswith('backhaul worker: --device "cuda" can\'t be used: torch ')
    assert process.stderr.endswith("or use --device cpu\n")
