"""A minimal remote recomputation with torch.distributed.rpc.

`python -m backhaul_lab.bench.rpc_peer PORT` is the peer. A segment's input, its weights and the RNG state are sent
while forward continues. In backward the peer recomputes the segment and returns all gradients. Nothing is checked and
no failure is handled.
"""

import itertools
import os
import socket
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.func import functional_call

from backhaul.demo.model import Block
from backhaul_lab.harness.training import DROPOUT, WIDTH

PEER, TRAINER = 0, 1
_names = {PEER: "peer", TRAINER: "trainer"}
_numbers = itertools.count()
_block: list[nn.Module] = []
_saved: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}


def save(number: int, x: Tensor, rng_state: Tensor, weights: list[Tensor]) -> None:
    """Runs on the peer. Stores the input, RNG state and weights of a segment."""
    _saved[number] = x, rng_state, weights


def backward(number: int, gradient: Tensor) -> list[Tensor]:
    """Runs on the peer. Recomputes a segment, runs its backward and returns the gradients of its input and weights."""
    if not _block:
        _block.append(Block(WIDTH, DROPOUT))
    x, rng_state, weights = _saved.pop(number)
    inputs = [tensor.requires_grad_() for tensor in (x, *weights)]
    names = [name for name, _ in _block[0].named_parameters()]
    torch.set_rng_state(rng_state)
    with torch.enable_grad():
        y = functional_call(_block[0], dict(zip(names, weights, strict=True)), (x,))
    return list(torch.autograd.grad(y, inputs, gradient))


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, block: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        context.number = next(_numbers)
        sent = context.number, x.detach(), torch.get_rng_state(), [weight.detach() for weight in weights]
        context.saved = rpc.rpc_async(_names[PEER], save, sent)
        return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context.saved.wait()
        return None, *rpc.rpc_sync(_names[PEER], backward, (context.number, gradients[0]))


def checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    """Runs a block in this process. Its recomputation and backward run on the peer."""
    return _Remote.apply(block, x, *block.parameters())  # type: ignore[no-any-return, no-untyped-call]


def join(port: int, rank: int) -> None:
    """Joins the RPC group. Returns once both processes have joined."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=2)
    rpc.init_rpc(_names[rank], rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def leave() -> None:
    """Leaves the RPC group. Returns once both processes leave."""
    rpc.shutdown()


def free_port() -> int:
    """Returns a port of this host that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(os.getpid(), flush=True)
    join(int(sys.argv[1]), PEER)
    leave()
