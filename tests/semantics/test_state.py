"""The state a recomputation starts from is that of forward; what forward changed stays changed once."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from backhaul import Session
from conftest import settle
from support.bits import Checkpoint, plainly
from support.calls import WIDTH, as_without_checkpointing, inputs, same
from support.devices import DEVICE


@pytest.mark.parametrize("preserve", [True, False])
@as_without_checkpointing
def test_draws_are_those_of_forward(preserve: bool, anywhere: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    options = {} if anywhere is plainly else {"preserve_rng_state": preserve}
    y = anywhere(lambda h: F.dropout(h * torch.rand(WIDTH), 0.5).sin(), h, **options)
    torch.manual_seed(7)
    y.sum().backward()
    return [x.grad]


@pytest.mark.parametrize("preserve", [True, False])
def test_backward_leaves_the_ambient_state_alone(preserve: bool, anywhere: Checkpoint) -> None:
    x, _ = inputs()
    y = anywhere(lambda x: F.dropout(x, 0.5).sin(), x, preserve_rng_state=preserve)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before[2]


AUTOCASTS = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "without cache": {"dtype": torch.bfloat16, "cache_enabled": False},
    "disabled": {"enabled": False},
}


@pytest.mark.parametrize("settings", AUTOCASTS.values(), ids=AUTOCASTS)
@as_without_checkpointing
def test_autocast_is_that_of_forward(settings: dict[str, Any], anywhere: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    with torch.autocast(DEVICE, **settings):
        y = anywhere(lambda h: (linear(h) + linear(h)).sin(), h)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=not settings.get("enabled", True)):
        y.sum().backward()
    return [x.grad, linear.weight.grad]


def makes_its_own(h: Tensor) -> Tensor:
    made = torch.ones(WIDTH)
    return (h * made.cpu() if made.device.type == "cpu" else h * made.numel()).sin()


@as_without_checkpointing
def test_a_device_context_is_that_of_forward(anywhere: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    with torch.device("meta"):
        y = anywhere(makes_its_own, h)
    y.sum().backward()
    return [x.grad]


@as_without_checkpointing
def test_a_default_device_is_that_of_forward(anywhere: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    torch.set_default_device("meta")
    try:
        y = anywhere(makes_its_own, h)
    finally:
        torch.set_default_device(DEVICE if DEVICE != "cpu" else None)
    y.sum().backward()
    return [x.grad]


@as_without_checkpointing
def test_default_dtype_and_deterministic_flags_are_those_of_forward(anywhere: Checkpoint) -> list[Tensor | None]:
    x = torch.randn(2, WIDTH, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        sure = torch.are_deterministic_algorithms_enabled()
        return (x * torch.full((WIDTH,), 0.1) * (2 if sure else 3)).sin()

    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        y = anywhere(fn, x)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    y.sum().backward()
    assert torch.get_default_dtype() is torch.float32
    return [x.grad, y.detach()]


class Settled(nn.Module):
    """Has what forward reads: weights, a buffer, a flag."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        y = self.linear(h) + self.shift
        return (F.dropout(y, 0.5) if self.training else y).sin() * self.shift


CHANGES: dict[str, Callable[[Settled], object]] = {
    "training": lambda module: module.eval(),
    "weights": lambda module: module.linear.weight.data.mul_(2),
    "buffers": lambda module: module.shift.data.mul_(2),
    "the parameter itself": lambda module: setattr(module.linear, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_module_reads_is_that_of_forward(change: str, checkpoint: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        module, (x, h) = Settled(), inputs()
        weight = module.linear.weight
        y = checkpoint(module, h)
        if checkpoint is not plainly:
            settle(session)  # what was sent before is with the worker
            CHANGES[change](module)
        y.sum().backward()
        return [x.grad, weight.grad, module.linear.bias.grad]

    same(case, checkpoint)
    assert session.report().fallbacks == 0


class Codebook(nn.Module):
    """Nearest entries, which move towards what chose them."""

    entries: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("entries", torch.randn(4, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        y = self.linear(h)
        chosen = torch.cdist(y, self.entries).argmin(1)
        nearest = self.entries[chosen]
        with torch.no_grad():
            self.entries[chosen] = nearest * 0.5 + y * 0.5
        return (y * nearest).sin()


class Normed(nn.Sequential):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__(nn.Unflatten(1, (WIDTH // 2, 2)), norm, nn.Tanh(), nn.Flatten())


UPDATES: dict[str, Callable[[], nn.Module]] = {
    "codebook": Codebook,
    "batch norm": lambda: Normed(nn.BatchNorm1d(WIDTH // 2)),
    "batch norm, cumulative": lambda: Normed(nn.BatchNorm1d(WIDTH // 2, momentum=None)),
    "instance norm": lambda: Normed(nn.InstanceNorm1d(WIDTH // 2, track_running_stats=True, affine=True)),
}


@pytest.mark.parametrize("update", UPDATES)
@as_without_checkpointing
def test_buffers_are_updated_once(update: str, anywhere: Checkpoint) -> list[Tensor | None]:
    module, (x, h) = UPDATES[update](), inputs()
    for _ in range(2):
        h = anywhere(module, h)
    h.square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters()), *module.buffers()]
