"""Tensors that ops save without writing them, as attention and cuDNN do on CUDA: emulated on the CPU."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from backhaul import CheckpointError
from backhaul_runtime.program.undefined_saves import undefined_saves
from backhaul_runtime.record.saved_tensors import SavedTensorRecorder
from backhaul_runtime.replay.saved_tensors import SavedTensorPacker
from support.loopback import Loopback

SDPA = torch.ops.aten.scaled_dot_product_attention.default
QUERY = torch.ones(1, 1, 4, 8)
PHILOX = {
    "flash: rng_state": lambda number: torch.full((2,), number, dtype=torch.uint64),
    "efficient, cuDNN: seed": lambda number: torch.tensor(number, dtype=torch.int64),
}
UNUSED: Callable[[int], Tensor] = lambda number: torch.tensor(number, dtype=torch.uint64)  # noqa: E731
RESERVE: Callable[[int], Tensor] = lambda number: torch.full((64,), number, dtype=torch.uint8)  # noqa: E731


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[int], Tensor]], None]:
    """Makes an op save one more tensor, with other contents each time, in forward and in each replay."""

    def also(op: str, make: Callable[[int], Tensor]) -> None:
        numbers = count(1)
        record, replay = SavedTensorRecorder.add, SavedTensorPacker.__call__

        def add(self: SavedTensorRecorder, tensor: Tensor) -> None:
            record(self, tensor)
            if self._call.op.name.startswith(op):
                record(self, make(next(numbers)))

        def pack(self: SavedTensorPacker, tensor: Tensor) -> object:
            saved = replay(self, tensor)
            if self.op.startswith(op):
                replay(self, make(next(numbers)))
            return saved

        monkeypatch.setattr(SavedTensorRecorder, "add", add)
        monkeypatch.setattr(SavedTensorPacker, "__call__", pack)

    return also


def attention(x: Tensor, dropout_p: float = 0.0) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p)


def gradient(loopback: Loopback, function: Callable[..., Tensor], *args: object) -> Tensor | None:
    """Returns the gradient if a worker computed it."""
    x = QUERY.clone().requires_grad_()
    loopback.checkpoint(function, x, *args, returns="gradients").sum().backward()
    assert loopback.report().fallbacks == 0
    return x.grad


@pytest.mark.parametrize("make", [*PHILOX.values(), UNUSED], ids=[*PHILOX, "flash: unused"])
def test_seeds_of_attention_without_dropout_are_not_compared(
    saves: Callable[..., None], loopback: Loopback, make: Callable[[int], Tensor]
) -> None:
    saves("aten.scaled_dot_product_attention", make)
    assert gradient(loopback, attention) is not None


@pytest.mark.parametrize("make", PHILOX.values(), ids=PHILOX)
def test_seeds_of_attention_with_dropout_are_compared(
    saves: Callable[..., None], loopback: Loopback, make: Callable[[int], Tensor]
) -> None:
    saves("aten.scaled_dot_product_attention", make)
    with pytest.raises(CheckpointError, match="scaled_dot_product_attention"):
        gradient(loopback, attention, 0.1)


def test_what_nothing_writes_is_not_compared_with_dropout_either(
    saves: Callable[..., None], loopback: Loopback
) -> None:
    saves("aten.scaled_dot_product_attention", UNUSED)
    assert gradient(loopback, attention, 0.1) is not None


def test_the_rest_of_what_attention_saves_is_compared(saves: Callable[..., None], loopback: Loopback) -> None:
    saves("aten.scaled_dot_product_attention", lambda number: torch.full((1, 1, 4), float(number)))
    with pytest.raises(CheckpointError, match="scaled_dot_product_attention"):
        gradient(loopback, attention)


@pytest.mark.parametrize(("op", "layer"), [("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn_tanh", nn.RNN)])
def test_workspaces_of_recurrent_layers_are_not_compared(
    saves: Callable[..., None], loopback: Loopback, op: str, layer: Callable[..., nn.Module]
) -> None:
    cell = layer(8, 8)
    saves(f"aten.{op}", RESERVE)
    assert gradient(loopback, lambda x: cell(x[0])[0]) is not None


def test_outputs_of_recurrent_layers_are_compared(saves: Callable[..., None], loopback: Loopback) -> None:
    cell = nn.LSTM(8, 8)
    saves("aten.lstm", lambda number: torch.full((4,), float(number)))
    with pytest.raises(CheckpointError, match="lstm"):
        gradient(loopback, lambda x: cell(x[0])[0])


def test_the_reserve_of_batch_norm_is_not_compared(saves: Callable[..., None], loopback: Loopback) -> None:
    norm = nn.BatchNorm2d(1)
    saves("aten.batch_norm", RESERVE)
    assert gradient(loopback, norm) is not None


def bags(loopback: Loopback, last: bool) -> Tensor | None:
    weight, indices, offsets = torch.ones(3, 2, requires_grad=True), torch.tensor([0, 1, 2, 1]), torch.tensor([0, 2, 4])

    def function(weight: Tensor) -> Tensor:
        return nn.functional.embedding_bag(indices, weight, offsets, include_last_offset=last)

    loopback.checkpoint(function, weight, returns="gradients").sum().backward()
    assert loopback.report().fallbacks == 0
    return weight.grad


def test_sizes_of_bags_are_not_compared_with_a_last_offset(saves: Callable[..., None], loopback: Loopback) -> None:
    saves("aten.embedding_bag", lambda number: torch.tensor([2, 2, number]))
    assert bags(loopback, last=True) is not None


def test_sizes_of_bags_are_compared_without_one(saves: Callable[..., None], loopback: Loopback) -> None:
    saves("aten.embedding_bag", lambda number: torch.tensor([2, 2, number]))
    with pytest.raises(CheckpointError, match="embedding_bag"):
        bags(loopback, last=False)


def test_undefined_tensors_do_not_drift_on_other_hardware(saves: Callable[..., None]) -> None:
    saves("aten.scaled_dot_product_attention", UNUSED)
    assert gradient(Loopback(records_choices=True), attention) is not None


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ((QUERY, QUERY, QUERY), {}, True),
        ((QUERY, QUERY, QUERY, None, 0.0), {}, True),
        ((QUERY, QUERY, QUERY, None, 0.5), {}, False),
        ((QUERY, QUERY, QUERY), {"dropout_p": 0.5}, False),
    ],
)
def test_dropout_is_found_among_the_arguments(
    arguments: tuple[object, ...], options: dict[str, object], expected: bool
) -> None:
    is_undefined = undefined_saves(SDPA, arguments, options)
    assert is_undefined(torch.tensor(1)) == expected
    assert not is_undefined(torch.zeros(2))
    assert not is_undefined(torch.zeros(3, dtype=torch.int64))
