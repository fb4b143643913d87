"""A block recomputed by Backhaul's worker and by a peer of torch.distributed.rpc, beside computing it here."""

import signal
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backhaul.bench import rpc_peer
from backhaul.bench.outcomes import Outcome, of_rounds
from backhaul.bench.rounds import Plan, Round, Variant, interleave
from backhaul.bench.stage import Stage
from backhaul.bench.steps import on_trainer
from backhaul.bench.training import SMALL, WIDTH, checkpoint_of_torch, compare_gradients

CALLS = 12
"""Timed together: one alone is too short to tell whether it was disturbed."""
PLAN = Plan(most=20, warm=2, limit_s=35.0, settle_s=0.2)  # the peer's threads never rest: they poll


def measure(stage: Stage) -> list[Outcome]:
    """vs_torch_rpc."""
    session = stage.session(returns="gradients")
    port = rpc_peer.free_port()
    peer, _ = stage.start([sys.executable, "-P", "-m", "backhaul.bench.rpc_peer", str(port)])
    rpc_peer.join(port, rpc_peer.TRAINER)
    block = rpc_peer.frozen_block()
    x = torch.randn(*SMALL, WIDTH, requires_grad=True)
    gradient = torch.randn(*SMALL, WIDTH)
    ways: dict[str, Any] = {
        "local": partial(checkpoint_of_torch, block),
        "backhaul": partial(session.checkpoint, block),
        "rpc": partial(rpc_peer.checkpoint, block),
    }
    found: dict[str, Tensor] = {}

    def run(name: str) -> None:
        # It polls on the worker's core also while nothing is asked of it.
        peer.send_signal(signal.SIGCONT if name == "rpc" else signal.SIGSTOP)
        for _ in range(CALLS):
            x.grad = None
            ways[name](x).backward(gradient)
        assert x.grad is not None
        found[name] = x.grad

    def compare() -> None:
        for name in ("backhaul", "rpc"):
            compare_gradients(f"{name} and local", [found[name]], [found["local"]])

    try:
        rounds = interleave([Variant(name, partial(run, name)) for name in ways], stage.cores, PLAN, compare)
    finally:
        peer.send_signal(signal.SIGCONT)
    rpc_peer.leave()
    return [of_rounds("vs_torch_rpc", rounds, _added, on_trainer(session.report().fallbacks))]


def _added(taken: Round) -> float:
    return (taken["backhaul"] - taken["local"]) / (taken["rpc"] - taken["local"])
