"""A worker's operator allows functions, ops and types by name; nothing that a client sends does."""

import importlib
import os
import random
import string
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import grpc
import pytest
import torch
from torch import Tensor

import backhaul
from backhaul import Decision, Session, SettingError
from backhaul_proto.v1 import program_pb2
from backhaul_runtime.program.custom.names import names
from backhaul_server.worker.allowed import import_allowed
from conftest import QUIET
from support.bits import Checkpoint, plainly, same_bits
from support.function_calls import REMOTE, TRAINERS, WIDTH, checkpointing, trained
from support.functions import CountingBackward, Hidden, ReadsModule, Scale
from support.hostile import Hostile
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": str(TESTS)}


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gets a line for each event in the worker by which data could have become code."""
    return tmp_path_factory.mktemp("audit") / "events"


@pytest.fixture(scope="module")
def operators(noted: Path) -> Iterator[WorkerProcess]:
    """A worker whose operator allows the functions of the tests."""
    environment = {**ENVIRONMENT, "AUDIT_FILE": str(noted)}
    options = ("--memory", "1GiB", "--allow", "support.functions")
    with WorkerProcess(*options, environment=environment) as process:
        yield process


@pytest.fixture
def allowed(operators: WorkerProcess) -> Iterator[Session]:
    """A session on that worker."""
    with backhaul.connect(operators.address, settings=QUIET) as session:
        yield session
    names.denied.clear()


@pytest.mark.parametrize("form", REMOTE)
@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_another_process_runs_functions_exactly(form: str, returns: str, allowed: Session) -> None:
    same_bits(trained(REMOTE[form], checkpointing(allowed, returns=returns)), trained(REMOTE[form], plainly))
    report = allowed.report()
    assert (report.remote, report.fallbacks) == (2, 0), report


def test_a_backward_that_draws_is_noticed_by_the_worker(allowed: Session) -> None:
    body, reason = TRAINERS["draws in backward"]
    same_bits(trained(body, checkpointing(allowed, returns="gradients")), trained(body, plainly))
    (segment,) = allowed.report().segments
    assert segment.decisions == {Decision.TRAINER: 2, Decision.KEPT: 1}
    assert [reason in said for said in segment.reasons] == [True]


def test_a_backward_that_changes_what_it_reads_is_noticed_by_the_worker(allowed: Session) -> None:
    """Each replay would count once more, those of other trainers included."""

    def counted(checkpoint: Checkpoint) -> list[Tensor | None]:
        CountingBackward.calls = 0
        return trained(lambda h, w: CountingBackward.apply(h.sin() * w).cos(), checkpoint)

    same_bits(counted(checkpointing(allowed, returns="gradients")), counted(plainly))
    (segment,) = allowed.report().segments
    assert segment.decisions == {Decision.TRAINER: 2, Decision.KEPT: 1}
    assert ["has changed on the worker" in said for said in segment.reasons] == [True]
    CountingBackward.calls = 0


def test_micro_batches_with_functions(allowed: Session) -> None:
    def step(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        weights = [torch.randn(WIDTH, requires_grad=True) for _ in range(3)]

        def micro_batch(checkpoint: object) -> None:
            h = torch.randn(4, WIDTH)
            for w in weights:
                body = lambda h, w=w: Hidden.apply(Scale.apply(h, w, 2.0).sin(), w.outer(w))  # noqa: E731
                h = body(h) if session is None else session.checkpoint(body, h, returns="gradients")
            h.square().sum().backward()

        if session is None:
            for _ in range(3):
                micro_batch(None)
        else:
            with session.accumulate():
                for _ in range(3):
                    micro_batch(session)
        return [w.grad for w in weights]

    same_bits(step(allowed), step(None))
    assert allowed.report().fallbacks == 0


def test_a_function_may_change_between_the_forward_and_backward_of_a_micro_batch(
    allowed: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward is not deferred, so that it reads what it would read without a block."""
    w = torch.ones(WIDTH, requires_grad=True)
    with allowed.accumulate() as step:
        h = allowed.checkpoint(lambda h: ReadsModule.apply(h * w), torch.ones(4, WIDTH), returns="gradients")
        loss = h.sum() * 1
        monkeypatch.setattr("support.functions.SLOPE", 5.0)
        step.backward(loss)
        monkeypatch.undo()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.full((WIDTH,), 20.0))


