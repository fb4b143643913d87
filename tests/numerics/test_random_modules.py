"""Whatever people put together: the same bits with and without checkpointing, or an error without it too."""

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backhaul import Session
from numerics.random_modules import NAMES, Setting, run
from support.bits import differing, plainly
from support.loopback import Loopback

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
SETTINGS = st.builds(
    Setting,
    parts=st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6).map(tuple), min_size=1, max_size=2).map(
        tuple
    ),
    seed=st.integers(0, 1 << 16),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
    autocast=st.booleans(),
    training=st.booleans(),
    leaf=st.booleans(),
    differentiable=st.booleans(),
    form=st.sampled_from(["tensor", "tuple", "dict", "view"]),
    again=st.booleans(),
    twice=st.booleans(),
    overwritten=st.booleans(),
    steps=st.integers(1, 2),
)


UNPINNED = "compares numbers that other hardware rounds differently"  # the one reason, and only where all is pinned


def check(session: Session | Loopback, examples: int, *, derandomize: bool) -> None:
    @settings(
        max_examples=examples,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(setting=SETTINGS, returns=st.sampled_from(["gradients", "activations", "auto"]))
    def compare(setting: Setting, returns: str) -> None:
        expected = run(setting, plainly)
        ours = run(setting, partial(session.checkpoint, returns=returns))
        if isinstance(expected, str):
            # A segment has the values of forward where a plain call finds them overwritten.
            assert expected in (ours, "in place")
        else:
            assert not isinstance(ours, str), ours
            assert differing(ours, expected) == []

    compare()
    reasons = Counter[str]()
    for segment in session.report().segments:
        reasons.update(segment.reasons)
    assert [reason for reason in reasons if not reason.endswith(UNPINNED)] == []
    assert session.report().fallbacks == reasons.total()


@pytest.mark.slow
@pytest.mark.parametrize("examples", [150, pytest.param(400, marks=pytest.mark.nightly)])
def test_modules_at_random(examples: int, session: Session) -> None:
    check(session, examples, derandomize=True)


@pytest.mark.slow
def test_modules_at_random_with_their_draws_and_decisions_pinned() -> None:
    check(Loopback(records_choices=True), 100, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_many_modules_at_random(session: Session) -> None:
    check(session, 100_000, derandomize=False)
