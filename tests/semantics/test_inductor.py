"""Blocks with Inductor's kernels have the bits of torch.compile, whoever recomputes them."""

import asyncio
import copyreg
import errno
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, AsyncMock, Mock

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.convert_frame import compile_lock
from torch.fx import _symbolic_trace

import backhaul
from backhaul import BudgetError, CompilingError, ProgramError, Session
from backhaul._backend import backend
from backhaul._forward import graphs
from backhaul._observe.report import Decision
from backhaul._worker_client.connection.calls import call_unary
from backhaul._worker_client.upload import refused_programs
from backhaul_runtime.errors import ReplayError
from backhaul_runtime.process.credentials import make_token
from backhaul_runtime.program.codec import decode_program, encode_program
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.program.program import Compilation, Node, Program, ResultRef, SourceRef
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.replay.compiled_programs import compile_program, function_of
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals import inductor
from backhaul_runtime.torch_internals.inductor import CompiledFiles
from backhaul_server.worker.accounts import Account
from backhaul_server.worker.engine import compiler
from backhaul_server.worker.engine.compiler import Compiler
from backhaul_server.worker.engine.executor import Executor
from backhaul_server.worker.engine.store import Store
from backhaul_server.worker.engine.stored_values import StoredValue
from conftest import QUIET, wait_until
from support.bits import differing, grad_of, seed_generators
from support.compiled import MARKS
from support.devices import DEVICE
from support.loopback import Loopback
from support.processes import WorkerProcess
from support.wrapped_weights import Adapted

if DEVICE != "cpu":
    pytest.skip("these tests compile for the CPU", allow_module_level=True)
if shutil.which("g++") is None:
    pytest.skip("these tests need a C++ compiler, g++, which Inductor uses", allow_module_level=True)

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method"),  # which Inductor's import uses
    pytest.mark.slow,
    pytest.mark.xdist_group("inductor"),
]
WIDTH, LAYERS = 8, 3
CPU = torch.device("cpu")


class Block(nn.Module):
    """Has few kernels, as each takes a second or two to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.linear(x).tanh(), 0.2, self.training)


class InPlace(nn.Module):
    """Writes to what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        return y.mul_(2).tanh()


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(LAYERS))


def results(blocks: nn.ModuleList, run: Callable[..., Any], seed: int) -> list[Tensor | None]:
    """The output of a step, the gradients, and what the generator gives afterwards."""
    seed_generators(seed)
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    y = x * 1
    for block in blocks:
        y = run(block, y)
    y.square().mean().backward()
    outcome: list[Tensor | None] = [
        y.detach(),
        x.grad,
        *[parameter.grad for parameter in blocks.parameters()],
        torch.rand(3),
    ]
    blocks.zero_grad()
    return outcome


@pytest.fixture(scope="module")
def expected() -> list[list[Tensor | None]]:
    """What the same blocks give without Backhaul, compiled by torch's own backend."""
    blocks = model()
    compiled = {block: torch.compile(block) for block in blocks}
    return [results(blocks, lambda block, x: compiled[block](x), seed) for seed in range(3)]


@pytest.fixture
def compiling() -> Iterator[Session]:
    """A session with a worker of its own that compiles."""
    with backhaul.connect(settings=QUIET) as session:
        yield session


def with_inductor(session: Any) -> Callable[..., Any]:
    """The user has compiled with Inductor's kernels."""
    compiled: dict[nn.Module, Any] = {}

    def run(block: nn.Module, x: Tensor) -> Any:
        if block not in compiled:
            compiled[block] = torch.compile(block, backend=backend, options={"kernels": "inductor"})
        return session.checkpoint(compiled[block], x)

    return run


def remote(session: Any) -> int:
    return sum(segment.decisions.get(Decision.GRADIENTS, 0) for segment in session.report().segments)


