"""Measures steps of 8 small blocks recomputed locally, by Backhaul's worker, and over torch.distributed.rpc."""

import signal
from functools import partial
from typing import Any

from backhaul_lab.bench import rpc_peer
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.steps import BLOCKS, on_trainer
from backhaul_lab.harness.processes import MODULE
from backhaul_lab.harness.rounds import Alternative, Plan, Round, interleave
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import SMALL, BlockTraining, checkpoint_of_torch, compare

STEPS = 3
"""Steps timed together, because remote recomputation adds only a tenth to one."""
PLAN = Plan(most=20, limit_s=40.0, settle_s=0.2)  # Short, because the peer's threads poll and never become idle.


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure vs_torch_rpc."""
    session = stage.session(returns="gradients")
    port = rpc_peer.free_port()
    peer, _ = stage.start([*MODULE, "backhaul_lab.bench.rpc_peer", str(port)])
    rpc_peer.join(port, rpc_peer.TRAINER)
    ways: dict[str, Any] = {
        "local": checkpoint_of_torch,
        "backhaul": session.checkpoint,
        "rpc": rpc_peer.checkpoint,
    }
    trainings = {name: BlockTraining(name, BLOCKS, SMALL, way) for name, way in ways.items()}

    def run(name: str) -> None:
        # The idle peer polls, which would slow Backhaul's worker on the same core.
        peer.send_signal(signal.SIGCONT if name == "rpc" else signal.SIGSTOP)
        trainings[name].steps(STEPS)

    variants = [Alternative(name, partial(run, name)) for name in ways]
    try:
        rounds = interleave(variants, stage.cores, PLAN, lambda: compare(list(trainings.values())))
    finally:
        peer.send_signal(signal.SIGCONT)
    rpc_peer.leave()
    return [of_rounds("vs_torch_rpc", rounds, _added, on_trainer(session.report().fallbacks))]


def _added(taken: Round) -> float:
    return (taken["backhaul"] - taken["local"]) / (taken["rpc"] - taken["local"])
