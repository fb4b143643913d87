"""Several wrapped layers in one segment: the same bits, whatever the model does between the layers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: float = 1.0, *, debug: float = 0.0) -> Tensor:
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.1) * scale + debug


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "without gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}
"""Settings under which a model may look at a value between two layers."""


class Model(nn.Module):
    """Layers in a row, and what tests put between them."""

    def __init__(self, between: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.between = between
        self.forwards = 0
        self.probes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        self.forwards += 1
        for number, layer in enumerate(self.layers):
            if self.between == "skip" and number == 1 and self.forwards > 1:
                continue
            x = layer(x, 1.0 + number, debug=0.5)
            if self.between == "op" and number == 2:
                x = x * 2
            if self.between == "list":
                seen.append(x)
            if self.between in SETTINGS and number == 2:
                with SETTINGS[self.between]():
                    self.probes.append(x.float().norm().item())
            if self.between == "shape":
                assert x.shape[-1] == x.size(-1) == 8 and x.dim() == 2 and x.dtype == torch.float32
        if self.between == "list":
            x = x + seen[0]
        return x.sum()


def trained(model: nn.Module, steps: int = 3) -> list[Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(4, 8, requires_grad=True)).backward()
    return [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize("between", ["", "op", "shape", "skip", *SETTINGS])
@pytest.mark.parametrize("segment_layers", [2, 3, 5])
def test_gradients_have_the_same_bits(session: Session, between: str, segment_layers: int) -> None:
    model = Model(between)
    other = deepcopy(model)
    plain = trained(other)
    session.wrap(model, Layer, segment_layers=segment_layers)
    joined = trained(model)
    calls = session.report().segments[0].calls
    assert all(map(torch.equal, joined, plain))
    assert model.probes == other.probes
    stays_alone = between == "op" and segment_layers == 5
    assert (calls < 3 * 5) != stays_alone  # the first forward has a segment for each layer


def test_a_group_is_one_call(session: Session) -> None:
    model = Model()
    session.wrap(model, Layer, segment_layers=3)
    trained(model, steps=2)
    (segment,) = session.report().segments
    assert segment.name == "Layer"
    assert segment.calls == 5 + 2
    assert session.report().fallbacks == 0


def test_a_value_inside_a_segment_cannot_be_used_outside(session: Session) -> None:
    model = Model("list")
    session.wrap(model, Layer, segment_layers=5)
    trained(model, steps=1)
    with pytest.raises(RuntimeError, match="segment_layers=1"):
        trained(model, steps=1)


def test_layers_that_return_something_else_stay_alone(session: Session) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (self.linear(x),)

    layers = nn.ModuleList(Pair() for _ in range(3))
    session.wrap(layers, Pair, segment_layers=3)
    for _ in range(2):
        x = torch.ones(2, 4)
        for layer in layers:
            (x,) = layer(x)
        x.sum().backward()
    assert session.report().segments[0].calls == 6


def test_the_last_layers_can_stay_without_checkpointing(session: Session) -> None:
    model = Model()
    plain = trained(deepcopy(model))
    session.wrap(model, Layer, kept_layers=2)
    kept = trained(model)
    assert session.report().segments[0].calls == 3 * 3
    assert all(map(torch.equal, kept, plain))


def test_copies_and_unwrapped_models_work(session: Session) -> None:
    model = Model()
    plain = trained(deepcopy(model))
    session.wrap(model, Layer, segment_layers=2)
    copied = deepcopy(model)
    assert all(map(torch.equal, trained(copied), plain))
    runs = [vars(layer).get("_group") for layer in copied.layers]
    assert runs[0] is runs[1] is not runs[2]
    assert runs[0] is not vars(model.layers[0])["_group"]
    assert session.report().segments[0].calls == 5 + 3 + 3
    backhaul.unwrap(copied)
    assert all(type(layer) is Layer for layer in copied.layers)


def test_without_gradients_each_layer_runs_at_once(session: Session) -> None:
    model = Model()
    session.wrap(model, Layer, segment_layers=5)
    trained(model, steps=2)
    model.eval()
    with torch.no_grad():
        outputs = [torch.ones(1, 8)]
        for layer in model.layers:
            outputs.append(layer(outputs[-1]))
    assert all(type(output) is Tensor and not torch.equal(output, before) for before, output in pairwise(outputs))


def test_layers_under_different_settings_are_not_joined(session: Session) -> None:
    class Mixed(Model):
        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                with torch.autocast("cpu", torch.bfloat16, enabled=number < 2):
                    x = layer(x)
            return x.sum()

    model = Mixed()
    plain = trained(deepcopy(model))
    session.wrap(model, Layer, segment_layers=5)
    joined = trained(model)
    assert session.report().segments[0].calls == 5 + 2 + 2
    assert all(map(torch.equal, joined, plain))


@pytest.mark.parametrize("what", ["argument", "input", "weight", "another weight"])
def test_a_change_between_joined_layers_is_an_error(what: str, session: Session) -> None:
    """Because the layers before it have not run yet."""

    class Changing(Model):
        def forward(self, x: Tensor) -> Tensor:
            start = x = x * 1
            scale = torch.ones(())
            weight: Tensor = self.get_parameter("layers.0.linear.weight")
            for number, layer in enumerate(self.layers):
                if what == "another weight" and number == 1:
                    x = torch.func.functional_call(layer, {"linear.weight": weight * 2}, (x,))
                else:
                    x = layer(x, scale)
                if number == 1:
                    with torch.no_grad():
                        changed = {"argument": scale, "input": start, "weight": weight}.get(what, torch.ones(()))
                        changed.mul_(2)
            return x.sum()

    model = Changing()
    session.wrap(model, Layer, segment_layers=5)
    model(torch.randn(4, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match="segment_layers=1"):
        model(torch.randn(4, 8, requires_grad=True))


def test_layers_that_set_attributes_stay_alone(session: Session) -> None:
    """The model may read them after each layer, as it reads the auxiliary losses of experts."""

    class Noting(Layer):
        loss: Tensor

        def forward(self, x: Tensor, scale: float = 1.0, *, debug: float = 0.0) -> Tensor:
            y = super().forward(x, scale, debug=debug)
            self.loss = y.square().mean()
            return y

    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Noting() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            loss = torch.zeros(())
            for layer in self.layers:
                x = layer(x)
                loss = loss + cast(Noting, layer).loss
            return x.sum() + loss

    model = Summing()
    plain = trained(deepcopy(model))
    session.wrap(model, Noting, segment_layers=3)
    assert all(map(torch.equal, trained(model), plain))