def test_a_worker_computes_the_bits_of_inductor(compiling: Session, expected: list[list[Tensor | None]]) -> None:
    blocks, run = model(), with_inductor(compiling)

    def is_remote() -> bool:  # until the worker has compiled the program, the trainer recomputes
        before = remote(compiling)
        for seed, right in enumerate(expected):
            assert not differing(right, results(blocks, run, seed))
        return remote(compiling) - before == LAYERS * len(expected)

    wait_until(is_remote, "the worker has compiled the program", 300.0)
    (segment,) = compiling.report().segments
    assert segment.known == segment.calls
    assert all("still compiles" in reason for reason in segment.reasons)
    with compiling.accumulate() as step:
        for seed, right in enumerate(expected):
            seed_generators(seed)
            y = torch.randn(2, 3, WIDTH, requires_grad=True) * 1
            for block in blocks:
                y = run(block, y)
            step.backward(y.square().mean())
            assert not differing(right[:1], [y.detach()])
    sums: list[Tensor | None] = [None] * len(list(blocks.parameters()))
    for right in expected:
        for number, gradient in enumerate(right[2:-1]):
            before = sums[number]
            assert gradient is not None
            sums[number] = gradient if before is None else before + gradient
    assert not differing(sums, [parameter.grad for parameter in blocks.parameters()])


def test_backhaul_compiles_with_inductor_itself(expected: list[list[Tensor | None]]) -> None:
    blocks, loopback = model(), Loopback()
    for lost in (False, True):  # a worker computes, then the trainer
        loopback.is_lost = lost
        for seed, right in enumerate(expected):
            outcome = results(blocks, lambda block, x: loopback.checkpoint(block, x, graphs="inductor"), seed)
            assert not differing(right, outcome)
    (segment,) = loopback.report().segments
    assert (segment.name, segment.known, segment.decisions[Decision.GRADIENTS]) == ("Block", 6 * LAYERS, 3 * LAYERS)


def test_a_worker_of_ones_own_compiles_whatever_the_session_says() -> None:
    x = torch.randn(4, requires_grad=True)
    with backhaul.connect(graphs="off", settings=QUIET) as session:
        session.checkpoint(torch.square, x, graphs="inductor").sum().backward()
        assert torch.equal(grad_of(x), x.detach() * 2)
        (segment,) = session.report().segments
        assert all("still compiles" in reason for reason in segment.reasons)


def test_a_program_is_not_sent_with_each_call_while_it_is_compiled(
    compiling: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_programs, "LEAST_S", 1000.0)
    put = Mock(side_effect=call_unary)
    monkeypatch.setattr("backhaul._worker_client.upload.segment_sender.call_unary", put)
    x = torch.randn(4, requires_grad=True)
    for _ in range(4):
        x.grad = None
        compiling.checkpoint(torch.square, x, graphs="inductor").sum().backward()
        assert torch.equal(grad_of(x), x.detach() * 2)
    (segment,) = compiling.report().segments
    assert sum(segment.reasons.values()) == 4
    assert put.call_count == 1


@pytest.mark.nightly
def test_trainers_with_other_credentials_compile_equal_programs_by_themselves(
    tmp_path: Path, expected: list[list[Tensor | None]]
) -> None:
    names = ("one", "other")
    for name in names:
        make_token(tmp_path / f"{name}.token")
    credentials = tmp_path / "credentials.toml"
    credentials.write_text("".join(f'[{name}]\ntoken_files = ["{name}.token"]\n' for name in names))
    with (
        WorkerProcess("--memory", "1GiB", "--compile", "--credentials", str(credentials)) as worker,
        ExitStack() as stack,
    ):
        trainers = [
            stack.enter_context(
                backhaul.connect(worker.address, token_file=str(tmp_path / f"{name}.token"), settings=QUIET)
            )
            for name in names
        ]
        for trainer in trainers:
            blocks, run = model(), with_inductor(trainer)

            def is_remote(trainer: Session = trainer, blocks: nn.ModuleList = blocks, run: Any = run) -> bool:
                before = remote(trainer)
                assert not differing(expected[0], results(blocks, run, 0))
                return remote(trainer) - before == LAYERS

            assert not is_remote()  # nobody gains anything from what others have compiled
            wait_until(is_remote, "the worker has compiled the program", 300.0)


