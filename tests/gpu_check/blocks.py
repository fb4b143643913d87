"""Accumulation blocks, streams of the user's own, and optimizers that change parameters in one kernel."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from backhaul import Session
from gpu_check.gradients import train
from gpu_check.models import PLAIN, WIDTH, Mlp
from gpu_check.results import DEVICE, ON_GPU, guarded, make_deterministic, note, synchronize
from gpu_check.workers import connect, worker
from support.bits import Checkpoint, differing, plainly


def accumulated(session: Session | None) -> list[Tensor]:
    """Gradients of two steps of four micro-batches."""
    torch.manual_seed(0)
    model = nn.ModuleList(Mlp(0.1) for _ in range(3)).to(DEVICE)
    gradients: list[Tensor] = []
    for _ in range(2):
        with session.accumulate() if session is not None else nullcontext() as block:
            for number in range(4):
                torch.manual_seed(number)
                y = torch.randn(4, 16, WIDTH, device=DEVICE)
                for module in model:
                    y = module(y) if session is None else session.checkpoint(module, y)
                loss = y.square().mean()
                loss.backward() if block is None else block.backward(loss)
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients


def optimized(checkpoint: Checkpoint) -> list[Tensor]:
    """Gradients while a fused optimizer changes the parameters."""
    torch.manual_seed(0)
    model = nn.ModuleList(Mlp() for _ in range(2)).to(DEVICE)
    optimizer, kept = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), list[Tensor]()
    for number in range(4):
        torch.manual_seed(number)
        y = torch.randn(4, 16, WIDTH, device=DEVICE, requires_grad=True)
        for module in model:
            y = checkpoint(module, y)
        y.square().mean().backward()
        kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return kept


def on_own_stream(checkpoint: Checkpoint) -> list[Tensor]:
    """Gradients of a training on a stream that is not the default one."""
    with torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else nullcontext():
        kept = train(checkpoint, PLAIN["mlp, dropout"])
    synchronize()
    return kept


def run() -> None:
    """Compares each with the same without checkpointing."""
    make_deterministic()
    with worker() as process:
        with guarded("accumulation block"), connect(process) as session:
            wrong, fallbacks = differing(accumulated(session), accumulated(None)), session.report().fallbacks
            note("accumulation block", not wrong and not fallbacks, differing=len(wrong), fallbacks=fallbacks)
        compared: dict[str, Callable[[Checkpoint], list[Tensor]]] = {
            "a fused optimizer's changes are noticed": optimized,
            "a stream of the user's own": on_own_stream,
        }
        for name, training in compared.items():
            with guarded(name), connect(process, strict=True) as session:
                wrong = differing(training(partial(session.checkpoint)), training(plainly))
                note(name, not wrong, differing=len(wrong))
