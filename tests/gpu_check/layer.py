"""What recording, sending and recomputing add to a layer of the size of Llama 3 8B."""

import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs

from gpu_check.models import LOW
from gpu_check.results import DEVICE, IS_REAL, ON_GPU, guarded, make_deterministic, note, sized, synchronize
from gpu_check.workers import connect, worker
from support.bits import Checkpoint, differing, plainly

LAYERS, REPEATS = 2, 4


class Norm(nn.Module):
    """RMS norm as in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Llama(nn.Module):
    """A layer of Llama 3 8B, without rotation of the positions."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.repeats, self.size = heads // groups, width // heads
        self.n1, self.n2 = Norm(width), Norm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        y = self.n1(x)
        q, k, v = (p(y).view(b, t, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(self.repeats, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, w))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def once(layers: nn.ModuleList, width: int, length: int, checkpoint: Checkpoint) -> dict[str, float]:
    """Milliseconds and megabytes of a step, for each layer."""
    torch.manual_seed(5)
    x = torch.randn(1, length, width, device=DEVICE, dtype=LOW, requires_grad=True)
    synchronize()
    base = 0
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    began = time.perf_counter()
    y = x * 1.0
    for layer in layers:
        y = checkpoint(layer, y)
    returned = time.perf_counter()
    synchronize()
    forwarded = time.perf_counter()
    y.float().square().mean().backward()
    synchronize()
    ended = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() - base if ON_GPU else 0
    return {
        "host_ms": (returned - began) * 1e3 / LAYERS,
        "forward_ms": (forwarded - began) * 1e3 / LAYERS,
        "backward_ms": (ended - forwarded) * 1e3 / LAYERS,
        "peak_MB": peak / 1e6,
    }


def measured(
    what: str, layers: nn.ModuleList, width: int, length: int, checkpoint: Checkpoint, **rest: Any
) -> list[Tensor]:
    """Notes the median of some steps after a first one. Returns the last gradients."""
    rows, gradients = [], list[Tensor]()
    for _ in range(REPEATS + 1 if IS_REAL else 2):
        layers.zero_grad(set_to_none=True)
        rows.append(once(layers, width, length, checkpoint))
        gradients = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    middle = {name: round(sorted(row[name] for row in rows[1:])[len(rows[1:]) // 2], 3) for name in rows[0]}
    first_ms = round(rows[0]["forward_ms"], 1)
    note(f"{what}, {length} tokens", None, **middle, first_forward_ms=first_ms, **rest)
    return gradients


def run() -> None:
    """Layers without checkpointing, with torch's, and with Backhaul's."""
    width = sized(4096, 64)
    make_deterministic()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        made = [Llama(width, sized(32, 4), sized(8, 2), sized(14336, 128)) for _ in range(LAYERS)]
    layers = nn.ModuleList(made).to(LOW)
    for length in (2048, 8192) if IS_REAL else (128,):
        with guarded(f"a layer, {length} tokens"):
            expected = measured("without checkpointing", layers, width, length, plainly)
            measured("torch's checkpoint", layers, width, length, partial(torchs, use_reentrant=False))
            with worker(memory="40GiB" if IS_REAL else "1GiB") as process:
                for returns in ("gradients", "activations"):
                    with connect(process, returns=returns) as session:
                        ours = measured(f"Backhaul, {returns}", layers, width, length, session.checkpoint)
                        wrong, report = differing(ours, expected), session.report()
                    ok = not wrong and not report.fallbacks
                    note(
                        f"Backhaul, {returns}, {length} tokens, equals",
                        ok,
                        differing=len(wrong),
                        fallbacks=report.fallbacks,
                    )
