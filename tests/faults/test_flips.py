"""Fault F14: a bit flipped anywhere in any message, in both directions, in every mode and on every path."""

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import BackhaulError, ConnectError, Session
from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.tensors.digest import address_of
from conftest import QUIET, RETURNS, quiet
from support.bits import Checkpoint, differing, grad_of, plainly
from support.devices import DEVICE
from support.flips import Flips, Kind, on_every_channel
from support.processes import WorkerProcess

MODES = list(itertools.product(RETURNS, ("default", "bytes"), (False, True)))
SOME_MODES = [MODES[0], MODES[3], MODES[5], MODES[6]]
"""In which any two settings meet."""

WARM_STEPS = 4
MOST_STEPS = 100
"""A message of some kinds does not pass in every step, or is none of those that are damaged together."""
AT_ONCE = 8
"""Messages damaged in a step, where there is no time for a step each."""

SESSIONS = {"OpenSession", "KeepSession", "CloseSession"}
SAVES = {"PutProgram", "PutTensors", "save", "release"}
ANSWERS = {"recompute", "backward", "collect_gradients", "fetch_sources", "PutReports"}
DOWN = {"pushed", "tensors"}
"""Messages that only a worker sends."""
ALL = SESSIONS | SAVES | ANSWERS | DOWN | {"region"}

Outcomes = Counter[str]