@pytest.mark.parametrize("where", ["inside", "before"])
def test_a_function_before_the_last_segments_may_change_inside_a_block(
    where: str, allowed: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient(session: Session | None) -> Tensor | None:
        w = torch.ones(WIDTH, requires_grad=True)
        with session.accumulate() if session is not None else nullcontext() as block:
            for number in range(3):
                monkeypatch.setattr("support.functions.SLOPE", float(number + 2))
                h = torch.ones(4, WIDTH) * w
                if where == "inside" and session is not None:
                    h = session.checkpoint(lambda h: ReadsModule.apply(h.sin()), h, returns="activations")
                else:
                    h = ReadsModule.apply(h.sin() if where == "inside" else h)
                last = lambda h: h.sin() * w  # noqa: E731
                h = last(h) if session is None else session.checkpoint(last, h, returns="gradients")
                loss = h.square().sum()
                loss.backward() if block is None else block.backward(loss)
        return w.grad

    same_bits([gradient(allowed)], [gradient(None)])


def test_without_the_option_the_trainer_runs_them(session: Session) -> None:
    body = REMOTE["keeps tensors on its context"]
    same_bits(trained(body, checkpointing(session)), trained(body, plainly))
    report = session.report()
    assert report.remote == 0
    assert next(iter(report.segments[0].kept)).endswith("(a worker with --allow support.functions:Hidden would run it)")


def test_a_single_function_can_be_allowed() -> None:
    """The worker that `connect` starts finds modules where this process finds them."""
    with backhaul.connect(allow=["support.functions:Scale"], settings=QUIET) as session:
        body = REMOTE["saves a tensor and a number"]
        same_bits(trained(body, checkpointing(session)), trained(body, plainly))
        assert session.report().remote == 2
        other = REMOTE["keeps tensors on its context"]
        same_bits(trained(other, checkpointing(session)), trained(other, plainly))
        assert session.report().remote == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_installed_anywhere", "importing not_installed_anywhere failed: ModuleNotFoundError"),
        ("support.functions:Missing", "Missing is no torch.autograd.Function"),
        ("support.functions:trained", "trained is no torch.autograd.Function"),
        ("os", "not the name of a package or module that can be allowed"),
        ("torch", "not the name of a package or module that can be allowed"),
        ("../evil", "not the name of a package or module that can be allowed"),
        ("", "not the name of a package or module that can be allowed"),
        ("support functions", "not the name of a package or module that can be allowed"),
        ("support.functions:", "not the name of a package or module that can be allowed"),
        ("support.leaving", "importing support.leaving failed: SystemExit: 3"),
        ("kernels", "downloads code"),
    ],
)
def test_an_operators_mistakes_are_named(name: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        import_allowed([name])


def test_a_worker_that_can_not_import_says_so() -> None:
    with WorkerProcess("--allow", "not_installed_anywhere", environment=ENVIRONMENT) as process:
        assert process.process.wait(60) == 2
        assert "importing not_installed_anywhere failed" in process.logged()


def _hostile_names(count: int) -> Iterator[str]:
    """Yields names of functions that exist or might, on this machine and in general."""
    chosen = random.Random(0)
    known = [
        "os:system",
        "subprocess:Popen",
        "builtins:exec",
        "importlib:import_module",
        "pickle:loads",
        "torch.hub:load",
        "torch.utils.cpp_extension:load",
        "support.functions:Pair.__init__",
        "support.functions:torch.load",
        "support.functions:Scale.forward",
        "support.functions.Scale",
        "transformers:pipeline",
        "this:s",
        "antigravity:x",
    ]
    yield from known
    for _ in range(count - len(known)):
        module = chosen.choice(["os", "support.functions", "support.hostile", "json.tool", "xmlrpc.server", "this", ""])
        name = "".join(chosen.choices(string.ascii_letters + "._:/\\\0 %é", k=chosen.randrange(30)))
        yield f"{module}{chosen.choice([':', '.', '::', ''])}{name}"


def test_no_name_from_a_client_imports_anything(operators: WorkerProcess, noted: Path) -> None:
    """As names of functions, of ops and of types, in programs that are well-formed otherwise."""
    with backhaul.connect(operators.address, settings=QUIET) as session:  # whatever a worker imports once is imported
        trained(REMOTE["has objects among its arguments"], checkpointing(session))
    refused = 0
    with Hostile(operators.address) as hostile:
        before = noted.read_text()
        for name in _hostile_names(1_000):
            for form in ("function", "type"):
                program = _program(name, form)
                with pytest.raises(grpc.RpcError) as caught:
                    hostile.program(program.SerializeToString())
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                refused += 1
    assert refused == 2_000
    assert noted.read_text() == before
    with backhaul.connect(operators.address, strict=True, settings=QUIET) as session:
        body = REMOTE["saves a tensor and a number"]
        same_bits(trained(body, checkpointing(session)), trained(body, plainly))


def _program(name: str, form: str) -> program_pb2.Program:
    printable = name.encode("utf-8", "replace").decode()
    op = printable if form == "function" else "support.functions:Scale"
    program = program_pb2.Program(format=1, ops=[op], types=[printable] if form == "type" else [])
    program.ambient_states.add()
    program.sources.add()
    node = program.nodes.add(op=0, result_bytes=[4])
    node.arguments.add().tensor.source = 0
    if form == "type":
        node.arguments.add().object.type = 0
    return program


FILE = """
import torch

class Slopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5
"""


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (FILE, ""),
        (FILE.replace("0.5", "0.7"), "its package has version - (files "),
        (f"{FILE}\n# a comment", "its package has version - (files "),
    ],
    ids=["the same", "another backward", "a comment"],
)
def test_a_worker_with_other_files_runs_no_functions(
    theirs: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"slopes_{len(theirs)}"
    for folder, text in (("ours", FILE), ("theirs", theirs)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "ours"))
    environment = {"PYTHONPATH": str(tmp_path / "theirs")}
    with (
        WorkerProcess("--memory", "1GiB", "--allow", name, environment=environment) as process,
        backhaul.connect(process.address, settings=QUIET) as session,
    ):
        function = importlib.import_module(name).Slopes
        body = lambda h, w: function.apply(h.sin() * w).cos()  # noqa: E731
        same_bits(trained(body, checkpointing(session, returns="gradients")), trained(body, plainly))
        (segment,) = session.report().segments
        assert [reason in kept for kept in segment.kept] == ([True] if reason else [])


