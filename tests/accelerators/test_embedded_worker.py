"""The worker that connect() starts has the device of the trainer's segments."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from conftest import QUIET
from support.bits import differing

DEVICES = ["cpu", "cuda:0", "cuda:1"]


@pytest.fixture
def session() -> Iterator[Session]:
    with backhaul.connect(strict=True, settings=QUIET) as session:
        yield session


def device_of_worker(session: Session) -> str:
    assert session._embedded is not None
    return session._embedded._device


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_it_follows_the_first_segment(device: str, session: Session) -> None:
    if device == "cuda:1" and torch.cuda.device_count() == 1:
        pytest.skip("needs two devices")
    layer = nn.Linear(4, 4).to(device)
    x = torch.randn(2, 4, device=device, requires_grad=True)

    session.checkpoint(layer, x).sum().backward()

    assert device_of_worker(session) == device
    assert session.report().remote == 1


@pytest.mark.slow
def test_a_scalar_of_the_cpu_may_be_used_first(session: Session) -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    x = torch.randn(2, 4, device="cuda", requires_grad=True)

    def scaled(x: Tensor) -> Tensor:
        return scale * 3 * x.sin()

    session.checkpoint(scaled, x).sum().backward()

    expected = torch.autograd.grad(scaled(x).sum(), [x, scale])
    assert differing([x.grad, scale.grad], list(expected)) == []
    assert session.report().remote == 1


@pytest.mark.slow
def test_a_device_that_is_given_stays() -> None:
    x = torch.randn(2, 4, device="cuda", requires_grad=True)
    with backhaul.connect(device="cpu", settings=QUIET) as session:
        session.checkpoint(torch.sin, x).sum().backward()

        assert device_of_worker(session) == "cpu"
        (segment,) = session.report().segments
    (reason,) = segment.reasons
    assert "device is cuda here and cpu there" in reason


@pytest.mark.slow
def test_ranks_of_a_machine_divide_the_memory_of_the_device_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * torch.cuda.device_count()))
    x = torch.randn(2, 4, device="cuda:0", requires_grad=True)
    with backhaul.connect(device="cuda:0", settings=QUIET) as session:
        session.checkpoint(torch.sin, x, strict=True).sum().backward()
        (worker,) = session._workers[:]
        assert worker.connection.up is not None
        assert worker.connection.up.budget_bytes == torch.cuda.get_device_properties(0).total_memory // 2 // 2
