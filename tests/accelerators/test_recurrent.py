"""Recurrent layers on CUDA, whose dropout cuDNN draws from a state of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from support.loopback import Loopback


def run(cell: nn.Module, loopback: Loopback) -> str:
    """Returns why a checkpointed call of the layer is not a program, or nothing."""
    x = torch.randn(3, 2, 4, device="cuda", requires_grad=True)
    loopback.checkpoint(lambda x: cell(x)[0], x).sum().backward()
    (segment,) = loopback.report().segments
    return " ".join((*segment.reasons, *segment.kept))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_stays_on_the_trainer(layer: Callable[..., nn.Module], loopback: Loopback) -> None:
    assert "dropout between its layers" in run(layer(4, 4, num_layers=2, dropout=0.5).cuda(), loopback)
