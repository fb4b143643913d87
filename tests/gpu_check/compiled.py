"""Compiled segments: the bits, what a known call costs the host, and Inductor's kernels on both sides."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from backhaul import Session
from backhaul._backend import backend
from gpu_check.layer import Llama
from gpu_check.models import LOW
from gpu_check.results import DEVICE, IS_REAL, guarded, make_deterministic, note, sized, synchronize
from gpu_check.workers import connect, worker
from support.bits import differing, plainly

LAYERS, STEPS = 3, 4
WAIT_S = 100.0 if IS_REAL else 900.0
"""Seconds within which a worker compiles a program."""

Run = Callable[..., Any]
_FLEX_WIDTH, _FLEX_LENGTH, _FLEX_HEADS = sized(4096, 64), sized(2048, 16), sized(32, 4)


def _llama() -> nn.Module:
    return Llama(sized(4096, 64), sized(32, 4), sized(8, 2), sized(14336, 128))


def run() -> None:
    """Compares steps with eager kernels and with Inductor's, with and without autocast."""
    make_deterministic()
    for name, is_autocast in (("plain", False), ("autocast", True)):
        with guarded(f"eager kernels, {name}"), worker() as process, connect(process) as session:
            eager, took = steps(plainly, is_autocast=is_autocast)
            mine, took_known = steps(partial(session.checkpoint, graphs="eager"), is_autocast=is_autocast)
            report = session.report()
            known = sum(segment.known for segment in report.segments)
            note(
                f"eager kernels, {name}",
                not differing(eager, mine) and known > 0 and not report.fallbacks,
                differing=len(differing(eager, mine)),
                known=known,
                fallbacks=report.fallbacks,
                eager_forward_ms=took,
                known_forward_ms=took_known,
            )
    with worker("--compile") as process, connect(process) as session:
        for name, is_autocast in (("plain", False), ("autocast", True)):
            with guarded(f"Inductor, {name}"):
                inductor(session, name, is_autocast=is_autocast)
        with guarded("flex_attention, eager kernels"):
            flex(session)


class Flex(nn.Module):
    """Attention over packed documents, with a bias that depends on the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(_FLEX_WIDTH, 3 * _FLEX_WIDTH)
        self.documents = torch.arange(_FLEX_LENGTH, device=DEVICE) // (_FLEX_LENGTH // 4)
        self.mask = create_block_mask(self.is_seen, 1, None, _FLEX_LENGTH, _FLEX_LENGTH, device=DEVICE)

    def is_seen(self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Whether a row attends to a column."""
        return (row >= column) & (self.documents[row] == self.documents[column])

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (_FLEX_HEADS, -1)).transpose(1, 2) for part in self.projection(x).chunk(3, -1)]
        biased = lambda score, batch, head, row, column: score - (row - column) * 0.01  # noqa: E731
        y = flex_attention(parts[0], parts[1], parts[2], score_mod=biased, block_mask=self.mask)
        assert isinstance(y, Tensor)
        return x + y.transpose(1, 2).flatten(-2)


def flex(session: Session) -> None:
    """flex_attention with eager kernels and with Inductor's, where torch trains with it: on a GPU."""
    if not IS_REAL:
        return
    recorded = steps(partial(session.checkpoint, graphs="off"), is_autocast=False, layer=Flex)[0]
    eager = steps(plainly, is_autocast=False, layer=Flex)[0]
    remote, reasons = session.report().remote, [one for segment in session.report().segments for one in segment.reasons]
    note("flex_attention, eager kernels", not differing(eager, recorded) and remote > 0, remote=remote, reasons=reasons)
    with guarded("Inductor, flex_attention"):
        inductor(session, "flex_attention", is_autocast=False, layer=Flex)


def inductor(session: Session, name: str, *, is_autocast: bool, layer: Callable[[], nn.Module] = _llama) -> None:
    """Compares steps with Inductor's kernels until a worker computes them."""
    reference, took = steps(by_inductor(plainly, "inductor", {}), is_autocast=is_autocast, layer=layer)
    compiled = by_inductor(session.checkpoint, backend, {"options": {"kernels": "inductor"}})
    deadline, remote, right = time.monotonic() + WAIT_S, 0, True
    while remote < LAYERS * STEPS and right and time.monotonic() < deadline:  # meanwhile the trainer recomputes
        before = session.report().remote
        mine, took_known = steps(compiled, is_autocast=is_autocast, layer=layer)
        remote, right = session.report().remote - before, not differing(reference, mine)
    note(
        f"Inductor, {name}",
        right and remote == LAYERS * STEPS,
        differing=len(differing(reference, mine)),
        remote=remote,
        reasons=[reason for segment in session.report().segments for reason in segment.reasons],
        compiled_forward_ms=took,
        known_forward_ms=took_known,
    )


def by_inductor(checkpoint: Run, compiler: Any, options: dict[str, Any]) -> Run:
    """Compiles each block once, and runs it by `checkpoint`."""
    compiled: dict[nn.Module, Any] = {}

    def call(block: nn.Module, x: Tensor) -> Any:
        if block not in compiled:
            compiled[block] = torch.compile(block, backend=compiler, dynamic=False, **options)
        return checkpoint(compiled[block], x)

    return call


def steps(checkpoint: Run, *, is_autocast: bool, layer: Callable[[], nn.Module] = _llama) -> tuple[list[Tensor], float]:
    """Gradients of some steps, and the least milliseconds that the host needs for the forward of a layer."""
    torch.manual_seed(0)
    width, length = sized(4096, 64), sized(2048, 16)
    dtype = torch.float32 if is_autocast else LOW
    layers = nn.ModuleList(layer() for _ in range(LAYERS)).to(DEVICE, dtype)
    kept, least_ms = list[Tensor](), float("inf")
    for step in range(STEPS):
        torch.manual_seed(step + 1)
        x = torch.randn(1, length, width, device=DEVICE, dtype=dtype, requires_grad=True)
        synchronize()
        began = time.perf_counter()
        with torch.autocast(torch.empty(0, device=DEVICE).device.type, torch.bfloat16, enabled=is_autocast):
            y = x * 1.0
            for one in layers:
                y = checkpoint(one, y)
        least_ms = min(least_ms, (time.perf_counter() - began) / LAYERS * 1e3)
        y.float().square().mean().backward()
        assert x.grad is not None
        kept += [x.grad.cpu(), *[p.grad.cpu() for p in layers.parameters() if p.grad is not None]]
        layers.zero_grad()
    return kept, least_ms
