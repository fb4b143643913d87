"""Accumulation blocks around code that hooks, reuses memory, changes modes, or is interrupted."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._accumulate.block import AccumulationBlock
from backhaul._accumulate.plan import Shares
from backhaul._accumulate.serial_thread import SerialThread
from backhaul._config import LOCALS, Local
from backhaul._worker_client.answers.uncollected_gradients import UncollectedGradients
from backhaul_runtime.process.latch import Promise
from backhaul_runtime.tensors.deferred_digest import KNOWN_BYTES
from conftest import QUIET, QUIET_S, wait_until
from support.bits import Checkpoint, differing, plainly
from support.blocks import loop
from support.processes import WorkerProcess

WIDTH, SEGMENTS, MICRO_BATCHES = 8, 4, 3
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, params=[0, 2])
def share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of the segments the trainer computes."""
    monkeypatch.setattr(Shares, "trainers_share", lambda self: request.param)
    return int(request.param)


@pytest.fixture
def session(worker: WorkerProcess) -> Iterator[Session]:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        yield session
    wait_until(lambda: worker.telemetry().memory.result_bytes == 0, "nothing is kept")


class Stem(nn.Module):
    """Adds a parameter, so that the gradient of the sum and that of the parameter are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.linear(x), self.shift)


class Model(nn.Module):
    """A stem, segments and a head. `between` is called with the output of each and its name."""

    def __init__(self, between: Callable[[str, Tensor], Tensor] = lambda name, y: y) -> None:
        super().__init__()
        self.stem, self.norm, self.head = Stem(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.segments = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(SEGMENTS))
        self.between = between

    def loss(self, checkpoint: Checkpoint, x: Tensor) -> Tensor:
        y = self.between("stem", self.norm(self.stem(x)))
        for segment in self.segments:
            y = checkpoint(segment, y)
        return self.head(self.between("segments", y)).square().mean()


def gradients(
    session: Session | None,
    make: Callable[[], Model] = Model,
    happen: Callable[[int, Model], None] = lambda number, model: None,
    local: Local = "recompute",
) -> list[Tensor | None]:
    """Returns the gradients that micro-batches leave in `.grad`, and the norm's statistics."""
    torch.manual_seed(0)
    model = make()
    with session.accumulate(local=local) if session is not None else loop() as block:
        for number in range(MICRO_BATCHES):
            happen(number, model)
            loss = model.loss(plainly if session is None else session.checkpoint, torch.randn(8, WIDTH))
            block.backward(loss)
    return [*(parameter.grad for parameter in model.parameters()), *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("local", LOCALS)
def test_a_batch_norm_that_is_in_eval_mode_now_and_then(session: Session, local: Local) -> None:
    def switch(number: int, model: Model) -> None:
        model.train(number % 2 == 1)

    assert differing(gradients(session, happen=switch, local=local), gradients(None, happen=switch)) == []
    blocked = {reason for segment in session.report().segments for reason in segment.blocked}
    assert any("a batch norm before the last segments is in eval mode" in reason for reason in blocked)


class Wide(nn.Module):
    """Segments with weights that are large enough for replays to remember their digests."""

    def __init__(self) -> None:
        super().__init__()
        self.segments = nn.ModuleList(nn.Linear(KNOWN_BYTES // 4 // WIDTH, WIDTH) for _ in range(SEGMENTS))

    def loss(self, checkpoint: Checkpoint) -> Tensor:
        y = torch.randn(8, WIDTH, requires_grad=True)
        for segment in self.segments:
            y = checkpoint(lambda y, segment=segment: segment(y.repeat(1, segment.in_features // WIDTH)).tanh(), y)
        return y.square().mean()


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("position", [0, SEGMENTS - 1])
@pytest.mark.parametrize("number", [0, MICRO_BATCHES - 1])
@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_a_write_that_torch_does_not_count(
    session: Session, when: str, number: int, position: int, *, is_frozen: bool
) -> None:
    model = Wide()
    weight = [*model.parameters()][2 * position].requires_grad_(not is_frozen)

    def write(present: str, micro_batch: int) -> None:
        if (present, micro_batch) == (when, number):
            weight.data.add_(1)

    # A recomputation on the trainer notices the write before the end.
    expected = backhaul.AccumulationError, backhaul.StaleTensorError, backhaul.ValueCheckError
    with (
        pytest.raises(expected, match="was changed inside|changed between|differ between forward and recomputation"),
        session.accumulate() as block,
    ):
        for micro_batch in range(MICRO_BATCHES):
            loss = model.loss(session.checkpoint)
            write("before backward", micro_batch)
            block.backward(loss)
            write("after backward", micro_batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def fused_steps(checkpoint: Checkpoint, steps: int = 3) -> list[Tensor]:
    """Returns the parameters after steps of an optimizer that leaves their versions as they are."""
    torch.manual_seed(1)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(checkpoint).backward()
        optimizer.step()
    return list(model.parameters())


def test_another_thread_trains_while_a_block_is_open(session: Session) -> None:
    model = Wide()
    with session.accumulate() as block, ThreadPoolExecutor(1) as thread:
        block.backward(model.loss(session.checkpoint))
        ours = thread.submit(fused_steps, session.checkpoint).result()
        block.backward(model.loss(session.checkpoint))
    assert differing(ours, fused_steps(plainly)) == []
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_optimizer_steps_in_a_block_after_a_plain_backward(session: Session) -> None:
    with session.accumulate():
        ours = fused_steps(session.checkpoint)
    assert differing(ours, fused_steps(plainly)) == []


def test_an_optimizer_that_steps_in_a_hook(session: Session) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with pytest.raises(backhaul.AccumulationError), session.accumulate() as block:
        for _ in range(2):
            block.backward(model.loss(session.checkpoint))
    assert first.grad is None


def test_writes_of_a_hook_that_torch_does_not_count(session: Session) -> None:
    model = Wide()
    first = next(model.parameters())

    def write(parameter: Tensor) -> None:
        parameter.data.add_(1)

    first.register_post_accumulate_grad_hook(write)
    with pytest.raises(backhaul.AccumulationError, match="a hook of a parameter"), session.accumulate() as block:
        block.backward(model.loss(session.checkpoint))
    assert first.grad is None


@pytest.mark.parametrize("share", [2], indirect=True)
def test_a_weight_whose_memory_was_freed(session: Session) -> None:
    model = Wide()
    with pytest.raises(backhaul.StaleTensorError, match="memory was freed"), session.accumulate() as block:
        block.backward(model.loss(session.checkpoint))  # so that the number of segments is known
        loss = model.loss(session.checkpoint)
        next(model.parameters()).untyped_storage().resize_(0)
        block.backward(loss)


@pytest.mark.parametrize("where", ["stem", "segments"])
@pytest.mark.parametrize("kind", ["hook", "hook on a node"])
def test_hooks_that_return_the_same_memory_each_time(session: Session, where: str, kind: str) -> None:
    def make() -> Model:
        reused = torch.zeros(8, WIDTH)

        def between(name: str, y: Tensor) -> Tensor:
            if name == where:
                y = y + model.stem.shift if name == "stem" else y.view(8, WIDTH)
                if kind == "hook":
                    y.register_hook(lambda gradient: reused.copy_(gradient).mul_(2))
                else:
                    assert y.grad_fn is not None
                    y.grad_fn.register_prehook(lambda outputs: (reused.copy_(outputs[0]).mul_(2),))
            return y

        model = Model(between)
        return model

    assert differing(gradients(session, make), gradients(None, make)) == []


class Reusing(torch.autograd.Function):
    """Adds, and returns the same memory from each backward."""

    memory = torch.zeros(8, WIDTH)

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        return x + shift

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Reusing.memory.copy_(gradient)
        return Reusing.memory, Reusing.memory


class Counting(torch.autograd.Function):
    """Multiplies in backward by the number of calls so far."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counting.calls += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Counting.calls


class Reversing(torch.autograd.Function):
    """Multiplies in backward by an entry that a dict on the context has by then."""

    settings: ClassVar[dict[str, float]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.settings = Reversing.settings
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * -ctx.settings["strength"]


@torch.library.custom_op("backhaul_blocks::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """Copies."""
    return x.clone()


def _scaled_backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * Reversing.settings["strength"]


scaled.register_autograd(_scaled_backward)


@pytest.mark.parametrize("function", [Counting.apply, Reversing.apply, scaled])
def test_a_custom_function_in_a_tail_reads_what_it_reads_without_a_block(session: Session, function: Any) -> None:
    def make() -> Model:
        Counting.calls = 0
        return Model(lambda name, y: function(y) if name == "stem" else y)

    def strengthen(number: int, model: Model) -> None:
        Reversing.settings["strength"] = float(number + 1)

    assert differing(gradients(session, make, strengthen), gradients(None, make, strengthen)) == []
    blocked = sum((Counter(segment.blocked) for segment in session.report().segments), Counter[str]())
    assert blocked["a custom function before the last segments may read what changes before it runs"] == MICRO_BATCHES


@pytest.mark.parametrize("where", ["stem", "segments"])
def test_a_custom_function_that_returns_the_same_memory_twice(session: Session, where: str) -> None:
    class Shifted(Model):
        def __init__(self) -> None:
            super().__init__(self.shifted)
            self.first, self.second = nn.Parameter(torch.randn(8, WIDTH)), nn.Parameter(torch.randn(8, WIDTH))

        def shifted(self, name: str, y: Tensor) -> Tensor:
            if name != where:
                return y
            once: Tensor = Reusing.apply(y, self.first)
            twice: Tensor = Reusing.apply(once.sin(), self.second)
            return twice

    assert differing(gradients(session, Shifted), gradients(None, Shifted)) == []


def test_hooks_of_parameters_come_in_autograds_order(session: Session) -> None:
    def make() -> Model:
        model, generator = Model(), torch.Generator().manual_seed(1)

        def with_noise(gradient: Tensor) -> Tensor:
            return gradient + torch.randn(gradient.shape, generator=generator)

        for parameter in model.parameters():
            parameter.register_hook(with_noise)
        return model

    assert differing(gradients(session, make), gradients(None, make)) == []


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_over_one_tensor(session: Session, mode: Any) -> None:
    def seen(session: Session | None) -> list[Tensor]:
        norms = list[Tensor]()

        def between(name: str, y: Tensor) -> Tensor:
            if name == "stem":
                torch.autograd.graph.register_multi_grad_hook(
                    (y,), lambda gradient: norms.append((gradient if mode == "any" else gradient[0]).norm()), mode=mode
                )
            return y

        gradients(session, lambda: Model(between))
        return norms

    ours = seen(session)
    assert len(ours) == MICRO_BATCHES
    assert differing(ours, seen(None)) == []


@pytest.mark.parametrize("local", LOCALS)
def test_torchs_checkpoint_around_segments(session: Session, local: Local) -> None:
    class Outer(Model):
        def loss(self, checkpoint: Checkpoint, x: Tensor) -> Tensor:
            y = self.between("stem", self.norm(self.stem(x)))

            def two(y: Tensor) -> Tensor:
                return checkpoint(self.segments[1], checkpoint(self.segments[0], y))

            y = torch.utils.checkpoint.checkpoint(two, y, use_reentrant=False)
            for segment in self.segments[2:]:
                y = checkpoint(segment, y)
            return self.head(y).square().mean()

    assert differing(gradients(session, Outer, local=local), gradients(None, Outer)) == []


def test_gradients_that_share_memory_are_refused(session: Session) -> None:
    def make() -> Model:
        model = Model()
        one, other = model.stem.linear.weight, model.head.weight
        memory = torch.zeros(2 * WIDTH * WIDTH - 1)
        one.grad, other.grad = (memory[i : i + one.numel()].view_as(one) for i in (0, one.numel() - 1))
        return model

    with pytest.raises(backhaul.AccumulationError, match="the .grad of two parameters share memory"):
        gradients(session, make)


def in_one_buffer() -> Model:
    """A model whose gradients are views of one buffer, and have one version counter."""
    model = Model()
    memory = torch.ones(sum(parameter.numel() for parameter in model.parameters()))
    parts = memory.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return model


@pytest.mark.parametrize("is_hooked", [False, True])
def test_neighbours_in_one_buffer_do_not_share_memory(session: Session, *, is_hooked: bool) -> None:
    def make() -> Model:
        model = in_one_buffer()
        if is_hooked:
            model.stem.shift.register_hook(lambda gradient: gradient * 2)
        return model

    assert differing(gradients(session, make), gradients(None, make)) == []


@pytest.mark.parametrize("build", [Model, in_one_buffer])
def test_a_hook_must_leave_the_gradients_of_others_alone(session: Session, build: Callable[[], Model]) -> None:
    def make() -> Model:
        model = build()
        if build is Model:
            model.head.bias.grad = torch.ones_like(model.head.bias)

        def halve_another(_: Tensor) -> None:
            assert model.head.bias.grad is not None
            model.head.bias.grad.mul_(0.5)

        model.stem.shift.register_post_accumulate_grad_hook(halve_another)
        return model

    with pytest.raises(backhaul.AccumulationError, match=r"or the \.grad of another one"):
        gradients(session, make)


@pytest.mark.parametrize("last", ["commit", "collect"])
def test_a_block_after_one_that_could_not_end(session: Session, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Two interrupts, the second while the block waits for its threads, one of which then asks the worker."""
    asked = list[AccumulationBlock]()
    late = Promise[None]()

    def held_up(method: Callable[..., Any]) -> Callable[..., Any]:
        def first_waits(self: UncollectedGradients, *args: Any) -> Any:
            if len(asked) == 1 and not late.is_done:
                late.result(QUIET_S)
            return method(self, *args)

        return first_waits

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UncollectedGradients, last, held_up(getattr(UncollectedGradients, last)))
        patch.setattr(SerialThread, "end", interrupted)
        patch.setattr(UncollectedGradients, "abandon", interrupted)
        with pytest.raises(KeyboardInterrupt), session.accumulate() as block:
            asked.append(block)
            model = Model()
            for _ in range(MICRO_BATCHES):
                block.backward(model.loss(session.checkpoint, torch.randn(8, WIDTH)))
            if last == "collect":
                block._chains.begin_collecting(())
            raise KeyboardInterrupt
        patch.undo()
        # The old thread goes on while the next block runs, and afterwards.
        ours = gradients(session, happen=lambda number, _: late.set_result(None) if number == 1 else None)
    assert differing(ours, gradients(None)) == []
    for thread in block._chains._threads.values():
        thread.end()
    assert differing(gradients(session), gradients(None)) == []
