"""Values that would take a worker down are refused before their op runs; honest ones are not."""

from typing import Any

import pytest
import torch

from backhaul_runtime.program import unsafe_arguments
from backhaul_runtime.program.op_list import resolve

LSTM = "aten.lstm.input"
LEAST = -(1 << 63)


def check(name: str, *args: Any, **kwargs: Any) -> None:
    unsafe_arguments.check_values(name, resolve(name), args, kwargs)


def lstm(module: torch.nn.LSTM, batch_first: bool = False) -> list[Any]:
    directions = 2 if module.bidirectional else 1
    held = directions * module.num_layers
    output = module.proj_size or module.hidden_size
    states = [torch.zeros(held, 3, size) for size in (output, module.hidden_size)]
    data = torch.zeros(3, 5, module.input_size) if batch_first else torch.zeros(5, 3, module.input_size)
    weights = list(module._flat_weights)
    return [data, states, weights, module.bias, module.num_layers, 0.0, False, module.bidirectional, batch_first]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("options", [{}, {"num_layers": 3, "bidirectional": True}, {"bias": False}, {"proj_size": 2}])
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_lstm_of_its_sizes_is_let_through(options: dict[str, Any], batch_first: bool) -> None:
    arguments = lstm(torch.nn.LSTM(4, 6, **options), batch_first)
    check(LSTM, *arguments)
    resolve(LSTM)(*arguments)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, torch.zeros(5, 3, 400)),
        (0, torch.zeros(15)),
        (1, [torch.zeros(1, 3, 600)] * 2),
        (1, [torch.zeros(1, 3, 6)]),
        (2, [torch.zeros(24, 1)] * 4),
        (2, []),
        (4, 1 << 62),
    ],
)
def test_an_lstm_of_other_sizes_is_refused(index: int, value: Any) -> None:
    arguments = lstm(torch.nn.LSTM(4, 6))
    arguments[index] = value
    with pytest.raises(ValueError, match="LSTM"):
        check(LSTM, *arguments)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("aten._weight_norm.default", (torch.ones(8, 4), torch.ones(1), 0), {}),
        ("aten._weight_norm.default", (torch.ones(0), torch.ones(0), 0), {}),
        ("aten._weight_norm.default", (torch.ones(0, 3), torch.ones(0, 1), 0), {}),
        ("aten.embedding_bag.padding_idx", (torch.ones(4, 4), torch.arange(3), torch.tensor([0, -9, 3])), {}),
        (
            "aten.grid_sampler_2d.default",
            (torch.ones(1, 1, 4, 4), torch.full((1, 2, 2, 2), torch.nan), 0, 1, False),
            {},
        ),
        ("aten.linalg_matrix_power.default", (torch.ones(2, 2), LEAST), {}),
        ("aten.matrix_power.default", (torch.ones(2, 2), LEAST), {}),
        ("aten.divide.Tensor_mode", (torch.tensor([LEAST]), torch.tensor([-1])), {"rounding_mode": "trunc"}),
        ("aten.linalg_matrix_power.default", (torch.ones(2, 2),), {"n": LEAST}),
        ("aten.div.Tensor_mode", (torch.tensor([LEAST]), torch.tensor([-1])), {"rounding_mode": "trunc"}),
    ],
)
def test_refused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        check(name, *args, **kwargs)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("aten._weight_norm.default", (torch.ones(8, 4), torch.ones(8, 1), 0), {}),
        ("aten.embedding_bag.padding_idx", (torch.ones(4, 4), torch.arange(3), torch.tensor([0, 0, 3])), {}),
        ("aten.linalg_matrix_power.default", (torch.ones(2, 2), -3), {}),
        ("aten.div.Tensor_mode", (torch.tensor([LEAST]), torch.tensor([-1])), {"rounding_mode": "floor"}),
    ],
)
def test_let_through(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check(name, *args, **kwargs)