def test_a_worker_that_does_not_compile_says_so(expected: list[list[Tensor | None]]) -> None:
    with WorkerProcess("--memory", "1GiB") as worker, backhaul.connect(worker.address, settings=QUIET) as session:
        assert not differing(expected[0], results(model(), with_inductor(session), 0))
        (reason,) = session.report().segments[0].reasons
        assert "it compiles no programs (a worker with --compile does)" in reason


def test_a_worker_that_cannot_compile_does_not_start() -> None:
    command = [sys.executable, "-m", "backhaul", "worker", "--compile", "--device", "cpu", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "CXX": "no-such-compiler"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode
    assert "--compile: Inductor can't compile here" in ended.stderr


def test_a_gradient_can_be_differentiated_as_far_as_torchs() -> None:
    block, x = model()[0], torch.randn(2, 3, WIDTH, requires_grad=True)
    gradients: list[Tensor | None] = []
    for run in (lambda block, x: torch.compile(block)(x), with_inductor(Loopback())):
        seed_generators(1)
        # A backward that torch finds in its cache may reuse what forward saved, and then refuses create_graph.
        with torch._functorch.config.patch(donated_buffer=False):
            y = run(block, x * 1)
            gradients += torch.autograd.grad(y.square().sum(), x, create_graph=True)
        assert gradients[-1] is not None
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            gradients[-1].sum().backward()
    assert not differing(gradients[:1], gradients[1:])


def test_a_kind_is_compiled_after_an_error_of_memory(
    expected: list[list[Tensor | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, loopback = model(), Loopback()
    failing = Mock(side_effect=chain([MemoryError("none left")], repeat(DEFAULT)), wraps=compile_program)
    monkeypatch.setattr("backhaul._forward.compiled_graph.compile_program", failing)
    for seed, right in enumerate(expected):
        outcome = results(blocks, lambda block, x: loopback.checkpoint(block, x, graphs="inductor"), seed)
        assert not differing(right, outcome)
    (segment,) = loopback.report().segments
    assert segment.kept == {"recording failed: MemoryError: none left": 2}
    assert segment.known == LAYERS * len(expected) - 2


def test_what_no_compiled_program_expresses_keeps_its_activations() -> None:
    loopback = Loopback()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.argmax(-1)

    x = torch.randn(4, 4, requires_grad=True)
    mine = loopback.checkpoint(function, x, graphs="inductor")
    theirs = torch.compile(function)(x)
    assert not differing(mine, theirs)
    (segment,) = loopback.report().segments
    (reason,) = segment.kept
    assert "it returns a tensor without gradient" in reason


@pytest.mark.parametrize(
    "changed",
    [
        lambda: torch._inductor.config.patch(emulate_precision_casts=True),
        lambda: torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: None),
        lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
    ],
)
def test_the_facts_tell_the_settings_of_the_moment(changed: Callable[[], Any]) -> None:
    before = inductor.facts(CPU)
    with changed():
        assert inductor.facts(CPU) != before
    assert inductor.facts(CPU) == before


def sine() -> Program:
    """The compiled program of one op, for a source of 4 numbers."""
    recorder, x = Recorder([], allowed_ops(), lambda tensor, *_: tensor.detach()), torch.randn(4, requires_grad=True)
    with recorder:
        y = torch.sin(x)
    compilation = Compilation((layout_of(x),), tuple(sorted(inductor.facts(CPU).items())))
    return replace(recorder.finish([y]), compilation=compilation)


class Compiling:
    """A compiler of a worker with this budget, as the event loop uses it."""

    def __init__(self, budget_bytes: int = 1 << 30, *, is_trainers_own: bool = True) -> None:
        self.store: Store[StoredValue] = Store(budget_bytes)
        self.executor = Executor(lambda: None, lambda _: None, 300.0)
        self.compiler = Compiler(CPU, self.store, self.executor, is_trainers_own=is_trainers_own)

    async def take(self, program: Program, account: Account) -> tuple[str, Program]:
        """Puts a program until it is compiled or refused. Returns why, and the program as it was decoded."""
        encoded = encode_program(program)
        decoded = decode_program(encoded, CPU)
        assert decoded == program
        while True:
            try:
                self.compiler.check(account, sha256(encoded).digest(), encoded, decoded)
            except CompilingError:
                await asyncio.sleep(0.1)
            except (BudgetError, ProgramError) as error:
                return error.message, decoded
            else:
                return "", decoded

    async def close(self) -> None:
        await self.executor.close()
        await self.compiler.close()


def compiling_worker(use: Callable[[Compiling], Coroutine[Any, Any, None]], *args: Any, **kwargs: Any) -> None:
    """Runs a coroutine with a compiler."""

    async def run() -> None:
        compiling = Compiling(*args, **kwargs)
        try:
            await asyncio.wait_for(use(compiling), 300.0)
        finally:
            await compiling.close()

    asyncio.run(run())


@pytest.mark.filterwarnings(
    "ignore:Quantised does not implement _stable_hash"
)  # torch's own compilation caches nothing
@pytest.mark.parametrize("block", [Adapted, InPlace])
def test_blocks_with_wrapped_weights_and_writes_of_their_own(block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module, loopback = block(), Loopback()
    x = torch.randn(3, WIDTH, requires_grad=True)
    inputs = [x, *[parameter for parameter in module.parameters() if parameter.requires_grad]]
    compiled = torch.compile(module, dynamic=False)
    expected = torch.autograd.grad(compiled(x).square().sum(), inputs)
    for lost in (False, True):
        loopback.is_lost = lost
        y = loopback.checkpoint(module, x, graphs="inductor")
        assert not differing(expected, torch.autograd.grad(y.square().sum(), inputs))
    (segment,) = loopback.report().segments
    assert segment.known == 2
    assert segment.decisions == {Decision.GRADIENTS: 1, Decision.TRAINER: 1}


def test_a_program_that_writes_to_a_view_of_a_source_is_refused() -> None:
    view = Node("aten.view.default", (SourceRef(0), (2, 2)), (), 0, (0,), draws=False)
    write = Node("aten.mul_.Scalar", (ResultRef(0, 0), 2), (), 0, (0,), draws=False)
    made = Node("aten.sin.default", (SourceRef(1),), (), 0, (16,), draws=False)
    program = sine()
    assert program.compilation is not None
    source, (layout,) = program.sources[0], program.compilation.layouts
    program = replace(
        program,
        sources=(replace(source, requires_grad=False), source),
        nodes=(view, write, made),
        outputs=(ResultRef(2, 0),),
        compilation=replace(program.compilation, layouts=(layout, layout)),
    )
    with pytest.raises(ProgramError, match="writes to its inputs"):
        compile_program(program, CPU)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda p: replace(p, compilation=replace(p.compilation, facts=(("compiler", "another"),))),
            "compiles otherwise",
        ),
        (lambda p: replace(p, ambient_states=p.ambient_states * 2), "changes a setting"),
        (lambda p: replace(p, sources=(replace(p.sources[0], is_written=True),)), "writes to its inputs"),
        (lambda p: replace(p, outputs=()), ""),
    ],
)
def test_a_worker_refuses_what_it_cannot_compile(change: Callable[[Any], Program], why: str) -> None:
    async def use(compiling: Compiling) -> None:
        refused, _ = await compiling.take(change(sine()), Account())
        assert why in refused
        assert compiling.store.usage().sessions == 0 or not why  # nothing is kept of what was refused

    compiling_worker(use)


@pytest.mark.parametrize("is_trainers_own", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_compiled_code_is_charged_once_and_made_before_the_program_is_taken(*, is_trainers_own: bool) -> None:
    async def use(compiling: Compiling) -> None:
        account, x = Account(), torch.randn(4, requires_grad=True)
        for _ in range(2):  # the second session of a credential finds it
            refused, program = await compiling.take(sine(), account)
            assert not refused
            assert not differing(function_of(program)([x]), compile_program(program, CPU)([x]))
            charged = compiling.store.usage().sessions
            assert charged == account.held_bytes > 0
        before, other = charged, Account("other")
        assert not (await compiling.take(sine(), other))[0]
        assert (compiling.store.usage().sessions, other.held_bytes) == (2 * before, before)

    compiling_worker(use, is_trainers_own=is_trainers_own)


def test_compiled_code_has_a_bound() -> None:
    async def use(compiling: Compiling) -> None:
        refused, _ = await compiling.take(sine(), Account())
        assert "no room for the compiled code" in refused
        assert compiling.store.usage().sessions == 0

    compiling_worker(use, 1 << 20)


def test_threads_may_compile_at_once() -> None:
    before, program = dict(copyreg.dispatch_table), sine()
    with ThreadPoolExecutor(2) as threads:
        x = torch.randn(4, requires_grad=True)
        one, other = threads.map(lambda _: compile_program(program, CPU)([x]), range(2))
    assert not differing(one, other)
    assert copyreg.dispatch_table == before


def test_a_call_waits_while_another_thread_traces(
    expected: list[list[Tensor | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, run = model(), with_inductor(Loopback())
    results(blocks, run, 0)
    with ThreadPoolExecutor(1) as other, compile_lock, monkeypatch.context() as patch:
        patch.setattr(_symbolic_trace, "_is_fx_tracing_flag", True)
        patch.setattr(graphs, "wait_for_tracing", waits := Mock(side_effect=inductor.wait_for_tracing))
        outcome = other.submit(results, blocks, run, 1)
        wait_until(lambda: waits.called or outcome.done(), "the call")
        patch.undo()
        compile_lock.release()
        try:
            assert not differing(expected[1], outcome.result())
        finally:
            compile_lock.acquire()


def test_only_one_thread_compiles_whoever_does(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_fx, taken = importlib.import_module("torch._inductor.compile_fx"), []

    def compiles(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            taken.append(other.submit(compile_lock.acquire, blocking=False).result())
        return DEFAULT

    monkeypatch.setattr(compile_fx, "compile_fx", Mock(wraps=compile_fx.compile_fx, side_effect=compiles))
    compile_program(sine(), CPU)
    of_program = len(taken)
    inductor.compile_for_training(torch.fx.symbolic_trace(torch.nn.Identity()), [torch.ones(1, requires_grad=True)])
    assert 0 < of_program < len(taken)
    assert not any(taken)


def test_a_worker_compiles_nothing_itself(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="is not in the files"):
        compile_program(sine(), CPU, CompiledFiles(str(tmp_path), are_made=True))


def test_what_was_not_compiled_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(compiling: Compiling) -> None:
        disk_full = AsyncMock(side_effect=OSError(errno.ENOSPC, "no space"))
        with monkeypatch.context() as patch:
            patch.setattr(compiling.compiler, "_run", disk_full)
            for _ in range(2):
                refused, _ = await compiling.take(sine(), Account())
                assert "no space" in refused
        assert disk_full.await_count == 1
        monkeypatch.setattr(compiler, "_RETRY_S", 0.0)
        assert (await compiling.take(sine(), Account()))[0] == ""

    compiling_worker(use)


def test_statistics_are_written_once_also_in_the_call_that_looks_what_a_block_is() -> None:
    norm, x = nn.BatchNorm1d(WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    compiled, remote = torch.compile(norm, backend=backend, options={"kernels": "inductor"}), Loopback()
    for _ in range(2):
        remote.checkpoint(compiled, x).sum().backward()
    assert norm.num_batches_tracked == 2
    (segment,) = remote.report().segments
    assert list(segment.kept) == ["aten.add_.Tensor writes to memory from outside"]
