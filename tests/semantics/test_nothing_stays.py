"""After backward nothing of Backhaul stays on a tensor of the user: torch.utils.swap_tensors accepts each of them."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from conftest import QUIET
from support.bits import differing
from support.processes import WorkerProcess

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.scale = torch.ones(WIDTH)  # neither parameter nor buffer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.norm(self.linear(x)), 0.3) * mask * self.scale


def through_module(checkpoint: Any, block: Block) -> Callable[..., Tensor]:
    return functools.partial(checkpoint, block)


def through_closure(checkpoint: Any, block: Block) -> Callable[..., Tensor]:
    return functools.partial(checkpoint, lambda x, mask: block(x, mask))  # noqa: PLW0108  a closure


def through_method(checkpoint: Any, block: Block) -> Callable[..., Tensor]:
    return functools.partial(checkpoint, functools.partial(block.forward))


WAYS = [through_module, through_closure, through_method]


def step(run: list[Callable[..., Tensor]], x: Tensor, mask: Tensor, block: Any = None) -> None:
    y = x
    for one in run:
        y = one(y, mask)
    loss = y.square().mean()
    loss.backward() if block is None else block.backward(loss)


def traces(tensor: Tensor) -> list[object]:
    left: list[object] = [*weakref.getweakrefs(tensor), *vars(tensor)]
    return [*left, *(tensor._backward_hooks or ()), *(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_block", [False, True])
def test_nothing_stays_after_a_step_and_after_the_session(
    way: Callable[..., Callable[..., Tensor]], in_block: bool, worker: WorkerProcess, returns: str
) -> None:
    model = nn.ModuleList(Block() for _ in range(3))
    x, mask = torch.randn(4, WIDTH, requires_grad=True), (torch.arange(WIDTH) % 3 > 0).float()
    tensors: list[Any] = [*model.parameters(), *model.buffers(), *(block.scale for block in model.children()), x, mask]
    with backhaul.connect(worker.address, settings=QUIET) as session:
        run = [way(functools.partial(session.checkpoint, returns=returns), block) for block in model.children()]
        for _ in range(3):  # calls are predicted from the second one on
            if in_block:
                with session.accumulate() as block:
                    step(run, x, mask, block)
            else:
                step(run, x, mask)
            assert [trace for tensor in tensors for trace in traces(tensor)] == []
    assert [trace for tensor in tensors for trace in traces(tensor)] == []


@pytest.mark.parametrize("way", WAYS)
def test_parameters_may_be_swapped_between_steps(way: Callable[..., Callable[..., Tensor]], session: Session) -> None:
    def trained(checkpoint: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.ModuleList(Block() for _ in range(3))
        x, mask = torch.randn(4, WIDTH, requires_grad=True), torch.ones(WIDTH)
        run = [way(checkpoint, block) for block in model.children()]
        for _ in range(4):
            step(run, x, mask)
            for parameter in model.parameters():
                torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 0.5))
        return [x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]

    assert differing(trained(session.checkpoint), trained(lambda block, *args: block(*args))) == []
    assert session.report().fallbacks == 0


def test_a_predicted_call_finds_its_weights_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    confirmed: list[bool] = []
    own = backhaul._dispatch.prediction.PendingCall.__exit__

    def noting(self: Any, *exception: object) -> None:
        confirmed.append(self.is_saved)
        own(self, *exception)

    monkeypatch.setattr(backhaul._dispatch.prediction.PendingCall, "__exit__", noting)
    for way in WAYS:
        run = [way(session.checkpoint, Block())]
        confirmed.clear()
        for _ in range(4):
            step(run, torch.randn(4, WIDTH, requires_grad=True), torch.ones(WIDTH))
        assert confirmed[0] is False
        assert any(confirmed)


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "batch norm": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "sigmoid": lambda x: x.sigmoid(),
}
"""Functions by their last op. Of what the first two save, bytes are undefined."""


@pytest.mark.parametrize("end", ENDS)
def test_no_tensor_of_a_recomputation_on_the_trainer_stays(end: str, worker: WorkerProcess) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    session = backhaul.connect(worker.address, settings=QUIET)
    session.close()

    def tensors_after(steps: int) -> int:
        for _ in range(steps):
            x = torch.randn(4, WIDTH, requires_grad=True)
            loss = session.checkpoint(lambda x: ENDS[end](x @ weight), x, returns="activations").square().mean()
            loss.backward()
        del x, loss
        gc.collect()
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())  # `isinstance` runs their code

    assert tensors_after(2) == tensors_after(3)