def test_a_file_that_changed_after_its_import_is_not_what_the_trainer_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that starts afterwards imports the file as it is then."""
    (tmp_path / "slopes_edited.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    function = importlib.import_module("slopes_edited").Slopes
    (tmp_path / "slopes_edited.py").write_text(FILE.replace("0.5", "0.7"))
    with backhaul.connect(allow=["slopes_edited"], settings=QUIET) as session:
        body = lambda h, w: function.apply(h.sin() * w).cos()  # noqa: E731
        same_bits(trained(body, checkpointing(session, returns="gradients")), trained(body, plainly))
        (segment,) = session.report().segments
        assert ["as it is now" in reason for reason in segment.kept] == [True]


def test_modules_may_print_while_they_are_imported(tmp_path: Path) -> None:
    """The first line that a worker prints is where it listens."""
    (tmp_path / "chatty.py").write_text("import os\nprint('from Python')\nos.system('echo from a shell')\n")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(TESTS)]),
        "BACKHAUL_WORKER_ALLOW": "chatty,support.functions:Scale",
    }
    with (
        WorkerProcess("--memory", "1GiB", environment=environment) as process,
        backhaul.connect(process.address, settings=QUIET) as session,
    ):
        body = REMOTE["saves a tensor and a number"]
        same_bits(trained(body, checkpointing(session)), trained(body, plainly))
        assert session.report().remote == 2
        assert "from Python" in process.logged()
        assert "from a shell" in process.logged()
