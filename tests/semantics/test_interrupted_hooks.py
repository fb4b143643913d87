"""Ctrl-C where a saved-tensor hook would be taken off: what the caller trains afterwards is not affected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul import Session
from backhaul_runtime.torch_internals.private import top_saved_tensor_hooks
from support.bits import differing


def gradients(checkpoint: Callable[..., Any]) -> list[Tensor | None]:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    checkpoint(layer, checkpoint(layer, x).sin().exp()).square().sum().backward()
    return [x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("number", range(4))
def test_a_hook_that_was_left_changes_nothing(
    number: int, session: Session, returns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupts the exit of one context of hooks of a call: of its inside, or of one of its grafts."""
    plain = gradients(lambda function, x: function(x))
    own, exits = torch.autograd.graph.saved_tensors_hooks.__exit__, []

    def interrupted(self: Any, *args: object) -> None:
        exits.append(self)
        if len(exits) == 1 + number:
            raise KeyboardInterrupt
        own(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.graph.saved_tensors_hooks, "__exit__", interrupted)
        try:
            gradients(lambda function, x: session.checkpoint(function, x, returns=returns))
        except KeyboardInterrupt:
            assert len(exits) == 1 + number
    assert differing(gradients(lambda function, x: function(x)), plain) == []
    assert top_saved_tensor_hooks(True) is None
    assert differing(gradients(lambda function, x: session.checkpoint(function, x, returns=returns)), plain) == []
