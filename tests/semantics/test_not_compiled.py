"""What does not become a compiled program. Nothing here compiles, so no C++ compiler is needed."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from backhaul._forward.captured_graph import CallKind, CapturedGraph, GraphCall
from backhaul._forward.compiled_graph import compiled_segment
from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.program import Node, ResultRef, SourceRef
from backhaul_runtime.replay.compiled_programs import why_not_compiled, why_not_for_others
from conftest import wait_until
from support.bits import seed_generators
from support.hostile import of_nodes
from support.processes import is_running


def _batch_norm(x: Tensor, state: Tensor) -> Tensor:
    return functional.batch_norm(x.sin(), state, torch.ones(4), training=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, state: x * state.add_(1),
        lambda x, state: x.mul_(2) * state,
        lambda x, state: x * state[:2].zero_().sum(),
        lambda x, state: x * state.copy_(torch.rand(4)),
        _batch_norm,
    ],
)
def test_what_writes_has_written_nothing_when_it_is_refused(function: Callable[..., Any]) -> None:
    # The call itself runs afterwards, and must find its inputs as they were.
    x, state = torch.randn(3, 4, requires_grad=True) * 1, torch.ones(4)
    graph = CapturedGraph(lambda *inputs: (function(*inputs),), "function", (0, 1), {})
    kind, history = graph.kind_of([x, state]), x.grad_fn
    assert isinstance(kind, CallKind)
    seed_generators(0)
    expected = torch.rand(1)
    seed_generators(0)

    with pytest.raises(Refusal, match="writes to memory"):
        compiled_segment(GraphCall(graph, [x, state]), kind)

    assert torch.equal(state, torch.ones(4))
    assert x.grad_fn is history
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("op", ["as_strided", "as_strided_copy"])
def test_no_op_reaches_beyond_its_memory(op: str) -> None:
    # Compiled code takes the sizes and strides as they are, so a worker would send what lies next to the tensor.
    sine = Node("aten.sin.default", (SourceRef(0),), (), 0, (16,), draws=False)
    beyond = Node(f"aten.{op}.default", (ResultRef(0, 0), (1000,), (1,), 0), (), 0, (4000,), draws=False)
    assert "offset from the start of a storage" in why_not_compiled(of_nodes(sine, beyond))


@pytest.mark.parametrize("op", ["embedding.default", "gather.default", "cross_entropy_loss.default"])
def test_only_the_trainers_own_worker_compiles_what_takes_indices(op: str) -> None:
    indexing = of_nodes(Node(f"aten.{op}", (SourceRef(0), SourceRef(1)), (), 0, (16,), draws=False), sources=2)
    assert "would end the worker" in why_not_for_others(indexing)
    assert not why_not_compiled(indexing)


def test_a_compilation_ends_with_its_worker() -> None:
    # The program is still awaited, so nothing else would end it.
    awaited, program = os.pipe()
    start = """
import os, subprocess, sys
command = [sys.executable, "-m", "backhaul_server.worker.compile_program", "cpu", "", "60", str(16 << 30)]
compilation = subprocess.Popen([*command, str(os.getpid())], stdin=0, start_new_session=True)
print(compilation.pid, flush=True)
compilation.wait()
"""
    with subprocess.Popen([sys.executable, "-c", start], stdin=awaited, stdout=subprocess.PIPE, text=True) as worker:
        os.close(awaited)
        assert worker.stdout is not None
        compilation = int(worker.stdout.readline())
        worker.kill()
    wait_until(lambda: not is_running(compilation), "the compilation has ended")
    os.close(program)
