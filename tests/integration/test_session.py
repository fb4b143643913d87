"""Sessions on real workers: budgets, versions, several workers, reports, forks, and the way out."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import backhaul
from backhaul import ConnectError, Decision, NotRemoteError, ProtocolVersionError, Session
from backhaul_proto.v1 import session_pb2
from backhaul_runtime.wire.protocol import PROTOCOL_VERSION
from conftest import QUIET, quiet, wait_until
from numerics.cases import blocks, stack
from support.bits import Checkpoint, differing, plainly, train
from support.processes import WorkerProcess, in_order
from support.wire import Services, serve

connect = partial(backhaul.connect, settings=QUIET)


def compared(session: Session, returns: str = "auto") -> None:
    steps = partial(train, build=blocks, run=stack, steps=3)
    assert differing(steps(partial(session.checkpoint, returns=returns)), steps(plainly)) == []


@pytest.mark.slow
def test_an_embedded_worker_needs_no_address_and_gets_no_signals_of_the_terminal(real_start: None) -> None:
    before = signal.getsignal(signal.SIGINT)
    with connect(settings=quiet(memory_bytes=1 << 30)) as session:
        assert session._embedded is not None
        assert session._embedded.pid is not None
        assert os.getpgid(session._embedded.pid) != os.getpgid(0)
        assert signal.getsignal(signal.SIGINT) is before
        assert session.workers.startswith("unix:")
        assert backhaul.current_session() is session
        compared(session)
        assert session.report().remote == 6
        folder = Path(session.workers.removeprefix("unix:")).parent
        assert folder.exists()
    assert not folder.exists()


def test_module_level_functions_use_the_current_session(session: Session) -> None:
    x = torch.randn(3, requires_grad=True)
    backhaul.checkpoint(torch.sin, x).sum().backward()
    backhaul.checkpoint_sequential([torch.sin, torch.cos], 2, x).sum().backward()
    with backhaul.patched():
        torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    model = backhaul.wrap(nn.Sequential(nn.Linear(3, 3)), nn.Linear)
    model(x).sum().backward()
    assert session.report().remote == 4


def test_an_argument_of_a_call_goes_before_the_settings_of_the_session(worker: WorkerProcess) -> None:
    def wrapped(**arguments: Any) -> int:
        model = session.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear, **arguments)
        return sum(isinstance(module, backhaul.SegmentModule) for module in model.modules())

    with connect(worker.address, settings=quiet(kept_layers=1)) as session:
        assert (wrapped(), wrapped(kept_layers=0)) == (1, 2)


@pytest.mark.parametrize("own", [{"strict": True}, {"returns": "loss"}, {"durability": 3}])
def test_patched_takes_no_more_keyword_arguments_than_torch(own: dict[str, Any], session: Session) -> None:
    given: list[dict[str, Any]] = []

    def block(x: Tensor, **own: Any) -> Tensor:
        given.append(own)
        return x.sin()

    x = torch.randn(3, requires_grad=True)
    with session.patched():
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, debug=False, **own).sum().backward()
        with pytest.raises(ValueError, match=f"^Unexpected keyword arguments: {next(iter(own))}$"):
            torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True, **own)
    assert given == [own]
    assert session.report().remote == 1


def test_a_decorator_made_in_a_patched_block_is_torchs_afterwards(session: Session) -> None:
    x = torch.randn(3, requires_grad=True)
    torchs: Any = torch.utils.checkpoint
    with session.patched():
        checkpointed = torchs.checkpoint(use_reentrant=False)(torch.sin)
        checkpointed(x).sum().backward()
        with pytest.raises(ValueError, match="no function"):
            torchs.checkpoint(use_reentrant=False, strict=True)
    checkpointed(x).sum().backward()
    assert session.report().segments[0].calls == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_patched_block_without_a_call_does_not_pass_in_silence(strict: bool, worker: WorkerProcess) -> None:
    quiet = pytest.raises(backhaul.NotRemoteError) if strict else pytest.warns(backhaul.NotRemoteWarning)
    with connect(worker.address, strict=strict), quiet as caught, backhaul.patched():
        torch.sin(torch.randn(3, requires_grad=True)).sum().backward()
    if not strict:
        assert isinstance(caught, pytest.WarningsRecorder)
        assert [warning.filename for warning in caught] == [__file__]


ANOTHER_TORCH = (
    "import sys, torch; torch.version.git_version = 'another'; from backhaul._cli.main import main; sys.exit(main())"
)


@pytest.mark.slow
def test_connect_warns_where_no_segment_can_go_to_a_worker(worker: WorkerProcess) -> None:
    threads = threading.active_count()
    with WorkerProcess("--memory", "1GiB", program=("-c", ANOTHER_TORCH)) as another:
        with pytest.warns(backhaul.NotRemoteWarning) as caught:
            session = connect(another.address)
        with session:
            session.checkpoint(torch.sin, torch.randn(3, requires_grad=True)).sum().backward()
            assert session.report().fallbacks == 1
        with connect(f"{another.address},{worker.address}"):
            pass  # one of them will do
        with pytest.raises(backhaul.NotRemoteWarning):
            connect(another.address)  # where warnings are errors nothing stays open
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", backhaul.NotRemoteWarning)
            connect(another.address).close()
    (warning,) = caught
    assert warning.filename == __file__
    assert f"of worker {another.address} torch is {torch.__version__.partition('+')[0]} " in str(warning.message)
    assert "another there. Install the same torch on both sides" in str(warning.message)
    wait_until(lambda: threading.active_count() <= threads, "threads end")


@pytest.mark.slow
def test_a_closed_session_still_trains(worker: WorkerProcess) -> None:
    session = connect(worker.address)
    linear = nn.Linear(3, 3)
    y = session.checkpoint(linear, torch.randn(2, 3, requires_grad=True))
    session.close()
    session.close()
    y.sum().backward()
    session.checkpoint(linear, torch.randn(2, 3)).sum().backward()
    report = session.report()
    assert (report.remote, report.fallbacks) == (0, 2)
    with pytest.raises(NotRemoteError, match="the session is closed"):
        session.checkpoint(linear, torch.randn(2, 3), strict=True)


def test_a_worker_of_another_version_is_refused_by_name() -> None:
    class Other:
        def OpenSession(self, request: object, context: object) -> session_pb2.OpenSessionResponse:  # noqa: N802
            return session_pb2.OpenSessionResponse(protocol_version=99, worker_version="9.9")

        def KeepSession(self, request: object, context: object) -> None:  # noqa: N802
            raise NotImplementedError

        def CloseSession(self, request: object, context: object) -> session_pb2.CloseSessionResponse:  # noqa: N802
            return session_pb2.CloseSessionResponse()

    with ThreadPoolExecutor() as pool:
        server = grpc.server(pool)
        serve(server, session_pb2, Other())
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        with pytest.raises(
            ProtocolVersionError, match=f"protocol 99 .*9.9.*, this trainer {PROTOCOL_VERSION} "
        ) as caught:
            connect(address)
        server.stop(None).wait()
    assert (vars(caught.value)["trainer"], vars(caught.value)["worker"]) == (PROTOCOL_VERSION, 99)


def test_a_trainer_of_another_version_is_refused_by_name(worker: WorkerProcess) -> None:
    with grpc.insecure_channel(worker.address) as channel, pytest.raises(grpc.RpcError) as caught:
        Services(channel).sessions.OpenSession(
            session_pb2.OpenSessionRequest(protocol_version=98, client_version="0.0.7"), timeout=60
        )
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "protocol 98 (backhaul 0.0.7)" in str(caught.value.details())


@pytest.mark.slow
@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_budget_too_small_for_one_segment(returns: str, caplog: pytest.LogCaptureFixture) -> None:
    with WorkerProcess("--memory", "20k") as worker, connect(worker.address) as session:
        compared(session, returns)
        report = session.report()
        assert (report.remote, report.fallbacks) == (0, 6)
        assert len([r for r in caplog.records if "but the budget is 20480" in r.getMessage()]) == 1
        with pytest.raises(NotRemoteError, match="it needs [0-9]+ bytes on the worker, but the budget is 20480"):
            session.checkpoint(nn.Linear(100, 100), torch.randn(100, 100), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_budget_for_some_segments_serves_those(returns: str) -> None:
    with WorkerProcess("--memory", "4M") as worker, connect(worker.address) as session:
        layers = [nn.Linear(256, 256) for _ in range(12)]

        def step(checkpoint: Checkpoint) -> list[Tensor]:
            h = torch.ones(256, 256, requires_grad=True) * 1
            for layer in layers:
                h = checkpoint(lambda h, layer=layer: layer(h).relu(), h)
            return list(torch.autograd.grad(h.sum(), [p for layer in layers for p in layer.parameters()]))

        expected = step(plainly)
        assert differing(step(partial(session.checkpoint, returns=returns)), expected) == []
        report = session.report()
        assert report.remote > 0
        assert report.fallbacks > 0
        memory = worker.telemetry().memory
        assert memory.refusals > 0
        assert memory.segment_bytes + memory.cached_bytes + memory.working_bytes <= memory.budget_bytes


def test_two_workers_get_a_contiguous_arc_each(
    worker: WorkerProcess, own_worker: WorkerProcess, equal_speeds: None
) -> None:
    before = worker.telemetry().recomputed_segments
    with connect(in_order(worker, own_worker)) as session:
        linear = nn.Linear(4, 4)
        for _ in range(2):
            h = torch.randn(2, 4, requires_grad=True)
            for _ in range(6):
                h = session.checkpoint(linear, h)
            h.sum().backward()
        assert session.report().remote == 12
    # The first pass in runs of four, the second in halves.
    assert own_worker.telemetry().recomputed_segments == 2 + 3
    assert worker.telemetry().recomputed_segments - before == 4 + 3


@pytest.mark.slow
def test_of_two_workers_one_that_dies_leaves_the_other(worker: WorkerProcess, equal_speeds: None) -> None:
    with WorkerProcess() as doomed, connect(in_order(doomed, worker)) as session:
        compared(session)
        doomed.kill()
        compared(session)
        wait_until(lambda: session._workers[0].connection.up is None, "the death is noticed")
        before = session.report()
        compared(session)
        assert session.report().fallbacks == before.fallbacks
        assert session.report().remote == before.remote + 6


@pytest.mark.slow
def test_another_thread_count_is_state_not_a_difference(session: Session) -> None:
    torch.set_num_threads(2)
    compared(session)
    assert session.report().fallbacks == 0


@pytest.mark.slow
def test_several_threads_train_at_once(session: Session) -> None:
    def train_alone(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        linear, x = nn.Linear(32, 32), torch.randn(8, 32, generator=generator, requires_grad=True)
        for _ in range(10):
            ours = torch.autograd.grad(session.checkpoint(linear, x).sum(), [x, *linear.parameters()])
            expected = torch.autograd.grad(linear(x).sum(), [x, *linear.parameters()])
            if wrong := differing(ours, expected):
                return wrong
        return []

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(train_alone, range(4))) == [[]] * 4
    assert session.report().remote == 40


def test_equal_weights_and_masks_travel_once(session: Session) -> None:
    linear, mask = nn.Linear(512, 512), torch.randn(512, 512)
    for parameter in linear.parameters():
        parameter.requires_grad_(False)
    for _ in range(3):
        h = torch.randn(2, 512, requires_grad=True)
        for _ in range(3):
            h = session.checkpoint(lambda h, mask: linear(h) @ mask, h, mask)
        h.sum().backward()
    once = 2 * 512 * 512 * 4
    assert once < session.report().up_bytes < 1.2 * once


@pytest.mark.slow
def test_the_gradient_a_worker_sent_does_not_travel_back(session: Session) -> None:
    h = torch.randn(256, 1024, requires_grad=True)
    sent = []
    for _ in range(4):
        h = session.checkpoint(torch.tanh, h, returns="gradients")
    wait_until(lambda: session.report().up_bytes > 4 * h.nbytes, "the inputs are sent")
    sent.append(session.report().up_bytes)
    h.backward(torch.randn_like(h))
    # One gradient goes up for the whole chain.
    assert h.nbytes <= session.report().up_bytes - sent[0] < 1.1 * h.nbytes
    assert session.report().remote == 4


def _train_in_child(session: Session, results: "multiprocessing.queues.SimpleQueue[object]") -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    gradient = torch.autograd.grad(session.checkpoint(linear, x).sum(), x)[0]
    results.put((torch.equal(gradient, torch.autograd.grad(linear(x).sum(), x)[0]), session.report().fallbacks))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_the_child_of_a_fork_trains_without_the_session(session: Session) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_train_in_child, args=(session, results))
    child.start()
    child.join(60)
    assert results.get() == (True, 1)
    assert child.exitcode == 0
    compared(session)
    assert session.report().fallbacks == 0


@pytest.mark.slow
def test_ctrl_c_in_backward_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import backhaul, os, signal, torch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job starts with it ignored
        "with backhaul.connect() as session:\n"
        "    y = session.checkpoint(torch.sin, torch.randn(4, requires_grad=True))\n"
        "    os.kill(session._embedded.pid, signal.SIGSTOP)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))\n"
        "    try:\n"
        "        y.sum().backward()\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', session._embedded.pid, flush=True)\n"
        "        os.kill(session._embedded.pid, signal.SIGCONT)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "BACKHAUL_SILENCE_S": "30"}
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    word, pid = process.stdout.split()
    assert (word, process.returncode, process.stderr) == ("interrupted", 0, "")
    assert not Path(f"/proc/{pid}").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_session_nobody_closed_is_closed_at_exit(tmp_path: Path) -> None:
    code = "import backhaul; print(backhaul.connect()._embedded.pid)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment, check=True
    )
    assert process.stderr == ""
    assert not Path(f"/proc/{process.stdout.strip()}").exists()
    assert list(tmp_path.iterdir()) == []


def test_an_embedded_worker_that_can_not_start_is_quoted(real_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConnectError, match="ended with code 1"):
        connect()


def test_decisions_are_reported(session: Session) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    session.checkpoint(layers, torch.randn(2, 4), returns="activations").sum().backward()
    session.checkpoint(layers, torch.randn(2, 4)).sum().backward()
    (segment,) = session.report().segments
    assert (segment.name, segment.calls) == ("Sequential", 2)
    assert segment.decisions == {Decision.ACTIVATIONS: 1, Decision.GRADIENTS: 1}
    assert segment.up_bytes > 0
    assert segment.down_bytes > 0
    assert segment.wait_s > 0
