"""Accumulation blocks of random networks: whatever the graph looks like, `.grad` has the bits of the plain loop."""

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import backhaul
from backhaul import Session
from backhaul._config import LOCALS, Boundaries, GraphUse
from conftest import quiet, wait_until
from support.bits import Checkpoint, differing, plainly, seed_generators
from support.blocks import loop
from support.processes import WorkerProcess

WIDTH = 8
SEGMENTS = ("plain", "dropout", "twice", "two outputs", "shared norm", "residual", "captured", "no parameters")
BETWEEN = ("", "", "", "add", "multiply", "embedding", "norm", "detached")
LOSSES = ("mean", "mean", "auxiliary", "skip", "captured", "fewer segments", "two heads")


class Net(nn.Module):
    """A chain of segments, drawn at random, with tied, frozen and hooked parameters."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        count = draw.randint(1, 6)
        linears = [nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7) for _ in range(count + 2)]
        for linear in linears:
            if draw.random() < 0.25:
                linear.weight = draw.choice(linears).weight
            tied = draw.choice(linears).bias
            if draw.random() < 0.1 and linear.bias is not None and tied is not None:
                linear.bias = tied
        self.embedding, self.head, self.linears = linears[0], linears[-1], nn.ModuleList(linears[1:-1])
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.kinds = [draw.choice(SEGMENTS) for _ in range(count)]
        self.between = [draw.choice(BETWEEN) for _ in range(count)]
        self.is_segment = [draw.random() < 0.85 for _ in range(count)]
        self.loss_kind = draw.choice(LOSSES)
        for parameter in self.parameters():
            parameter.requires_grad_(draw.random() > 0.15)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if trained and draw.random() < 0.3:
            draw.choice(trained).register_hook(lambda gradient: gradient * 1.5)

    def segment(self, number: int) -> Callable[[Tensor], Any]:
        kind, linear = self.kinds[number], self.linears[number]

        def function(x: Tensor) -> Any:
            match kind:
                case "dropout":
                    return dropout(linear(x), 0.3)
                case "twice":
                    return linear(torch.sin(linear(x)))
                case "two outputs":
                    return torch.tanh(linear(x)), linear(x).exp().clamp(max=2)
                case "shared norm":
                    return torch.tanh(self.norm(linear(x)))
                case "residual":
                    return x + torch.tanh(linear(x))
                case "captured":
                    return torch.tanh(linear(x) * self.scale)
                case "no parameters":
                    return x * 1.01
            return torch.tanh(linear(x))

        return function

    def loss(self, checkpoint: Checkpoint, x: Tensor, micro_batch: int) -> Tensor:
        first = y = self.embedding(x)
        auxiliary: Tensor | float = 0.0
        for number, between in enumerate(self.between):
            if self.loss_kind == "fewer segments" and (number + micro_batch) % 3 == 0:
                continue
            y = (checkpoint if self.is_segment[number] else plainly)(self.segment(number), y)
            y = y[0] + y[1] if isinstance(y, tuple) else y
            match between:
                case "add":
                    y = y + 1
                case "multiply":
                    y = y * self.scale
                case "embedding":
                    y = y + first
                case "norm":
                    y = self.norm(y)
                case "detached":
                    y = y + y.detach() * 0.1
            if self.loss_kind == "auxiliary" and number == 0:
                auxiliary = y.square().mean()
        if self.loss_kind == "skip":
            y = y + first
        if self.loss_kind == "captured":
            y = y * self.scale
        loss: Tensor = self.head(y).square().mean() + auxiliary
        return loss + 0.1 * self.head(y).sum() if self.loss_kind == "two heads" else loss


def trained(seed: int, checkpoint: Checkpoint, session: Session | None) -> list[Tensor | None]:
    """Returns losses, gradients of inputs and parameters, and parameters, of steps drawn by the seed."""
    draw = random.Random(seed)
    seed_generators(seed)
    net = Net(draw).to(draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
    micro_batches, autocast = draw.randint(1, 5), draw.random() < 0.15
    keeps, to_zeros, wants_input = draw.random() < 0.4, draw.random() < 0.3, draw.random() < 0.3
    results: list[Tensor | None] = []

    def run(block: Any) -> None:
        for micro_batch in range(micro_batches):
            x = torch.randn(3, WIDTH, dtype=net.scale.dtype).requires_grad_(wants_input)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast and x.dtype == torch.float32):
                loss = net.loss(checkpoint, x, micro_batch)
            if loss.requires_grad:
                block.backward(loss)
            results.append(loss.detach())
            inputs.append(x)

    for step in range(draw.randint(1, 3)):
        inputs: list[Tensor] = []
        if session is None:
            with loop() as block:
                run(block)
        else:
            with pytest.MonkeyPatch.context() as patch:
                local = LOCALS[seed % 2]
                share, *last = draw.choices(range(4), k=4)
                patch.setattr(session._shares[local], "trainers_share", lambda share=share: share)
                patch.setattr(session._shares[local], "last_segments", lambda number, *_, last=last: last[number % 3])
                with session.accumulate(local) as block:
                    run(block)
        results += [None if tensor.grad is None else tensor.grad.clone() for tensor in (*inputs, *net.parameters())]
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
        if not keeps or step % 2:
            net.zero_grad(set_to_none=not to_zeros)
    return [*results, *(parameter.detach() for parameter in net.parameters())]


def compare(worker: WorkerProcess, boundaries: Boundaries, seeds: range) -> None:
    with backhaul.connect(worker.address, settings=quiet(boundaries=boundaries)) as session:
        for seed in seeds:
            expected = trained(seed, plainly, None)
            assert differing(trained(seed, session.checkpoint, session), expected) == [], f"seed {seed}"
        assert session.report().fallbacks == 0


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", ["send", "derive"])
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 40), marks=pytest.mark.nightly)], ids=len)
def test_random_blocks(worker: WorkerProcess, boundaries: Boundaries, seeds: range) -> None:
    compare(worker, boundaries, seeds)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("boundaries", ["send", "derive"])
def test_many_random_blocks(worker: WorkerProcess, boundaries: Boundaries) -> None:
    compare(worker, boundaries, range(40, 600))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")  # torch.compile says what it ignores
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("graphs", ["auto", "eager"])
def test_two_hundred_workers_die_in_a_block(graphs: GraphUse) -> None:
    draw, died = random.Random(0), 0
    with backhaul.connect(graphs=graphs, settings=quiet(boundaries="derive")) as session:
        (worker,) = session._workers
        for seed in range(200):
            expected = trained(seed, plainly, None)
            if graphs == "eager":  # first without a kill, so that the calls below are known from their beginning
                torch._dynamo.reset()
                assert differing(trained(seed, session.checkpoint, session), expected) == [], f"seed {seed}"
            killing = threading.Timer(draw.uniform(0.0, 0.3), kill_worker, [session])
            killing.start()
            assert differing(trained(seed, session.checkpoint, session), expected) == [], f"seed {seed}"
            died += worker.connection.up is None
            killing.join()
            wait_until(lambda: worker.connection.up is not None, "the worker is back")
        assert died > 0
        calls, known = (sum(getattr(one, name) for one in session.report().segments) for name in ("calls", "known"))
        assert known > calls / 4 if graphs == "eager" else known == 0


def kill_worker(session: Session) -> None:
    """Kills the worker of a session, unless the last one killed is still being replaced."""
    assert session._embedded is not None
    process = session._embedded._process
    if process is not None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
