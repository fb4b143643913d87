"""The worker that connect() starts, and several devices in one trainer."""

import torch
from torch import nn

import backhaul
from gpu_check.gradients import train
from gpu_check.models import PLAIN, WIDTH, Mlp
from gpu_check.results import DEVICE, IS_REAL, ON_GPU, guarded, make_deterministic, note
from gpu_check.workers import QUIET, connect, worker
from support.bits import Checkpoint, differing, plainly

LEAST_DEVICES = 2


def embedded() -> None:
    """connect() without an address: its worker computes where the trainer does."""
    with guarded("the worker that connect() starts"):
        memory = (8 << 30) if IS_REAL else (1 << 30)
        with backhaul.connect(settings=backhaul.Settings(silence_s=QUIET.silence_s, memory_bytes=memory)) as session:
            wrong = differing(train(session.checkpoint, PLAIN["mlp"]), train(plainly, PLAIN["mlp"]))
            report = session.report()
        ok = not wrong and report.remote > 0 and not report.fallbacks
        note(
            "the worker that connect() starts",
            ok,
            differing=len(wrong),
            remote=report.remote,
            fallbacks=report.fallbacks,
        )


def across(checkpoint: Checkpoint) -> list[torch.Tensor]:
    """Gradients of a model whose halves are on two devices."""
    torch.manual_seed(0)
    halves = [Mlp().to(f"cuda:{number}") for number in range(LEAST_DEVICES)]
    x = torch.randn(4, 32, WIDTH, device="cuda:0", requires_grad=True)
    y = checkpoint(halves[1], checkpoint(halves[0], x * 1.0).to("cuda:1"))
    y.square().mean().backward()
    return [p.grad.clone() for half in halves for p in half.parameters() if p.grad is not None]


def host_trainer() -> list[torch.Tensor]:
    """Gradients of a model on the host of a machine with a GPU."""
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    with backhaul.connect(settings=backhaul.Settings(silence_s=QUIET.silence_s, memory_bytes=1 << 30)) as session:
        session.checkpoint(model, x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def reserve() -> None:
    """What a worker takes of its device beside its account: cuBLAS's workspaces, rounding, CUDA's context."""
    with guarded("the reserve of a worker"), worker(memory="2GiB" if IS_REAL else "1GiB") as process:
        free_bytes = torch.cuda.mem_get_info()[0] if ON_GPU else 0
        with connect(process) as session:
            wrong = differing(train(session.checkpoint, PLAIN["mlp"]), train(plainly, PLAIN["mlp"]))
            report, memory = session.report(), process.telemetry().memory
            taken_bytes = free_bytes - torch.cuda.mem_get_info()[0] if ON_GPU else 0
        note(
            "the reserve of a worker",
            not wrong and not report.fallbacks and memory.reserve_bytes < memory.budget_bytes // 2,
            reserve_bytes=memory.reserve_bytes,
            budget_bytes=memory.budget_bytes,
            taken_bytes=taken_bytes,  # by this process, too
            fallbacks=report.fallbacks,
        )


def run() -> None:
    """Each as far as the machine has the devices."""
    make_deterministic()
    embedded()
    reserve()
    with guarded("a trainer on the host"):
        note("a trainer on the host", len(host_trainer()) == 2)  # a weight and a bias
    if not ON_GPU or torch.cuda.device_count() < LEAST_DEVICES:
        note("two devices: this machine has not got them")
        return
    with guarded("a model on two devices"), worker(device=DEVICE) as process, connect(process) as session:
        wrong = differing(across(session.checkpoint), across(plainly))
        report = session.report()
        note(
            "a model on two devices", not wrong, differing=len(wrong), remote=report.remote, fallbacks=report.fallbacks
        )
