"""Rounds in which variants take turns, and their statistics without the disturbed rounds. Imports no torch."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from backhaul_lab.harness.core_times import NOISY, Core, foreign_share, settle
from backhaul_lab.harness.device import synchronize

ENOUGH = 5
"""Least number of kept rounds for a conclusive result."""
PACE = "BENCH_PACE"
"""Environment variable with the part of its time that a measurement may take; 1 if it is unset."""

Round = Mapping[str, float]
"""Value of each variant in one round, in seconds or another unit."""


class UnequalGradientsError(Exception):
    """Compared variants computed different gradients, so their times cannot be compared."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a figure over its rounds.

    Attributes:
        value: Median over the rounds.
        low: Lower quartile over the rounds.
        high: Upper quartile over the rounds.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Computes the spread of at least one value."""
        ordered = sorted(values)
        quarter = len(ordered) // 4
        return cls(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])


@dataclass(slots=True)
class Rounds:
    """The rounds measured so far, each with whether it was undisturbed."""

    measured: list[tuple[Round, bool]] = field(default_factory=list)

    def add(self, taken: Round, *, is_quiet: bool) -> None:
        """Appends a round."""
        self.measured.append((taken, is_quiet))

    @property
    def undisturbed(self) -> int:
        """Number of undisturbed rounds."""
        return sum(is_quiet for _, is_quiet in self.measured)

    @property
    def dropped(self) -> int:
        """Number of rounds in which other processes disturbed a variant."""
        return len(self.measured) - self.undisturbed

    @property
    def is_conclusive(self) -> bool:
        """Whether there are enough undisturbed rounds."""
        return self.undisturbed >= ENOUGH

    def spread(self, figure: Callable[[Round], float]) -> Spread:
        """Returns the spread of a figure over the undisturbed rounds, of which each has a value for all variants.

        If too few rounds are undisturbed, all rounds count and the spread is only a hint.
        """
        return Spread.of([figure(taken) for taken, is_quiet in self.measured if is_quiet or not self.is_conclusive])


def ratio_of(one: str, other: str) -> Callable[[Round], float]:
    """Returns a function that computes the ratio of two variants in a round."""
    return lambda taken: taken[one] / taken[other]


def added_by(one: str, other: str) -> Callable[[Round], float]:
    """Returns a function that computes what a variant adds to another in a round, relative to the other."""
    return lambda taken: taken[one] / taken[other] - 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the variants that a measurement compares.

    Attributes:
        name: Name of the variant in the rounds.
        run: Runs the variant once, timed. It may return a value that replaces the wall time.
        lead_in: Runs the variant once before, untimed, so that leftover uploads burden the timed run as in training.
    """

    name: str
    run: Callable[[], float | None]
    lead_in: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Plan:
    """Limits that decide when a measurement ends.

    Attributes:
        enough: Number of kept rounds that ends the measurement.
        most: Largest number of rounds, kept or not.
        warm: Number of warm-up rounds, which open connections and send programs and weights and do not count.
        limit_s: Seconds after which no round begins. If many figures are measured, the variable `PACE` shortens it.
        settle_s: Longest time that a variant waits for our other processes to become idle, in seconds.
    """

    enough: int = ENOUGH
    most: int = 20
    warm: int = 1
    limit_s: float = 120.0
    settle_s: float = 5.0


def interleave(
    variants: Sequence[Alternative],
    cores: Sequence[Core],
    plan: Plan,
    compare: Callable[[], None] = lambda: None,
    measured: Callable[[Alternative, Sequence[Core]], tuple[float, bool]] | None = None,
) -> Rounds:
    """Runs the variants in turns until enough rounds are kept.

    Each round begins with another variant, so that no variant goes first in every round.

    Args:
        variants: The variants in the order of the first round.
        cores: Cores that are checked for disturbances by other processes.
        plan: When the measurement ends.
        compare: Called after each round, including warm-up rounds. Raises UnequalGradientsError.
        measured: Runs a variant and returns its value and whether it was undisturbed. None: `timed` does.

    Returns:
        The rounds after the warm-up.
    """
    measured = measured or partial(timed, settle_s=plan.settle_s)
    rounds, began_s, pace = Rounds(), time.monotonic(), float(os.environ.get(PACE, "1"))
    for number in range(plan.warm + plan.most):
        turn = number % len(variants)
        taken = {v.name: measured(v, cores) for v in (*variants[turn:], *variants[:turn])}
        compare()
        if number >= plan.warm:
            rounds.add({name: value for name, (value, _) in taken.items()}, is_quiet=all(q for _, q in taken.values()))
        if rounds.undisturbed >= plan.enough or (rounds.measured and time.monotonic() - began_s > pace * plan.limit_s):
            break
    return rounds


def timed(variant: Alternative, cores: Sequence[Core], settle_s: float = 5.0) -> tuple[float, bool]:
    """Runs a variant once, after our processes on the cores have become idle.

    Returns:
        The value that the variant returned or else the seconds it took, and whether it was undisturbed.
    """
    settle(cores, timeout_s=settle_s)
    variant.lead_in()
    synchronize()
    before = [core.times() for core in cores]
    began_s = time.perf_counter()
    counted = variant.run()
    synchronize()
    taken_s = time.perf_counter() - began_s
    after = [core.times() for core in cores]
    is_quiet = all(foreign_share(*pair) <= NOISY for pair in zip(before, after, strict=True))
    return (taken_s if counted is None else counted), is_quiet
