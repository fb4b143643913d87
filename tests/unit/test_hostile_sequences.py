"""Lengths, offsets, indices and scales that do not fit are refused before their op runs; those that fit are not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul_runtime.program import unsafe_arguments
from backhaul_runtime.program.op_list import resolve

PACK, PAD, CTC = "aten._pack_padded_sequence.default", "aten._pad_packed_sequence.default", "aten.ctc_loss.IntList"
AVERAGE = "aten.fused_moving_avg_obs_fake_quant.default"
BY_TENSOR, BY_CHANNEL = (
    "aten.fake_quantize_per_tensor_affine.tensor_qparams",
    "aten.fake_quantize_per_channel_affine.default",
)
LEARNABLE = "aten._fake_quantize_learnable_per_channel_affine.default"
RENORM, POISSON, BINOMIAL = "aten.embedding_renorm_.default", "aten.poisson.default", "aten.binomial.default"


def check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    unsafe_arguments.check_values(name, resolve(name), args, kwargs)


def whole(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def packed(kind: Callable[..., nn.RNNBase], *sizes: int, **options: Any) -> list[Any]:
    """Returns the arguments of an op on packed sequences of 4 features, for a module with 6 hidden units."""
    module = kind(4, 6, **options)
    held = (2 if module.bidirectional else 1) * module.num_layers
    states = [torch.zeros(held, sizes[0], size) for size in (module.proj_size or 6, 6)]
    given = states if kind is nn.LSTM else states[1]
    weights = list(module._flat_weights)
    return [
        torch.rand(sum(sizes), 4),
        whole(*sizes),
        given,
        weights,
        module.bias,
        module.num_layers,
        0.0,
        False,
        held > 1,
    ]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("aten.lstm.data", nn.LSTM, {}),
        ("aten.lstm.data", nn.LSTM, {"proj_size": 2}),
        ("aten.lstm.data", nn.LSTM, {"bias": False}),
        ("aten.gru.data", nn.GRU, {"bidirectional": True}),
        ("aten.rnn_tanh.data", nn.RNN, {}),
        ("aten.rnn_relu.data", nn.RNN, {"nonlinearity": "relu"}),
    ],
)
def test_packed_sequences_of_their_sizes_are_let_through(
    name: str, kind: Callable[..., nn.RNNBase], options: dict[str, Any]
) -> None:
    arguments = packed(kind, 3, 3, 1, **options)
    check(name, tuple(arguments), {})
    resolve(name)(*arguments)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, torch.rand(7, 400)),
        (0, torch.rand(7)),
        (0, torch.rand(9, 4)),
        (1, whole()),
        (1, whole(1, 5, 1)),
        (1, whole(7, 0)),
        (1, whole(9, -2)),
        (1, whole(3, 3, 1).int().float()),
        (1, whole(7).unsqueeze(0)),
        (2, [torch.rand(1, 900, 6)] * 2),
        (2, [torch.rand(1, 3, 6)]),
        (3, [torch.rand(24, 1)] * 4),
        (5, 1 << 40),
    ],
)
def test_packed_sequences_of_other_sizes_are_refused(index: int, value: Any) -> None:
    arguments = packed(nn.LSTM, 3, 3, 1)
    arguments[index] = value
    with pytest.raises(ValueError):
        check("aten.lstm.data", tuple(arguments), {})


def ctc(targets: Tensor, steps: Any = (5, 4), sizes: Any = (3, 2), blank: int = 0) -> tuple[Any, ...]:
    return torch.rand(5, 2, 4).log_softmax(-1), targets, steps, sizes, blank


def average(**changed: Any) -> dict[str, Any]:
    names = ("running_min", "running_max", "scale")
    given = {name: torch.rand(3) for name in names} | {"zero_point": torch.zeros(3, dtype=torch.int32)}
    switches = {name: whole(1) for name in ("observer_on", "fake_quant_on")}
    numbers = {"averaging_const": 0.1, "quant_min": 0, "quant_max": 255, "ch_axis": 0, "per_row_fake_quant": True}
    return {"self": torch.rand(3, 4), **given, **switches, **numbers, **changed}


FITTING: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    (PACK, (torch.rand(4, 3, 2), whole(4, 2, 1), False), {}),
    (PACK, (torch.rand(3, 4, 2), whole(4, 2, 1), True), {}),
    (PAD, (torch.rand(6, 2), whole(3, 2, 1), False, 0.0, 0), {}),
    (CTC, ctc(torch.tensor([[1, 2, 3], [3, 1, -1]])), {}),  # padding is not read
    (CTC, ctc(whole(1, 2, 3, 3, 1)), {}),
    (CTC, (torch.rand(5, 4), whole(1, 2), (5,), (2,)), {}),
    ("aten.ctc_loss.Tensor", ctc(whole(1, 2, 3, 3, 1), whole(5, 4), whole(3, 2)), {}),
    (RENORM, (torch.rand(4, 2), torch.tensor([[0, 3]]), 1.0, 2.0), {}),
    (BY_TENSOR, (torch.rand(4), torch.rand(1), whole(0).int(), 0, 255), {}),
    (BY_CHANNEL, (torch.rand(4, 3), torch.rand(3), torch.zeros(3), 1, 0, 255), {}),
    (LEARNABLE, (torch.rand(4, 3), torch.rand(3), torch.zeros(3), 1, 0, 255, 1.0), {}),
    (AVERAGE, (), average()),
    (POISSON, (torch.tensor([0.0, 3.0]),), {}),
    (BINOMIAL, (torch.tensor([0.0, 3.0]), torch.tensor([0.5, math.nan])), {}),
    ("aten.add.out", (torch.rand(4, 1), torch.rand(3)), {"out": torch.rand(4, 3)}),
    ("aten.div.out", (torch.rand(4), 2.0), {"out": torch.rand(4)}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), FITTING)
def test_let_through(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check(name, args, kwargs)
    resolve(name)(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        (PACK, (torch.rand(4, 3, 2), whole(1 << 40, 2, 1), False), {}),
        (PACK, (torch.rand(4, 3, 2), whole(4, 2), False), {}),
        (PACK, (torch.rand(4), whole(4), False), {}),
        (PAD, (torch.rand(6, 2), whole(), False, 0.0, 0), {}),
        (PAD, (torch.rand(7, 2), whole(1, 5, 1), False, 0.0, 0), {}),
        (PAD, (torch.rand(()), whole(1), False, 0.0, 0), {}),
        (CTC, ctc(torch.tensor([[1, 2, 4], [3, 1, 0]])), {}),
        (CTC, ctc(torch.tensor([[1, 2, 3], [3, -1, 0]])), {}),
        (CTC, ctc(whole(1, 2, 3, 3)), {}),
        (CTC, ctc(torch.tensor([[1, 2], [3, 1]])), {}),
        (CTC, ctc(torch.tensor([[1, 2, 3]])), {}),
        (CTC, ctc(whole(1, 2, 3, 3, 1), (5, 6)), {}),
        (CTC, ctc(whole(1, 2, 3, 3, 1), (5, -1)), {}),
        (CTC, ctc(whole(1, 2, 3, 3, 1), sizes=(7, -2)), {}),
        (CTC, ctc(whole(1, 2, 3, 3, 1), sizes=(3,)), {}),
        (CTC, ctc(whole(1, 2, 3, 3, 1), blank=4), {}),
        (CTC, ctc(torch.rand(5)), {}),
        ("aten.ctc_loss.Tensor", ctc(whole(1, 2, 3, 3, 1), whole(5, 1 << 40), whole(3, 2)), {}),
        (RENORM, (torch.rand(4, 2), torch.tensor([4]), 1.0, 2.0), {}),
        (RENORM, (torch.rand(4, 2), torch.tensor([-1]), 1.0, 2.0), {}),
        (BY_TENSOR, (torch.rand(4), torch.rand(0), whole(0).int(), 0, 255), {}),
        (BY_TENSOR, (torch.rand(4), torch.rand(1), whole(0), 0, 255), {}),
        (BY_CHANNEL, (torch.rand(4, 3), torch.rand(2), torch.zeros(2), 1, 0, 255), {}),
        (BY_CHANNEL, (torch.rand(4, 3), torch.rand(3), torch.zeros(3), 2, 0, 255), {}),
        (LEARNABLE, (torch.rand(4, 3), torch.rand(0), torch.zeros(3), 1, 0, 255, 1.0), {}),
        (AVERAGE, (), average(scale=torch.rand(1))),
        (AVERAGE, (), average(running_min=torch.rand(0))),
        (AVERAGE, (), average(zero_point=torch.zeros(3))),
        (AVERAGE, (), average(observer_on=whole())),
        (AVERAGE, (), average(ch_axis=2)),
        (POISSON, (torch.tensor([math.nan]),), {}),
        (POISSON, (torch.tensor([-1.0]),), {}),
        (BINOMIAL, (torch.tensor([math.nan]), torch.tensor([0.5])), {}),
        ("aten.add.out", (torch.rand(400), 2), {"out": torch.rand(1)}),
        ("aten.mul.out", (torch.rand(4), torch.rand(4, 1)), {"out": torch.rand(4)}),
    ],
)
def test_refused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        check(name, args, kwargs)
