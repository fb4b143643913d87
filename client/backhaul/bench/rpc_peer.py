"""Remote recomputation in the fewest lines of torch.distributed.rpc.

`python -m backhaul.bench.rpc_peer PORT` is the peer. It has the block's weights already, checks nothing, and survives
nothing; its block is frozen and without dropout.
"""

import os
import socket
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from backhaul.bench.training import WIDTH
from backhaul.demo.model import Block

PEER, TRAINER = 0, 1
_names = {PEER: "peer", TRAINER: "trainer"}
_SEED = 0
_block: list[nn.Module] = []


def frozen_block() -> nn.Module:
    """The same on both sides."""
    torch.manual_seed(_SEED)
    return Block(WIDTH, dropout=0.0).requires_grad_(False)


def backward(x: Tensor, gradient: Tensor) -> Tensor:
    """On the peer: recomputes the block and runs its backward."""
    if not _block:
        _block.append(frozen_block())
    x = x.requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(_block[0](x), x, gradient)
    return found


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, block: nn.Module, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (x,) = context.saved_tensors
        return None, rpc.rpc_sync(_names[PEER], backward, (x.detach(), gradients[0]))


def checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    """Runs the block here and recomputes it on the peer."""
    return _Remote.apply(block, x)  # type: ignore[no-any-return, no-untyped-call]


def join(port: int, rank: int) -> None:
    """Connects both; returns when both are there."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=2)
    rpc.init_rpc(_names[rank], rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def leave() -> None:
    """Ends both."""
    rpc.shutdown()


def free_port() -> int:
    """A port of this host that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(os.getpid(), flush=True)
    join(int(sys.argv[1]), PEER)
    leave()
