"""examples/integrations/with_accelerate.py, and loops with Accelerate that go wrong on the way."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from support.libraries import assert_trains_equally
from support.processes import WorkerProcess

accelerate = pytest.importorskip("accelerate")

from backhaul.integrations.accelerate import enable  # noqa: E402

QUIET = backhaul.Settings(silence_s=240.0)
BACKWARD = torch.autograd.backward
MICRO_BATCHES = 11  # the last step of an epoch has three


class Block(nn.Sequential):
    """What becomes a segment."""


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    assert_trains_equally("accelerate", worker.address)


def trained(address: str | None, kind: str, steps: int = 4) -> list[Tensor]:
    """The gradients of each optimizer step, before it is taken, and the parameters at the end."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(8, 16), *[Block(nn.Linear(16, 16), nn.Dropout(0.1), nn.GELU()) for _ in range(3)]
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator: Any = accelerate.Accelerator(gradient_accumulation_steps=steps, cpu=True)
    session = enable(accelerator, model, address, layers=Block, settings=QUIET) if address else None
    rows: Any = torch.randn(2 * MICRO_BATCHES, 8)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if kind == "scaled losses":
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = accelerate.optimizer.AcceleratedOptimizer(optimizer.optimizer, scaler=accelerator.scaler)
    results: list[Tensor] = []
    for _epoch in range(2):
        for number, batch in enumerate(loader):
            with suppress(ArithmeticError), accelerator.accumulate(model):
                if kind == "a skipped micro-batch" and number == 5:
                    model(batch)
                    raise ArithmeticError
                loss = model(batch).square().mean()
                plainly = kind == "plain backward" and number % 3 == 0
                loss.backward() if plainly else accelerator.backward(loss)
                if kind == "two losses":
                    accelerator.backward(model(batch).abs().sum())
                if accelerator.sync_gradients:
                    results += [parameter.grad.clone() for parameter in model.parameters()]
                    if kind == "scaled losses":
                        optimizer.scaler.unscale_(optimizer.optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    if session is not None:
        assert session.report().travels == 1
        assert session.report().remote
        session.close()
    assert torch.autograd.backward is BACKWARD
    return [*results, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "scaled losses", "a skipped micro-batch", "plain backward", "two losses"])
def test_gradients_of_steps(worker: WorkerProcess, kind: str, steps: int) -> None:
    expected, actual = trained(None, kind, steps), trained(worker.address, kind, steps)
    assert len(expected) == len(actual)
    assert [number for number, pair in enumerate(zip(expected, actual, strict=True)) if not torch.equal(*pair)] == []


def test_an_error_in_backward_is_not_overlooked(worker: WorkerProcess) -> None:
    accelerator: Any = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    model = nn.Sequential(nn.Linear(8, 8), Block(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 8))
    session = enable(accelerator, model, worker.address, layers=Block, settings=QUIET)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.randn(2, 8)).sum())
    with pytest.raises(backhaul.AccumulationError, match="incomplete"), suppress(ArithmeticError):  # noqa: SIM117
        with accelerator.accumulate(model):
            y = model(torch.randn(2, 8))
            y.register_hook(lambda _: 1 / 0)
            accelerator.backward(y.sum())
    assert torch.autograd.backward is BACKWARD
    session.close()


def test_a_model_without_segments(worker: WorkerProcess) -> None:
    accelerator: Any = accelerate.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="layers=Block"):
        enable(accelerator, nn.Linear(2, 2), worker.address)
    with backhaul.connect(worker.address) as session, pytest.raises(backhaul.SettingError, match="not both"):
        enable(accelerator, nn.Linear(2, 2), session=session, strict=True)
