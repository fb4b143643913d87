"""Parameters get their gradients in the order they would have without checkpointing: hooks and optimizers see it."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from backhaul import Session
from support.bits import Checkpoint
from support.calls import WIDTH, as_without_checkpointing, same
from support.devices import DEVICE

Step = Callable[[Checkpoint, list[nn.Module], Tensor], Tensor]


def one_after_another(checkpoint: Checkpoint, layers: list[nn.Module], h: Tensor) -> Tensor:
    for layer in layers:
        h = checkpoint(layer, h)
    return h


def one_twice(checkpoint: Checkpoint, layers: list[nn.Module], h: Tensor) -> Tensor:
    return one_after_another(checkpoint, [*layers, layers[0]], h)


def in_and_out(checkpoint: Checkpoint, layers: list[nn.Module], h: Tensor) -> Tensor:
    return layers[0](checkpoint(layers[1], layers[0](checkpoint(layers[0], h)))) + layers[1](h)


def side_by_side(checkpoint: Checkpoint, layers: list[nn.Module], h: Tensor) -> Tensor:
    first, second = (checkpoint(layer, h) for layer in layers)
    return second * first


def in_stages(checkpoint: Checkpoint, layers: list[nn.Module], h: Tensor) -> Tensor:
    def fn(h: Tensor) -> tuple[Tensor, Tensor]:
        middle = layers[0](h)
        return middle, layers[1](middle)

    middle, out = checkpoint(fn, h)
    return layers[0](middle) + out


def all_in_one(checkpoint: Checkpoint, layers: list[nn.Module], h: Tensor) -> Tensor:
    output: Tensor = checkpoint(nn.Sequential(*layers, *layers), h)
    return output


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("step", [one_after_another, one_twice, in_and_out, side_by_side, in_stages, all_in_one])
@as_without_checkpointing
def test_noise_that_hooks_draw_is_that_of_no_checkpointing(
    step: Step, autocast: bool, checkpoint: Checkpoint
) -> list[Tensor | None]:
    layers: list[nn.Module] = [
        nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
    ]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    order: list[int] = []

    def hook(number: int, parameter: nn.Parameter) -> None:
        order.append(number)
        assert parameter.grad is not None
        parameter.grad += torch.randn_like(parameter)

    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda parameter, number=number: hook(number, parameter))
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16) if autocast else nullcontext():
        out = step(checkpoint, layers, x * 1)
    torch.manual_seed(3)
    out.float().square().sum().backward()
    return [torch.tensor(order), x.grad, *(parameter.grad for parameter in parameters)]


def test_an_optimizer_in_backward(session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        total = torch.zeros(())

        def update(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            total.add_(parameter.grad.norm())  # a rate that depends on what came before
            with torch.no_grad():
                parameter.sub_(parameter.grad / (1 + total))
            parameter.grad = None

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            x = torch.randn(2, WIDTH, requires_grad=True)
            one_after_another(checkpoint, list(layers), x * 1).square().sum().backward()
        return [x.grad, total, *(parameter.detach() for parameter in parameters)]

    same(case, session.checkpoint)
