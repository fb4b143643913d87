"""Whole micro-batches whose worker dies, stalls or lies: the sums are those of the loop, or an error says more."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import RecheckError
from backhaul._accumulate.whole import WholeMicroBatches
from conftest import QUIET, quiet, wait_until
from faults.test_recheck import LyingWorker
from support.bits import differing
from support.processes import WorkerProcess
from support.whole import SHARE, Language, batch, cross_entropy, reasons_in, train, whole_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_share")]
STEPS = 3


@pytest.mark.parametrize(
    ("number", "count"),
    [
        (3, 1),
        (1, 2),
        *[pytest.param(*at, marks=pytest.mark.nightly) for at in ((1, 1), (5, 1), (3, 2), (5, 2))],
    ],
)
def test_a_worker_dies_before_a_micro_batch(number: int, count: int) -> None:
    """Of those that it has, of the last of its own, and of those of the trainer."""
    workers = [WorkerProcess("--memory", "1GiB") for _ in range(count)]
    first = workers[0]
    with first, workers[-1]:
        addresses = ",".join(worker.address for worker in workers)
        with backhaul.connect(addresses, settings=QUIET) as session:

            def happens(step: int, at: int) -> None:
                if (step, at) == (STEPS - 1, number):
                    first.kill()

            assert differing(train(session, happens=happens), train(None)) == []
            assert whole_in(session) > 0


def test_a_worker_dies_with_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has answered for all of its micro-batches, and nobody has fetched what it has added up."""
    ends: list[int] = []
    with WorkerProcess("--memory", "1GiB") as worker, backhaul.connect(worker.address, settings=QUIET) as session:

        def happens(step: int, number: int) -> None:
            if (step, number) == (STEPS - 1, 5):
                block = blocks[-1]
                wait_until(lambda: all(one.ended_s for one in block._submitted.values()), "all are answered")
                ends.append(len(block._submitted))
                worker.kill()

        blocks: list[WholeMicroBatches] = []
        made = WholeMicroBatches.__init__

        def noted(self: WholeMicroBatches, *args: Any, **options: Any) -> None:
            made(self, *args, **options)
            blocks.append(self)

        monkeypatch.setattr(WholeMicroBatches, "__init__", noted)
        assert differing(train(session, happens=happens), train(None)) == []
        assert ends == [SHARE]
        assert any("a worker was lost with gradients" in reason for reason in _reasons(session))


def _reasons(session: backhaul.Session) -> list[str]:
    return [reason for segment in session.report().segments for reason in segment.reasons]


def test_a_worker_stalls() -> None:
    with (
        WorkerProcess("--memory", "1GiB") as worker,
        backhaul.connect(worker.address, settings=quiet(silence_s=1.0)) as session,
    ):
        pid = worker.serving()

        def happens(step: int, number: int) -> None:
            if (step, number) == (STEPS - 1, 2):
                os.kill(pid, signal.SIGSTOP)

        try:
            assert differing(train(session, happens=happens), train(None)) == []
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_worker_without_memory_refuses_and_the_trainer_says_what_is_missing() -> None:
    class Wide(Language):
        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = super().forward(tokens).repeat_interleave(1 << 14, 0)[: 1 << 15].mean(0, keepdim=True)
            return logits.expand(2, -1, -1)

    with WorkerProcess("--memory", "16MiB") as worker, backhaul.connect(worker.address, settings=QUIET) as session:
        assert differing(train(session, Wide), train(None, Wide)) == []
        assert whole_in(session) == 0
        assert any("bytes" in reason for reason in [*reasons_in(session), *_reasons(session)])


@pytest.mark.parametrize(
    "bit", [0, pytest.param(9, marks=pytest.mark.nightly), pytest.param(22, marks=pytest.mark.nightly)]
)
def test_a_wrong_gradient_is_found_although_it_is_in_a_sum(bit: int) -> None:
    with LyingWorker(0, 5, bit) as liar, backhaul.connect(liar.address, settings=quiet(whole_recheck=1.0)) as session:
        model = Language()
        with pytest.raises(RecheckError, match="wrong gradients for the micro-batch") as raised:
            for step in range(10):
                _step(session, model, step)
        assert raised.value.worker == liar.address
        before = whole_in(session)
        expected = Language()
        expected.load_state_dict(model.state_dict())
        model.zero_grad()
        torch.manual_seed(0)
        _step(session, model, 0)  # as the error says
        torch.manual_seed(0)
        for tokens, targets in batch(0, 6):
            cross_entropy(expected, tokens, targets).backward()
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        assert all(torch.equal(_grad(one), _grad(other)) for one, other in pairs)
        assert whole_in(session) == before


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _step(session: backhaul.Session, model: nn.Module, step: int) -> None:
    with session.accumulate() as block:
        for tokens, targets in batch(step, 6):
            block.run(cross_entropy, model, tokens, targets)


def test_a_block_that_fails_leaves_nothing_and_its_losses_say_so() -> None:
    with WorkerProcess("--memory", "1GiB") as worker, backhaul.connect(worker.address, settings=QUIET) as session:
        model = Language()
        _step(session, model, 0)
        model.zero_grad()
        losses: list[Tensor] = []

        def fail(block: Any) -> None:
            for tokens, targets in batch(1, SHARE):
                losses.append(block.run(cross_entropy, model, tokens, targets))
            raise KeyError

        with pytest.raises(KeyError), session.accumulate() as block:
            fail(block)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(loss.isfinite() for loss in losses)  # a worker or the trainer still computes it


def test_weights_that_change_inside_the_block_are_an_error() -> None:
    with WorkerProcess("--memory", "1GiB") as worker, backhaul.connect(worker.address, settings=QUIET) as session:
        model = Language()
        _step(session, model, 0)
        with pytest.raises(backhaul.AccumulationError, match="changed inside"), session.accumulate() as block:
            for number, (tokens, targets) in enumerate(batch(1, 6)):
                block.run(cross_entropy, model, tokens, targets)
                if number == 1:
                    with torch.no_grad():
                        model.embedding.weight.mul_(0.5)


def test_arguments_that_change_inside_the_block_are_those_of_the_call(worker: WorkerProcess) -> None:
    """They are copied, as the arguments of any segment are."""

    def results(run: Callable[[Any, nn.Module, Tensor, Tensor], object], session: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Language()
        for step in range(2):
            model.zero_grad()
            with session.accumulate() if session is not None else _nothing() as block:
                for tokens, targets in batch(step, 6):
                    run(block, model, tokens, targets)
                    tokens.zero_()
        return [parameter.grad for parameter in model.parameters()]

    def here(_: Any, model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
        cross_entropy(model, tokens, targets).backward()

    def whole(block: Any, model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
        block.run(cross_entropy, model, tokens, targets)

    with backhaul.connect(worker.address, settings=QUIET) as session:
        assert differing(results(whole, session), results(here, None)) == []


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
