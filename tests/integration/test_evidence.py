"""What a session records of its steps, and that recording never disturbs the training."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session, SettingError
from backhaul._accumulate.whole_shares import WholeShares
from backhaul._evidence import evidence_thread
from backhaul._evidence.files import EvidenceWriter
from backhaul_runtime.program.custom.names import names
from conftest import quiet, wait_until
from support.evidence import Verified, Verify, files_of, verify
from support.functions import Scale
from support.processes import WorkerProcess
from support.whole import train as train_whole
from support.whole import whole_in


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The path of a directory of evidence that does not exist yet."""
    return tmp_path / "evidence"


@pytest.fixture
def verified(tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Runs the command on the directory."""

    def run(*options: str) -> Verified:
        return verify(directory, tmp_path, lambda: "".join(capsys.readouterr()), *options)

    return run


def recording(worker: WorkerProcess, directory: Path, share: float = 1.0, **settings: Any) -> Session:
    """A session that records all steps, unless told otherwise."""
    return backhaul.connect(worker.address, settings=quiet(evidence=str(directory), evidence_share=share, **settings))


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))


def train(session: Session, steps: int, model: nn.Module | None = None, **options: Any) -> list[Tensor]:
    """Trains a block of its own. Returns its last gradients."""
    model = block() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        session.checkpoint(model, torch.randn(4, 8, requires_grad=True), **options).square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return gradients


def steps_of(directory: Path) -> list[int]:
    return sorted({name.step for name, _ in files_of(directory)})


def reason_of(verified: Verify) -> str:
    """The reason of the only verdict, which is that the call can't be judged."""
    result = verified()
    (verdict,) = result.verdicts
    assert (result.code, verdict["outcome"]) == (2, "unknown")
    return str(verdict["why"])


def test_the_first_step_and_a_share_are_recorded(worker: WorkerProcess, directory: Path, verified: Verify) -> None:
    with recording(worker, directory, share=0.25) as session:
        train(session, 9)
    assert steps_of(directory) == [0, 4, 8]
    assert verified().code == 0


def test_a_session_goes_on_with_the_steps_of_the_directory(
    worker: WorkerProcess, directory: Path, verified: Verify
) -> None:
    for steps in (1, 2, 2):  # as a training that is killed again and again
        with recording(worker, directory, share=0.25) as session:
            train(session, steps)
    assert steps_of(directory) == [0]
    with recording(worker, directory, share=0.25) as session:
        train(session, 4)
    assert steps_of(directory) == [0, 4]
    assert verified().code == 0


def test_once_the_loop_ends_its_steps_those_of_optimizers_do_not_count(worker: WorkerProcess, directory: Path) -> None:
    with recording(worker, directory) as session:
        train(session, 1)
        session.checkpoint(block(), torch.randn(4, 8, requires_grad=True)).sum().backward()
        session.step()
        train(session, 3)
        session.step()
    assert steps_of(directory) == [0, 1, 2]
    counted = session.report().steps
    assert counted is not None
    assert counted.count == 3


def test_equal_tensors_are_stored_once(worker: WorkerProcess, directory: Path) -> None:
    model = block().requires_grad_(False)
    with recording(worker, directory) as session:
        train_frozen = torch.randn(4, 8, requires_grad=True)
        for _ in range(2):
            session.checkpoint(model, train_frozen).sum().backward()
            session.step()
    sizes = [path.stat().st_size for path in (directory / "objects").iterdir()]
    assert sizes.count(8 * 16 * 4) == 2  # the two weights
    assert sum(name.call > 0 and not name.backward for name, _ in files_of(directory)) == 2


@pytest.mark.parametrize("options", [{}, {"returns": "activations"}, {"graphs": "eager"}])
def test_each_kind_of_segment_is_equal_again(
    options: dict[str, Any], worker: WorkerProcess, directory: Path, verified: Verify, fresh_compiler: None
) -> None:
    with recording(worker, directory) as session:
        train(session, 3, **options)
    result = verified()
    assert (result.code, len(result.verdicts), result.outcomes) == (0, 3, {"equal"})


def test_a_segment_that_the_trainer_recomputes_is_recorded_too(
    own_worker: WorkerProcess, directory: Path, verified: Verify
) -> None:
    with recording(own_worker, directory) as session:
        loss = session.checkpoint(block(), torch.randn(4, 8, requires_grad=True)).sum()
        own_worker.process.kill()
        own_worker.process.wait()
        loss.backward()
    result = verified()
    assert (result.code, result.outcomes, result.verdicts[0]["workers"]) == (0, {"equal"}, [""])


def test_each_backward_of_a_kept_graph_is_recorded(worker: WorkerProcess, directory: Path, verified: Verify) -> None:
    with recording(worker, directory) as session:
        y = session.checkpoint(block(), torch.randn(4, 8, requires_grad=True))
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
    result = verified()
    assert (result.code, result.verdicts[0]["gradients"]) == (0, 2 * 5)


def test_gradients_of_an_accumulation_block_are_recorded(
    worker: WorkerProcess, directory: Path, verified: Verify
) -> None:
    model = nn.Sequential(block(), block())
    with recording(worker, directory) as session, session.accumulate() as accumulated:
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(4, 8, requires_grad=True)
            for layer in model:
                x = session.checkpoint(layer, x)
            accumulated.backward(x.square().sum())
    result = verified()
    assert (result.code, result.outcomes, len(result.verdicts)) == (0, {"equal"}, 6)
    assert all(verdict["gradients"] == 5 for verdict in result.verdicts)


def double(session: Session) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(session.checkpoint(torch.sin, x).sum(), x, create_graph=True)
    first.sum().backward()


def with_context(session: Session) -> None:
    def contexts() -> Any:
        return nullcontext(), nullcontext()

    x = torch.randn(4, 8, requires_grad=True)
    session.checkpoint(block(), x, context_fn=contexts).sum().backward()


def with_function(session: Session) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    session.checkpoint(lambda x: Scale.apply(x.sin(), weight, 2.0).cos(), x).sum().backward()


def test_a_backward_that_is_differentiated_is_named(worker: WorkerProcess, directory: Path, verified: Verify) -> None:
    with recording(worker, directory) as session:
        double(session)
    assert "create_graph=True needs the graph of its inside" in reason_of(verified)


@pytest.mark.parametrize(
    ("call", "why"), [(with_context, "it has a context_fn, which is code"), (with_function, "Scale")]
)
def test_what_can_not_be_recorded_is_named(
    call: Callable[[Session], None], why: str, worker: WorkerProcess, directory: Path, verified: Verify
) -> None:
    with recording(worker, directory) as session:
        call(session)
    assert why in reason_of(verified)


def test_custom_functions_that_a_worker_allows_are_named(directory: Path, verified: Verify) -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    names.denied.clear()  # as other workers of the same process do not allow it
    with (
        WorkerProcess("--allow", "support.functions", environment=environment) as worker,
        recording(worker, directory) as session,
    ):
        with_function(session)
    assert "custom functions, whose code is not in the directory" in reason_of(verified)


class Held:
    """Keeps the thread that writes from writing until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        write = EvidenceWriter.write

        def held(*arguments: Any, **options: Any) -> bool:
            assert self.released.wait(60)
            return write(*arguments, **options)

        monkeypatch.setattr(EvidenceWriter, "write", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """A disk on which nothing is written until the test says so."""
    return Held(monkeypatch)


def test_weights_that_change_before_they_are_written_are_those_of_forward(
    worker: WorkerProcess, directory: Path, verified: Verify, held: Held
) -> None:
    with recording(worker, directory) as session:
        train(session, 3)
        held.released.set()
    result = verified()
    assert (result.code, len(result.verdicts), result.outcomes) == (0, 3, {"equal"})


def test_a_captured_tensor_that_changes_before_it_is_written_is_named(
    worker: WorkerProcess, directory: Path, verified: Verify, held: Held
) -> None:
    captured = nn.Parameter(torch.ones(4, 8), requires_grad=False)
    with recording(worker, directory) as session:
        x = torch.randn(4, 8, requires_grad=True)
        train(session, 1)  # with which the thread waits
        session.checkpoint(lambda x: (x * captured).sin(), x).sum().backward()
        captured.zero_()
        held.released.set()
    verdicts = verified().verdicts
    assert [verdict["outcome"] for verdict in verdicts] == ["equal", "unknown"]
    assert "a captured tensor of shape [4, 8] was changed" in verdicts[1]["why"]


def test_training_does_not_wait_for_a_slow_disk(
    worker: WorkerProcess, directory: Path, verified: Verify, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_thread, "MOST_WAITING_BYTES", 1)
    with recording(worker, directory) as session:
        train(session, 2)  # both steps end although nothing was written
        held.released.set()
    result = verified()
    assert result.code == 2
    assert [verdict["outcome"] for verdict in result.verdicts] == ["unknown", "unknown"]
    assert "waiting for the disk, which is slower" in result.verdicts[1]["why"]


WRITES_OF_A_STEP = 12
"""The files that the first step of `train` has with its objects."""


@pytest.mark.parametrize("after", [0, 1, 7, WRITES_OF_A_STEP])
def test_a_full_disk_ends_the_recording_and_not_the_training(
    after: int,
    worker: WorkerProcess,
    directory: Path,
    verified: Verify,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    left, write = [after], EvidenceWriter._write

    def full(self: EvidenceWriter, path: Path, content: bytes) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        left[0] -= 1
        write(self, path, content)

    with recording(worker, directory) as session, caplog.at_level(logging.WARNING, "backhaul"):
        monkeypatch.setattr(EvidenceWriter, "_write", full)
        gradients = train(session, 3)
    with backhaul.connect(worker.address, settings=quiet()) as session:
        assert all(map(torch.equal, gradients, train(session, 3)))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "No more evidence is written" in said
    assert "No space left on device" in said
    result = verified()
    assert result.code == (0 if after == WRITES_OF_A_STEP else 2)  # else its step has no end, or there is no step
    assert result.outcomes <= {"equal", "unknown"}
    assert not list(directory.rglob("*.tmp"))


def test_the_directory_is_bounded_and_says_where_the_recording_ended(
    worker: WorkerProcess, directory: Path, verified: Verify, caplog: pytest.LogCaptureFixture
) -> None:
    limit_bytes = 256 << 10
    with (
        caplog.at_level(logging.WARNING, "backhaul"),
        recording(worker, directory, evidence_bytes=limit_bytes) as session,
    ):
        train(session, 8)
    files = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    assert (
        limit_bytes // 2 < sum(-(-size // 4096) * 4096 for size in files) <= limit_bytes + 2 * 4096
    )  # `lock`, `format`
    assert [record.getMessage() for record in caplog.records] == [
        f"No more evidence is written to {directory}: evidence_bytes allows no more. The training goes on, and what is "
        "there can be verified."
    ]
    result = verified()
    assert "evidence_bytes allows no more" in result.notes[0]
    assert "equal" in result.outcomes
    with recording(worker, directory, evidence_bytes=2 * limit_bytes) as session:  # and it goes on where there is room
        train(session, 1)
    assert len(verified().verdicts) > len(result.verdicts)


def test_a_killed_training_leaves_whole_files_and_the_next_goes_on(
    worker: WorkerProcess, directory: Path, verified: Verify
) -> None:
    program = (
        "import sys, torch, backhaul\n"
        "from torch import nn\n"
        "torch.set_num_threads(1)\n"
        "settings = backhaul.Settings(evidence=sys.argv[2], evidence_share=1.0)\n"
        "session = backhaul.connect(sys.argv[1], settings=settings)\n"
        "model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "while True:\n"
        "    session.checkpoint(model, torch.randn(4, 64, requires_grad=True)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, worker.address, str(directory)])
    try:
        steps = directory / "steps"
        wait_until(lambda: steps.exists() and len(list(steps.iterdir())) > 12, "some steps are recorded")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (directory / "objects" / f"{'0' * 64}.tmp").write_bytes(b"what the process was writing")
    result = verified()
    assert "DIFFERS" not in result.shown
    assert "was changed" not in result.shown
    last = max(steps_of(directory))
    assert {v["outcome"] for v in result.verdicts if v["step"] < last} == {"equal"}
    with recording(worker, directory) as session:
        train(session, 1)
    assert max(steps_of(directory)) == last + 1
    assert not list(directory.rglob("*.tmp"))
    again = verified("--step", str(last + 1))
    assert (again.code, again.outcomes) == (0, {"equal"})


@pytest.mark.parametrize(
    ("content", "why"),
    [("backhaul evidence 2\n", "this version of backhaul reads"), (None, "it has no file named format")],
)
def test_a_directory_of_something_else_is_refused(
    content: str | None, why: str, worker: WorkerProcess, directory: Path
) -> None:
    directory.mkdir()
    (directory / ("format" if content else "thesis.tex")).write_text(content or "x")
    before = sorted(path.name for path in directory.iterdir() if path.name != "lock")
    with pytest.raises(SettingError, match=why):
        recording(worker, directory)
    assert sorted(path.name for path in directory.iterdir() if path.name != "lock") == before


def test_the_directory_stays_where_it_was_when_the_session_began(
    worker: WorkerProcess, directory: Path, verified: Verify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with recording(worker, Path("evidence")) as session:
        monkeypatch.chdir(tmp_path / "other")
        train(session, 1)
    assert verified().code == 0


def test_a_directory_that_can_not_be_made_is_refused(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="can't be used"):
        recording(worker, tmp_path / "file" / "evidence")


def test_gradients_are_the_same_with_and_without_evidence(worker: WorkerProcess, directory: Path) -> None:
    with recording(worker, directory) as session:
        gradients = train(session, 3)
    torch.manual_seed(0)

    class Plain:
        checkpoint = staticmethod(lambda function, x: function(x))

    assert all(map(torch.equal, gradients, train(Plain(), 3)))  # type: ignore[arg-type]


def test_the_child_of_a_fork_records_nothing(worker: WorkerProcess, directory: Path, verified: Verify) -> None:
    with recording(worker, directory) as session:
        train(session, 1)
        if (child := os.fork()) == 0:
            session.checkpoint(block(), torch.randn(4, 8, requires_grad=True)).sum().backward()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train(session, 1)
    result = verified()
    assert (result.code, len(result.verdicts)) == (0, 2)


def test_whole_micro_batches_that_only_a_worker_runs_are_named(
    worker: WorkerProcess, directory: Path, verified: Verify, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    monkeypatch.setattr(WholeShares, "first", lambda self: 2)
    with recording(worker, directory) as session:
        train_whole(session)
        assert whole_in(session)
    result = verified()
    reasons = {verdict["why"] for verdict in result.verdicts if verdict["outcome"] == "unknown"}
    assert reasons == {"it is a whole micro-batch, whose forward only a worker has run"}
    assert result.outcomes <= {"equal", "unknown"}


def test_a_backward_after_the_end_of_the_session_queues_nothing(worker: WorkerProcess, directory: Path) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with recording(worker, directory) as session:
        y = session.checkpoint(block(), x)
        evidence = session._dispatcher.evidence
    assert evidence is not None
    y.sum().backward()
    assert x.grad is not None
    assert evidence._thread._waiting_bytes == 0
    assert evidence._thread._queue.empty()
