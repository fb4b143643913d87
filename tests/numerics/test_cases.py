"""Each case gives the same bits with and without checkpointing, runs where it should, and says why if not remotely."""

from functools import partial

import pytest
import torch
from torch import nn

from backhaul import Decision, Session
from numerics.cases import CASES, Case
from support.bits import differing, plainly, train
from support.loopback import Loopback

RETURNS = ["gradients", "activations"]
# Through a real worker: one of each kind of thing that travels.
OVER_THE_WIRE = [
    "stack",
    "bf16 autocast, fused AdamW",
    "keyword mask",
    "closure and partial",
    "nested structures",
    "argument written to",
    "auxiliary loss",
    "randomness of its own",
    "shared states and weights",
    "convolutions and norms",
    "recurrent",
    "buffer read and updated",
    "straight-through with a buffer",
]


def check(case: Case, remote: Loopback | Session, returns: str) -> None:
    """Trains both ways and compares."""
    steps = partial(train, build=case.build, run=case.run, optimizer=case.optimizer)
    expected = steps(plainly)
    ours = steps(partial(remote.checkpoint, returns=returns))
    assert differing(ours, expected) == []

    report = remote.report()
    reasons = [reason for segment in report.segments for reason in segment.kept]
    assert report.fallbacks == 0
    assert all(case.kept and case.kept in reason for reason in reasons), reasons
    assert bool(reasons) == bool(case.kept)
    assert all(not segment.reasons for segment in report.segments)
    done = {decision for segment in report.segments for decision in segment.decisions}
    expected_decision = Decision.GRADIENTS if returns == "gradients" and not case.activations else Decision.ACTIVATIONS
    if case.kept:
        assert done - {Decision.TRAINER} == {Decision.KEPT}  # the trainer recomputes what came before the reason
    else:
        assert done == {expected_decision}


@pytest.mark.slow
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, returns: str, loopback: Loopback) -> None:
    check(CASES[name], loopback, returns)


def test_sparse_gradients_are_computed_here(session: Session) -> None:
    """They can't travel, and nobody knows before they are there."""
    embedding = nn.Embedding(4, 8, sparse=True)
    ids = torch.tensor([[1, 2], [0, 2]])
    (expected,) = torch.autograd.grad(embedding(ids).square().sum(), embedding.weight)
    (gradient,) = torch.autograd.grad(
        session.checkpoint(embedding, ids, returns="gradients").square().sum(), embedding.weight
    )
    assert torch.equal(gradient.to_dense(), expected.to_dense())
    assert session.report().fallbacks == 1


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("name", OVER_THE_WIRE)
def test_case_over_the_wire(name: str, returns: str, session: Session) -> None:
    check(CASES[name], session, returns)
