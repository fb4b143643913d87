"""Attention in each of torch's backends, and bytes that ops save and never write."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_check.gradients import compare_all
from gpu_check.models import ATTENTION, LOW
from gpu_check.results import DEVICE, IS_REAL, guarded, make_deterministic, note
from support.bits import plainly
from support.loopback import Loopback

BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


def gradients() -> None:
    """Gradients with each backend, through a worker."""
    compare_all(ATTENTION, ["default bf16", "efficient fp32"])


def dirty() -> None:
    """Leaves other bytes in memory that is free, as a training does."""
    for size in (8, 16, 512, 4096, 1 << 16, 1 << 20):
        junk = [torch.randint(1, 255, (size,), dtype=torch.uint8, device=device) for device in (DEVICE, "cpu")] * 24
        del junk


def unstable(function: Callable[[], object]) -> list[str]:
    """The tensors that an op saves with other bytes in each run."""
    runs: list[list[tuple[str, Tensor]]] = []
    for _ in range(3):
        dirty()
        torch.manual_seed(3)
        saved: list[Tensor] = []

        def pack(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function()
        runs.append([(f"{t.dtype}{list(t.shape)} on {t.device.type}", bytes_of(t)) for t in saved])
    first, *others = runs
    return [name for index, (name, data) in enumerate(first) if any(not torch.equal(data, o[index][1]) for o in others)]


def bytes_of(tensor: Tensor) -> Tensor:
    """Its content on the host."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).cpu().clone()


def replays(what: str, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Notes whether a replay saves what forward has saved, in memory with other bytes, and gives the same gradient."""
    with guarded(f"the digests of a replay are equal: {what}"):
        gradients_of = []
        loopback = Loopback()
        for checkpoint in (plainly, loopback.checkpoint):
            torch.manual_seed(3)
            leaf = x.detach().clone().requires_grad_()
            y = checkpoint(function, leaf)
            dirty()
            y.float().square().sum().backward()
            gradients_of.append(leaf.grad)
        one, other = gradients_of
        assert one is not None
        assert other is not None
        same = torch.equal(one, other)
        undefined = unstable(lambda: function(x.detach().clone().requires_grad_()))
        report = loopback.report()
        note(f"the digests of a replay are equal: {what}", same, undefined=undefined, fallbacks=report.fallbacks)


def attend(kernel: str, dropout: float, x: Tensor) -> Tensor:
    """Attention in one backend."""
    with sdpa_kernel([getattr(SDPBackend, kernel)]):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout, is_causal=True)


def undefined() -> None:
    """Ops of which torch's sources say that they leave bytes unwritten."""
    make_deterministic()
    heads = torch.randn(1, 4, 64, 64, device=DEVICE, dtype=LOW if IS_REAL else torch.float32)
    for kernel in BACKENDS if IS_REAL else ("MATH",):
        for dropout in (0.0, 0.1):
            replays(f"attention {kernel}, dropout {dropout}", partial(attend, kernel, dropout), heads)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        cell = kind(16, 16, num_layers=2).to(DEVICE)
        replays(kind.__name__, lambda x, cell=cell: cell(x)[0], torch.randn(5, 3, 16, device=DEVICE))  # type: ignore[misc]
    for last in (False, True):
        for dtype in (torch.float32, torch.float16) if IS_REAL else (torch.float32,):
            layout = torch.channels_last if last else torch.contiguous_format
            norm, x = nn.BatchNorm2d(32).to(DEVICE), torch.randn(4, 32, 8, 8, device=DEVICE, dtype=dtype)
            replays(f"BatchNorm2d, {layout}, {dtype}", norm, x.contiguous(memory_format=layout))
