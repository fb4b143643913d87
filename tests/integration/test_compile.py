"""torch.compile around a checkpointed call, and inside one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul._backend import backend
from backhaul._torch_api.wrap import SegmentModule, wrap
from support.bits import differing
from support.compiled import WIDTH, Block
from support.loopback import Loopback

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns itself while it compiles


@pytest.fixture
def named_backend() -> None:
    """Registers the backend where the installed package is older than its entry point."""
    if "backhaul" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(backend, name="backhaul")


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


@pytest.mark.slow
def test_wrapped_modules_can_be_compiled(loopback: Loopback, named_backend: None) -> None:
    plain, wrapped = (nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()).eval() for _ in range(2))
    wrapped.load_state_dict(plain.state_dict())
    wrap(wrapped, Block, loopback.checkpoint)
    wrapped[1].compile(backend="backhaul", fullgraph=True)
    x = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(3):
        expected = torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])
        assert differing(torch.autograd.grad(wrapped(x).sum(), [x, *wrapped.parameters()]), expected) == []
    (segment,) = loopback.report().segments
    assert (segment.calls, segment.known) == (3, 2)
    assert list(wrapped.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({"fullgraph": True}, {"fullgraph": True, "backend": "backhaul", "options": {"kernels": "inductor"}}),
        ({"mode": "max-autotune"}, {"mode": "max-autotune", "backend": "inductor"}),
        ({"backend": "aot_eager"}, {"backend": "aot_eager"}),
    ],
)
def test_inductor_compiles_wrapped_modules_for_workers_too(given: dict[str, Any], means: dict[str, Any]) -> None:
    compiled: list[dict[str, Any]] = []

    class Noting(nn.Module):
        def compile(self, *args: Any, **kwargs: Any) -> None:
            compiled.append(kwargs)

    SegmentModule(Noting(), lambda *_: None).compile(**given)
    assert compiled == [means]
