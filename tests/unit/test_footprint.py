"""What a replay and its backward take, beside what torch's profiler saw them allocate."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backhaul.demo.model import Block
from backhaul.demo.peak_memory import live_bytes
from backhaul_runtime.replay.replay import Replay
from backhaul_runtime.replay.schedule import Footprint
from unit.test_recorder import record


class Slices(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sum(x[:, i : i + 16].sin() * x.exp().mean() for i in range(0, 64, 16))  # type: ignore[return-value]


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


class SavesItsOutput(nn.Module):
    """What comes first takes the most in backward, when the output still lives."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x, x, x]).sin().view(4, *x.shape).sum(0).exp()


class ReturnsItsInput(nn.Module):
    """Uses of an output have gradients beside that of the request."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, y.cos() * y.exp() * y


class WithoutGradients(nn.Module):
    """Most of it takes no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = torch.cat([x, x, x, x]).cos().view(4, *x.shape).sum(0)
        return (x * mask).sin()


MODELS: list[Callable[[], nn.Module]] = [
    lambda: Block(64, 0.1),
    lambda: nn.TransformerEncoderLayer(64, 2, 256, batch_first=True),
    lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
    lambda: nn.Sequential(nn.Linear(64, 128), nn.GLU(), nn.Softmax(-1), nn.Tanh()),
    Slices,
    Squares,
    SavesItsOutput,
    ReturnsItsInput,
    WithoutGradients,
]


def seen(module: nn.Module, x: Tensor) -> tuple[Footprint, Footprint, int]:
    """As it was measured, as it was allocated, and the bound by the program."""
    recorder, program = record(module, x)
    assert program is not None
    sources, states = [source.value for source in recorder.recording.sources], recorder.recording.generator_states
    kept: list[Replay] = []
    events = live_bytes(lambda: kept.append(Replay(program, sources, states, is_own=True, is_measured=True)))
    replay, measured = max(live for _, live in events), kept[0].footprint
    assert measured is not None
    gradients = {0: torch.ones(kept[0]._outputs[0].shape)}
    taken: list[object] = []
    backward = max(live for _, live in live_bytes(lambda: taken.append(kept[0].backward(gradients))))
    need = program.execution_bytes([source.layout.gradient_bytes for source in recorder.recording.sources])
    return measured, Footprint(replay, events[-1][1], events[-1][1] + backward), need


@pytest.mark.parametrize("build", MODELS)
def test_no_less_is_measured_than_is_allocated_and_little_more(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 64, requires_grad=True)
    measured, allocated, need = seen(build(), x)
    slack = 1024  # the profiler counts scalars
    assert allocated.replay_bytes - slack <= measured.replay_bytes <= allocated.replay_bytes * 1.05
    assert allocated.ready_bytes - slack <= measured.ready_bytes <= allocated.ready_bytes * 1.05
    assert allocated.backward_bytes - slack <= measured.backward_bytes <= allocated.backward_bytes * 1.5
    assert measured.execution_bytes <= need


def test_nothing_is_measured_unless_it_is_asked_for() -> None:
    x = torch.randn(4, requires_grad=True)
    _, program = record(torch.sin, x)
    assert program is not None
    assert Replay(program, [x.detach()], [], is_own=True).footprint is None
