"""Constructs that are common in models give the same bits on a worker, or say why they run on the trainer."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

from backhaul import Decision, Session
from numerics.constructs import CONSTRUCTS, INSIDE, KEPT, Make
from support.bits import differing, outcome, plainly, seed_generators
from support.loopback import Loopback

RETURNS = {"gradients": Decision.GRADIENTS, "activations": Decision.ACTIVATIONS}
OVER_THE_WIRE = ["CTC, lengths as a tensor", "packed LSTM", "Gamma", "foreach in place", "vmap, other draws for each"]


def compare(make: Make, remote: Loopback | Session, returns: str) -> None:
    """Runs a construct both ways, and compares outputs, gradients, buffers, and the generator's state."""
    seed_generators(1)
    made, x = make()
    module, again = copy.deepcopy(made), copy.deepcopy(made)
    expected = outcome(plainly, module, (x,), {})
    assert differing(outcome(partial(remote.checkpoint, returns=returns), again, (x,), {}), expected) == []
    assert [
        name for name, value in again.state_dict().items() if not torch.equal(value, module.state_dict()[name])
    ] == []


def decisions(remote: Loopback | Session) -> set[Decision]:
    """Returns how segments were recomputed. None may have failed on the worker."""
    report = remote.report()
    assert report.fallbacks == 0
    assert all(not segment.reasons for segment in report.segments)
    return {decision for segment in report.segments for decision in segment.decisions}


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("name", CONSTRUCTS)
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization", "ignore:.*PyTorch API of nested")
def test_a_construct_runs_on_the_worker(name: str, returns: str, loopback: Loopback) -> None:
    compare(CONSTRUCTS[name], loopback, returns)
    assert decisions(loopback) == {RETURNS["activations" if name in INSIDE else returns]}
    assert loopback.changed() == []


@pytest.mark.parametrize("name", CONSTRUCTS)
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization", "ignore:.*PyTorch API of nested")
def test_a_construct_for_a_worker_with_other_hardware(name: str) -> None:
    """What forward drew and decided is sent, or the trainer recomputes the segment."""
    remote = Loopback(records_choices=True)
    compare(CONSTRUCTS[name], remote, "gradients")
    report = remote.report()
    assert report.drift == 0.0
    for segment in report.segments:
        assert all("other hardware" in reason for reason in segment.reasons), segment.reasons
        assert not segment.kept


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_construct_says_why_it_runs_on_the_trainer(name: str, loopback: Loopback) -> None:
    make, reason = KEPT[name]
    compare(make, loopback, "gradients")
    assert decisions(loopback) <= {Decision.KEPT, Decision.TRAINER}
    assert all(reason in kept for segment in loopback.report().segments for kept in segment.kept)


@pytest.mark.parametrize("name", OVER_THE_WIRE)
def test_a_construct_over_the_wire(name: str, session: Session) -> None:
    compare(CONSTRUCTS[name], session, "gradients")
    assert decisions(session) == {Decision.GRADIENTS}


def test_the_documentation_names_what_stays_on_the_trainer() -> None:
    said = (Path(__file__).parents[2] / "docs/models.md").read_text()
    table = said.partition("## Constructs")[2].partition("\n## ")[0].replace("`", "").splitlines()
    for names, words in ((KEPT, "| trainer |"), (INSIDE, "activations")):
        assert [name for name in names if not any(name in row and words in row for row in table)] == []
