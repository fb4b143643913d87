"""Compares transfers over several connections with those over one, on a distant link and on this machine."""

from functools import partial

import torch
from torch import Tensor

from backhaul import Session, Settings
from backhaul_lab.bench.bare import TENSOR_BYTES
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.transfers import there_and_back
from backhaul_lab.harness.core_times import settle
from backhaul_lab.harness.processes import MODULE
from backhaul_lab.harness.rounds import Alternative, Plan, Rounds, interleave, ratio_of
from backhaul_lab.harness.stage import OVER_TCP, Stage

ROUND_TRIP_S, WINDOW_BYTES = 0.02, 1 << 20
"""The distant link: what it adds to a round trip, and the bytes of a connection that may be on their way."""
CONNECTIONS = 4
"""The number of connections on this machine, where a session would choose one."""
MOST_STEPS = 40
"""Steps within which a session must have chosen its number of connections."""
PLAN = Plan(most=8, warm=1, limit_s=25.0)


def measure(stage: Stage) -> list[Outcome]:
    """Measures connections_distant and connections_near: the time with one connection over that with several."""
    near = stage.tcp_worker()
    link = (near, "127.0.0.1", str(ROUND_TRIP_S / 2), "0", str(WINDOW_BYTES))
    _, distant = stage.start([*MODULE, "backhaul_lab.harness.link_proxy", *link])
    far_apart, chosen = _rounds(stage, distant, 0)
    side_by_side, _ = _rounds(stage, near, CONNECTIONS)
    note = f"{chosen} connections were chosen"
    return [
        of_rounds("connections_distant", far_apart, ratio_of("one", "several"), note),
        of_rounds("connections_near", side_by_side, ratio_of("one", "several"), f"{CONNECTIONS} connections were set"),
    ]


def _rounds(stage: Stage, address: str, connections: int) -> tuple[Rounds, int]:
    """Times a tensor up and its gradient down. Returns the rounds, and the number of connections of "several"."""
    sessions = {
        "one": stage.session(address, returns="gradients", settings=Settings(connections=1, **OVER_TCP)),
        "several": stage.session(address, returns="gradients", settings=Settings(connections=connections, **OVER_TCP)),
    }
    x = torch.randn(TENSOR_BYTES // 4, requires_grad=True)
    count = _choose(sessions["several"], x)
    variants = [
        Alternative(name, there_and_back(session, [x]), partial(settle, stage.cores))
        for name, session in sessions.items()
    ]
    rounds = interleave(variants, stage.cores, PLAN)
    if any(session.report().fallbacks for session in sessions.values()):
        raise RuntimeError("the trainer recomputed a segment, so a transfer is missing")
    return rounds, count


def _choose(session: Session, x: Tensor) -> int:
    """Trains until the session has chosen its connections and they have joined. Returns their number."""
    (worker,) = session._workers[:]
    lanes = worker.connection.lanes
    transfer = there_and_back(session, [x])
    for _ in range(MOST_STEPS):
        transfer()
        worker_session = worker.connection.up
        joined = len(lanes.joined(worker_session.session)) if worker_session is not None else 0
        if lanes.choice.is_settled and joined == lanes.choice.count - 1:
            return lanes.choice.count
    raise RuntimeError(f"no number of connections was chosen in {MOST_STEPS} steps")