class Net(nn.Module):
    """Segments with short answers, some of which are pushed, and one with a long one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*size) for size in ((8, 8), (8, 400), (400, 700), (700, 8), (8, 8)))

    def run(self, checkpoint: Checkpoint, x: Tensor, factor: float) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x * factor).tanh(), x)
        return x.sum()


class Steps:
    """Training steps of a session, each compared with the same step without checkpointing.

    Args:
        session: Trains.
        options: Of the checkpointed calls.
        collects: It trains in accumulation blocks.
        steps_per_program: After so many steps the next one has another number, which makes another program.
    """

    def __init__(self, session: Session, *, collects: bool = False, steps_per_program: int = 2, **options: Any) -> None:
        self.session = session
        self.checkpoint = partial(session.checkpoint, **options)
        self.net = Net()
        self.inputs = [torch.randn(2, 8, requires_grad=True), *self.net.parameters()]
        self.collects, self.steps_per_program = collects, steps_per_program
        # Else the trainer would soon compute such a small net alone.
        session._shares["recompute"].trainers_share = lambda: 0  # type: ignore[method-assign]
        self.count = itertools.count()

    def __call__(self) -> str:
        """Who recomputed, or which error was raised."""
        with torch.no_grad():
            for tensor in self.inputs:
                tensor.add_(torch.randn_like(tensor), alpha=0.01)
        factor = 1.0 + next(self.count) // self.steps_per_program / 1024
        expected = self.gradients(plainly, factor)
        before = self.session.report().fallbacks
        try:
            ours = self.gradients(self.checkpoint, factor)
        except BackhaulError as error:
            return type(error).__name__
        assert differing(ours, expected) == []
        self.session._deliver(telemetry_pb2.TrainerReport())
        return "the trainer" if self.session.report().fallbacks > before else "the worker"

    def gradients(self, checkpoint: Checkpoint, factor: float) -> list[Tensor]:
        if not self.collects or checkpoint is plainly:
            return list(torch.autograd.grad(self.net.run(checkpoint, self.inputs[0], factor), self.inputs))
        for tensor in self.inputs:
            tensor.grad = None
        with self.session.accumulate() as step:
            step.backward(self.net.run(checkpoint, self.inputs[0], factor))
        return [grad_of(tensor) for tensor in self.inputs]


def flipped(flips: Flips, step: Callable[[], str], count: int, at_once: int, methods: Container[str] = ALL) -> Outcomes:
    """Flips so many bits in messages that a step makes, all kinds in turns, and counts what came of the steps."""
    before = flips.passed.copy()
    for _ in range(WARM_STEPS):
        assert step() == "the worker"
    met = [(kind, passed) for kind, passed in sorted((flips.passed - before).items()) if kind[1] in methods]
    kinds, done, outcomes = itertools.cycle(met), flips.flipped.total() + count, Outcomes()
    for _ in range(MOST_STEPS * count):
        for kind, passed in itertools.islice(kinds, min(at_once, done - flips.flipped.total())):
            flips.arm(kind, flips.random.randrange(max(1, passed // WARM_STEPS)))
        outcomes[step()] += 1
        flips.disarm()
        if flips.flipped.total() == done:
            return outcomes
    raise AssertionError(f"{done - flips.flipped.total()} flips of {count} did not happen")


def while_training(worker: WorkerProcess, flips: Flips, count: int, at_once: int) -> Iterator[Outcomes]:
    modes = MODES if at_once == 1 else SOME_MODES
    for returns, check, shares_memory in modes:
        with (
            on_every_channel(flips.on_its_way),
            backhaul.connect(worker.address, settings=quiet(shared_memory=shares_memory)) as session,
            flips.in_shared_memory(),
        ):
            yield flipped(flips, Steps(session, returns=returns, determinism_check=check), count // len(modes), at_once)


def while_accumulating(worker: WorkerProcess, flips: Flips, count: int, at_once: int) -> Iterator[Outcomes]:
    with (
        on_every_channel(flips.on_its_way),
        backhaul.connect(worker.address, settings=QUIET) as session,
        flips.in_shared_memory(),
    ):
        yield flipped(flips, Steps(session, collects=True), count, at_once, ANSWERS | DOWN | {"release", "region"})


def while_connecting(worker: WorkerProcess, flips: Flips, count: int) -> Iterator[Outcomes]:
    """Of the messages that a session begins and ends with, one in each session."""

    def step() -> str:
        try:
            with backhaul.connect(worker.address, settings=quiet(shared_memory=False)) as session:
                steps = Steps(session, returns="gradients")
                return steps() if steps() == "the worker" else "the trainer"
        except ConnectError as error:
            return type(error).__name__

    with on_every_channel(flips.on_its_way):
        yield flipped(flips, step, count, 1, SESSIONS | {"pushed"})


def while_fetching(worker: WorkerProcess, flips: Flips, count: int) -> Iterator[Outcomes]:
    """Of what a trainer fetches that has lost another worker."""
    with (
        on_every_channel(flips.on_its_way),
        backhaul.connect(worker.address, settings=QUIET) as session,
        flips.in_shared_memory(),
    ):
        xs = [torch.randn(size, requires_grad=True) for size in (4, 1 << 19)]
        held = [session.checkpoint(torch.sin, x) for x in xs]
        (handle,) = session._workers
        while any(handle.uploader.stored.holder_of(address_of(x)) is None for x in xs):
            session.checkpoint(torch.sin, torch.randn(3, requires_grad=True)).sum().backward()

        def step() -> str:
            fetched = [session._fetch(address_of(x)) for x in xs]
            handle._failed = None
            assert all(f is None or torch.equal(f, x.cpu()) for f, x in zip(fetched, xs, strict=True))
            return "the trainer" if None in fetched else "the worker"

        yield flipped(flips, step, count, 1, {"fetch_sources", "region"})
        del held


def flip_everywhere(
    worker: WorkerProcess, count: int, at_once: int, caplog: pytest.LogCaptureFixture
) -> tuple[Counter[Kind], Outcomes]:
    """Flips so many bits while training, and a quarter of that otherwise. Returns the flips by kind, and what came of
    the steps.
    """
    flips, logged, outcomes = Flips(random.Random(0)), len(worker.logged()), Outcomes()
    with caplog.at_level(logging.WARNING):
        for counts in itertools.chain(
            while_training(worker, flips, count, at_once),
            while_accumulating(worker, flips, count // 8, at_once),
            while_connecting(worker, flips, count // 16),
            while_fetching(worker, flips, count // 16),
        ):
            outcomes += counts
    unnamed = [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert unnamed == []  # neither of ours nor of gRPC's
    assert "A request failed" not in worker.logged()[logged:]
    return flips.flipped, outcomes


@pytest.mark.slow
def test_no_flipped_bit_changes_a_gradient(caplog: pytest.LogCaptureFixture) -> None:
    with WorkerProcess("--memory", "2GiB") as worker:
        flip_counts, outcomes = flip_everywhere(worker, 192, AT_ONCE, caplog)
    met = set(ALL) if DEVICE == "cpu" else set(ALL) - {"region"}  # a trainer shares no memory of a device with a worker
    assert flip_counts.keys() == {(d, kind) for d in ("up", "down") for kind in met if d == "down" or kind not in DOWN}
    assert outcomes["the worker"] > outcomes.total() / 3  # about half: a step with a flip often ends on the trainer


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")  # torch.compile says what it ignores
@pytest.mark.usefixtures("fresh_compiler")
def test_two_thousand_flipped_bits_with_graphs() -> None:
    """Most calls are known: they send their segments before they run."""
    flips, outcomes = Flips(random.Random(0)), Outcomes()
    with WorkerProcess("--memory", "3GiB") as worker, torch._dynamo.config.patch(recompile_limit=64):
        for check, shares_memory in itertools.product(("default", "bytes", "outputs"), (False, True)):
            torch._dynamo.reset()
            with (
                on_every_channel(flips.on_its_way),
                backhaul.connect(
                    worker.address, graphs="eager", settings=quiet(shared_memory=shares_memory)
                ) as session,
                flips.in_shared_memory(),
            ):
                steps = Steps(session, steps_per_program=64, returns="gradients", determinism_check=check)
                outcomes += flipped(flips, steps, 500, 1)
                calls, known = (sum(getattr(s, name) for s in session.report().segments) for name in ("calls", "known"))
                assert known > calls * 3 / 4
    assert flips.flipped.total() >= 2_000
    assert outcomes["the worker"] > outcomes.total() / 3


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_flipped_bits(caplog: pytest.LogCaptureFixture) -> None:
    with WorkerProcess("--memory", "3GiB") as worker:
        flip_counts, outcomes = flip_everywhere(worker, 8_000, 1, caplog)
    assert flip_counts.total() >= 10_000
    for (direction, method), count in sorted(flip_counts.items()):
        print(direction, method, count)  # noqa: T201  shown by -s
    print(dict(outcomes))  # noqa: T201  likewise
