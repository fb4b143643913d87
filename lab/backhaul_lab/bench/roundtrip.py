"""Compares backward's wait for a segment of negligible compute with a round trip on a bare gRPC stream."""

import torch

from backhaul_lab.bench.bare import BareGrpc
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.steps import on_trainer
from backhaul_lab.bench.transfers import KEEPS_FREED_MEMORY
from backhaul_lab.harness.core_times import settle
from backhaul_lab.harness.processes import MODULE
from backhaul_lab.harness.rounds import Alternative, Plan, interleave, ratio_of
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import compare_gradients

SEGMENTS = 16
BACKWARDS = 8
ELEMENTS = 256
"""Number of float32 elements of a tensor, 1 KiB."""
TRIPS = 400
PLAN = Plan(most=25, warm=2, limit_s=25.0)


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure small_roundtrip."""
    session = stage.session(returns="gradients")
    _, ports = stage.start([*MODULE, "backhaul_lab.bench.bare"], environment=KEEPS_FREED_MEMORY)
    bare = BareGrpc(int(ports.split()[0]))

    def wait_s() -> float:
        before = sum(segment.wait_s for segment in session.report().segments)
        for number in range(BACKWARDS):
            x = torch.full((ELEMENTS,), float(number), requires_grad=True)
            y = x
            for _ in range(SEGMENTS):
                y = session.checkpoint(torch.sin, y)
            settle(stage.cores)  # All segments are stored, so backward waits only for the round trips.
            y.sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            compare_gradients("the round trip", [x.grad], [_plain_gradient(x)])
        now = sum(segment.wait_s for segment in session.report().segments)
        return (now - before) / (BACKWARDS * SEGMENTS)

    variants = [Alternative("backhaul", wait_s), Alternative("grpc", lambda: bare.round_trips(TRIPS, 4 * ELEMENTS))]
    rounds = interleave(variants, stage.cores, PLAN)
    bare.close()
    if not session.report().remote:
        raise RuntimeError("no segment was recomputed by the worker")
    return [of_rounds("small_roundtrip", rounds, ratio_of("backhaul", "grpc"), on_trainer(session.report().fallbacks))]


def _plain_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = x
    for _ in range(SEGMENTS):
        y = torch.sin(y)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient
