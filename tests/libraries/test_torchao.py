"""Frozen weights that torchao has quantised travel as the tensors in them: the worker knows nothing of torchao."""

import importlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

import backhaul
from backhaul import Decision, Session
from backhaul._backend import backend
from conftest import QUIET
from support.bits import plainly, same_bits
from support.loopback import Loopback
from support.processes import WorkerProcess

quantization = pytest.importorskip("torchao.quantization")
nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

WIDTH, STEPS = 64, 6
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def int8(model: nn.Module) -> None:
    # Its settings of Inductor are those of one process, and a worker has others.
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(set_inductor_config=False))


def float8(model: nn.Module) -> None:
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig(set_inductor_config=False))


def int4(model: nn.Module) -> None:
    four = torch.int4  # type: ignore[attr-defined]
    config = quantization.IntxWeightOnlyConfig(weight_dtype=four, granularity=quantization.PerGroup(32))
    quantization.quantize_(model, config)


FORMS = pytest.mark.parametrize("quantise", [int8, float8, int4])


class Block(nn.Module):
    """Two frozen layers with adapters."""

    def __init__(self, quantise: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.base.to(torch.bfloat16).requires_grad_(False)
        quantise(self.base)
        self.adapters = nn.ParameterList([torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / 16 for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        first, activation, second = self.base
        x = activation(first(x) + x @ self.adapters[0])
        out: Tensor = second(x) + x @ self.adapters[1]
        return out


def trained(checkpoint: Callable[..., Any], quantise: Callable[[nn.Module], None], **options: Any) -> list[Any]:
    """Outputs and gradients of some steps."""
    torch.manual_seed(0)
    block, results = Block(quantise), list[Any]()
    optimizer = torch.optim.SGD(block.adapters, lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        y = checkpoint(block, x, **options)
        y.float().square().sum().backward()
        results += [
            y.detach(),
            x.grad,
            *[adapter.grad.clone() for adapter in block.adapters if adapter.grad is not None],
        ]
        optimizer.step()
        optimizer.zero_grad()
    return results


@FORMS
@pytest.mark.parametrize("graphs", ["off", "eager"])
def test_quantised_weights_travel(graphs: str, quantise: Callable[[nn.Module], None], session: Session) -> None:
    same_bits(trained(session.checkpoint, quantise, graphs=graphs), trained(plainly, quantise))
    (segment,) = session.report().segments
    assert segment.decisions == {Decision.GRADIENTS: STEPS}, session.report()
    assert segment.known == (STEPS - 3 if graphs == "eager" else 0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler, g++")
@FORMS
def test_quantised_weights_with_inductors_kernels(quantise: Callable[[nn.Module], None]) -> None:
    remote = Loopback()
    compiled: dict[bool, Any] = {}

    def run(is_ours: bool) -> Callable[..., Any]:
        compiled.clear()

        def call(block: nn.Module, x: Tensor) -> Any:
            if is_ours not in compiled:
                own: dict[str, Any] = {"backend": backend, "options": {"kernels": "inductor"}}
                compiled[is_ours] = torch.compile(block, dynamic=False, **(own if is_ours else {}))
            return remote.checkpoint(compiled[is_ours], x) if is_ours else compiled[is_ours](x)

        return call

    same_bits(trained(run(is_ours=True), quantise), trained(run(is_ours=False), quantise))
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.GRADIENTS: STEPS}, remote.report()


class QLoRA(nn.Module):
    """A layer of four bits whose product is a custom function of torchao."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nf4.to_nf4(torch.randn(WIDTH, WIDTH), 64, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.sin(), self.weight).tanh()


class Dequantised(QLoRA):
    """The same without the custom function."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight.to(x.dtype)
        return F.linear(x.sin(), weight).tanh()


def gradient(checkpoint: Callable[..., Any], kind: type[nn.Module]) -> list[Tensor]:
    torch.manual_seed(0)
    block, x = kind(), torch.randn(4, WIDTH, requires_grad=True)
    return list(torch.autograd.grad(checkpoint(block, x).square().sum(), x))


def test_four_bits_of_nf4_travel(session: Session) -> None:
    same_bits(gradient(session.checkpoint, Dequantised), gradient(plainly, Dequantised))
    assert session.report().remote == 1, session.report()


def test_a_custom_function_is_named(session: Session) -> None:
    same_bits(gradient(session.checkpoint, QLoRA), gradient(plainly, QLoRA))
    (segment,) = session.report().segments
    assert all("LinearNF4" in reason and "--allow torchao" in reason for reason in segment.kept), segment.kept


@pytest.fixture(scope="module")
def allowing() -> Iterator[WorkerProcess]:
    """A worker whose operator allows torchao."""
    with WorkerProcess("--memory", "2GiB", "--allow", "torchao") as process:
        yield process


def test_a_worker_that_allows_torchao_gets_the_same(allowing: WorkerProcess) -> None:
    with backhaul.connect(allowing.address, settings=QUIET) as session:
        same_bits(trained(session.checkpoint, float8), trained(plainly, float8))
        assert session.report().remote == STEPS, session.report()
