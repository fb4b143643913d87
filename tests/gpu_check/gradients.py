"""Gradients, losses and buffers of each model, compared with training without checkpointing."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs

from gpu_check.models import PLAIN, RECURRENT, Case
from gpu_check.results import DEVICE, IS_REAL, guarded, make_deterministic, note
from gpu_check.workers import connect, worker
from support.bits import Checkpoint, differing, plainly
from support.processes import WorkerProcess

DEPTH, STEPS = 2, 2


def train(checkpoint: Checkpoint, case: Case) -> list[Tensor]:
    """Losses, gradients and buffers of some steps."""
    torch.manual_seed(0)
    model = nn.ModuleList(case.build() for _ in range(DEPTH)).to(DEVICE, case.dtype)
    if case.last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    kept: list[Tensor] = []
    for step in range(STEPS):
        torch.manual_seed(step + 1)
        x = case.inputs()
        with case.around():
            y = x * 1.0
            for block in model:
                y = checkpoint(block, y)
            loss = y.float().square().mean()
            loss.backward()
        assert x.grad is not None
        kept += [loss.detach().clone(), x.grad.clone()]
        kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        kept += [buffer.clone() for buffer in model.buffers()]
    return kept


def drift(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of two lists of tensors."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs)


def compare(name: str, case: Case, process: WorkerProcess) -> None:
    """Notes whether a worker's gradients have the bits of those without checkpointing."""
    with guarded(name):
        expected = train(plainly, case)
        again = differing(train(plainly, case), expected)
        by_torch = differing(train(partial(torchs, use_reentrant=False), case), expected)
        for returns in ("gradients", "activations"):
            with guarded(f"{name}, {returns}"), connect(process, returns=returns) as session:
                ours = train(session.checkpoint, case)
                report, wrong = session.report(), differing(ours, expected)
                remote = report.remote > 0 and not report.fallbacks
                # What differs from itself has no bits to compare with; Backhaul notices that and says so.
                ok = (remote or case.may_stay) and not wrong if not again else None
                note(
                    f"{name}, {returns}",
                    ok,
                    differing=len(wrong),
                    of=len(expected),
                    drift=drift(ours, expected) if wrong else 0.0,
                    plain_differs_from_itself=len(again),
                    torchs_checkpoint_differs=len(by_torch),
                    remote=report.remote,
                    fallbacks=report.fallbacks,
                )


def compare_all(cases: Mapping[str, Case], by_default: Sequence[str] = ()) -> None:
    """Compares each case, with ops that give the same bits in each run.

    Args:
        cases: The cases by name.
        by_default: The names of those that are compared with torch's default ops before.
    """
    with worker() as process:
        for name in by_default:
            if IS_REAL or not cases[name].only_on_gpu:
                compare(f"{name}, default ops", cases[name], process)
        make_deterministic()
        for name, case in cases.items():
            if IS_REAL or not case.only_on_gpu:
                compare(name, case, process)


def alignments() -> None:
    """Weights and inputs at addresses that are aligned to 64, 128 and 256 bytes, by which cuBLASLt chooses kernels."""
    make_deterministic()
    with worker() as process:
        for offset in (32, 64, 128):  # elements of two bytes
            with guarded(f"addresses at {2 * offset} bytes"), connect(process, returns="activations") as session:

                def step(checkpoint: Checkpoint, offset: int = offset) -> list[Tensor]:
                    torch.manual_seed(0)
                    flat = torch.randn(offset + 3 * 512 * 512, device=DEVICE).bfloat16()
                    x, weight, bias = flat[offset:].view(3, 512, 512).detach()
                    x, weight, bias = (one.requires_grad_() for one in (x, weight, bias[0]))
                    checkpoint(
                        lambda x: nn.functional.linear(x, weight, bias).relu(), x
                    ).float().square().sum().backward()
                    return [one.grad for one in (x, weight, bias) if one.grad is not None]

                wrong = differing(step(session.checkpoint), step(plainly))
                report = session.report()
                ok = report.remote > 0 and not report.fallbacks and not wrong
                note(f"addresses at {2 * offset} bytes", ok, differing=len(wrong), fallbacks=report.fallbacks)


def plain() -> None:
    """Models without attention, and a linear layer at several addresses."""
    compare_all(PLAIN, ["mlp, dropout", "mlp, bf16"])
    alignments()


def recurrent() -> None:
    """Convolutions, batch norm and recurrent networks."""
    compare_all(RECURRENT, ["lstm"])
