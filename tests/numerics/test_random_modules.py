"""Whatever people put together: the same bits with and without checkpointing, or an error without it too."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backhaul import Session
from backhaul._backend import backend
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


# Mostly of ops that write to no memory and read no values, for a program with one of the others is recorded.
FUNCTIONAL = sorted(
    {*NAMES}
    - {"relu", "in place", "in place on a view", "written argument", "running mean", "own generator", "inner gradient"}
    - {"recurrent", "spectral norm", "weight norm", "batch norm", "branch", "auxiliary", "rows", "complex", "route"}
)
COMPILED = st.one_of(
    [
        SETTINGS.map(lambda setting: replace(setting, steps=4)),
        *[
            st.builds(
                lambda setting, parts: replace(setting, parts=parts, form="tensor", steps=4),
                SETTINGS,
                st.lists(
                    st.lists(st.sampled_from(FUNCTIONAL), min_size=1, max_size=6).map(tuple), min_size=1, max_size=2
                ).map(tuple),
            )
        ]
        * 3,
    ]
)


def check_compiled(examples: int, *, derandomize: bool) -> Counter[str]:
    """Segments that Backhaul or the user has compiled. Returns what became of their calls, and why."""
    outcomes = Counter[str]()

    @settings(
        max_examples=examples,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        database=None,
        deadline=None,
    )
    @given(setting=COMPILED, is_own=st.booleans())
    def compare(setting: Setting, is_own: bool) -> None:
        torch._dynamo.reset()
        remote, compiled = Loopback(), dict[int, Any]()

        def checkpoint(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_own:
                return remote.checkpoint(module, *args, graphs="eager", **kwargs)
            if id(module) not in compiled:
                compiled[id(module)] = torch.compile(module, backend=backend)
            return remote.checkpoint(compiled[id(module)], *args, **kwargs)

        expected = run(setting, plainly)
        # The choices of a module are numbers, which torch.compile would make variables of.
        with torch._dynamo.config.patch(specialize_float=True, automatic_dynamic_shapes=False):
            ours = run(setting, checkpoint)
        if isinstance(expected, str):
            assert expected in (ours, "in place")
        else:
            assert not isinstance(ours, str), ours
            assert differing(ours, expected) == []
        report = remote.report()
        assert report.fallbacks == 0, report
        for segment in report.segments:
            outcomes.update({"calls": segment.calls, "known": segment.known})
            outcomes.update(segment.recorded)

    compare()
    return outcomes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile says what it ignores
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_modules_at_random() -> None:
    assert check_compiled(12, derandomize=True)["known"]


@pytest.mark.soak
@pytest.mark.timeout(24 * 3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
def test_many_compiled_modules_at_random() -> None:
    """Takes some ten hours."""
    outcomes = check_compiled(10_000, derandomize=False)
    assert outcomes["known"] > outcomes["calls"] / 4, outcomes


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
