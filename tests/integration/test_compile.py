"""torch.compile around a checkpointed call, and inside one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.bits import differing
from support.loopback import Loopback

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns itself while it compiles


@pytest.mark.slow
def test_a_graph_breaks_cleanly_around_a_segment(loopback: Loopback) -> None:
    layers, graphs = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    def step(x: Tensor) -> Tensor:
        return loopback.checkpoint(layers, x.cos()).sin()

    x = torch.randn(4, 8, requires_grad=True)
    wanted = [x, *layers.parameters()]
    expected = torch.autograd.grad(layers(x.cos()).sin().sum(), wanted)
    ours = torch.autograd.grad(torch.compile(step, backend=backend)(x).sum(), wanted)
    assert differing(ours, expected) == []
    assert len(graphs) == 2
    assert loopback.report().remote == 1


@pytest.mark.slow
@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_compiled_code_inside_a_segment_keeps_its_activations(returns: str, loopback: Loopback) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    compiled = torch.compile(layers, backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    wanted = [x, *layers.parameters()]
    expected = torch.autograd.grad((compiled(x) * 2).sum(), wanted)
    checkpointed = loopback.checkpoint(lambda x: compiled(x) * 2, x, returns=returns)
    assert differing(torch.autograd.grad(checkpointed.sum(), wanted), expected) == []
    (segment,) = loopback.report().segments
    assert list(segment.kept) == ["the custom autograd function CompiledFunction"]
