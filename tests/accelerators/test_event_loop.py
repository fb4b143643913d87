"""Nothing in a worker's event loop waits for the device.

The simulated device logs each wait of the worker's process, with its place and thread. The event loop runs in the main
thread. The device is as slow as can be: it does only what somebody waits for.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import backhaul
from accelerators.conftest import IS_SIMULATED
from accelerators.test_gradients import blocks, build, twice
from backhaul import Session
from conftest import QUIET, quiet
from support.bits import Checkpoint, differing, plainly, train
from support.blocks import loop
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow

WIDTH = 256


class Watched(NamedTuple):
    """A worker whose waits for the device are logged to a file."""

    address: str
    log: Path

    def waits(self) -> list[str]:
        """Returns the waits since the worker has started, each as "process what @ place in thread"."""
        return self.log.read_text().splitlines()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if not IS_SIMULATED:
        pytest.skip("only the simulated device logs waits")
    log = tmp_path_factory.mktemp("waits") / "log"
    environment = {"SIMULATED_CUDA_LOG": str(log), "SIMULATED_CUDA_LAZY": "1"}
    with WorkerProcess("--memory", "1GiB", "--device", "cuda", environment=environment) as process:
        log.write_text("")  # what it has waited for before it served
        yield Watched(process.address, log)


class Residual(nn.Module):
    """Large enough that its tensors need several messages."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def large() -> nn.Module:
    return nn.Sequential(Residual(), Residual()).cuda()


def through(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(1024, WIDTH, device="cuda", requires_grad=True)
    y: Tensor = x
    for segment in model.children():
        y = checkpoint(segment, y)
    return y.square().mean(), [x]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def trained(session: Session, returns: str) -> None:
    def checkpoint(*args: object) -> object:
        return session.checkpoint(*args, returns=returns, strict=True)  # type: ignore[arg-type]

    ours = train(checkpoint, large, through, steps=3, optimizer=sgd)
    assert differing(ours, train(plainly, large, through, steps=3, optimizer=sgd)) == []


def check(watched: Watched) -> None:
    waits = watched.waits()
    assert waits
    assert [wait for wait in waits if wait.endswith(" in MainThread")] == []


def test_requests_for_gradients_and_activations(watched: Watched, returns: str) -> None:
    with backhaul.connect(watched.address, settings=QUIET) as session:
        trained(session, returns)
        small = train(
            lambda *args: session.checkpoint(*args, returns=returns, strict=True), lambda: build().cuda(), twice
        )
    assert differing(small, train(plainly, lambda: build().cuda(), twice)) == []
    check(watched)


def test_a_block(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, twin = build().cuda(), build().cuda()
    twin.load_state_dict(model.state_dict())
    with backhaul.connect(watched.address, settings=QUIET) as session:
        for share in session._shares.values():
            monkeypatch.setattr(share, "trainers_share", lambda: 0)
            monkeypatch.setattr(share, "last_segments", lambda *_: 0)
        ours = blocks(session.checkpoint, model, session.accumulate)
        assert session.report().fallbacks == 0
    assert differing(ours, blocks(plainly, twin, loop)) == []
    check(watched)


def test_differences_from_stored_tensors(watched: Watched) -> None:
    with backhaul.connect(watched.address, settings=quiet(compression="on")) as session:
        trained(session, "gradients")
        assert session.report().spared_bytes > 0
    check(watched)


def test_two_sessions_with_equal_tensors(watched: Watched) -> None:
    with ExitStack() as stack:
        for _ in range(2):  # the tensors of the second are compared with those of the first
            trained(stack.enter_context(backhaul.connect(watched.address, settings=QUIET)), "gradients")
    check(watched)
