"""Rounds in which variants take turns, and what remains of them once the noisy ones are dropped. Free of torch."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from backhaul_bench.device import synchronize
from backhaul_bench.noise import NOISY, Core, foreign_share, settle

ENOUGH = 7
"""Fewer kept rounds than these say nothing."""

Round = Mapping[str, float]
"""What each variant took, in seconds or another unit."""


class UnequalGradientsError(Exception):
    """Two variants that were compared computed different gradients: their times are of different things."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the rounds of a figure.

    Attributes:
        value: The median.
        low: The middle half begins here,
        high: and ends here.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        ordered = sorted(values)
        quarter = len(ordered) // 4
        return cls(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])


@dataclass(slots=True)
class Rounds:
    """Those measured so far, with whether nobody disturbed them."""

    found: list[tuple[Round, bool]] = field(default_factory=list)

    def add(self, taken: Round, *, is_quiet: bool) -> None:
        """Takes a round in."""
        self.found.append((taken, is_quiet))

    @property
    def kept(self) -> int:
        """Rounds that count."""
        return sum(is_quiet for _, is_quiet in self.found)

    @property
    def dropped(self) -> int:
        """Rounds in which somebody disturbed a variant."""
        return len(self.found) - self.kept

    @property
    def is_conclusive(self) -> bool:
        """Whether enough count."""
        return self.kept >= ENOUGH

    def spread(self, figure: Callable[[Round], float]) -> Spread:
        """A figure of each kept round, so that variants are compared within a round.

        Where too few are kept it is of all rounds: worth a look, and no result.
        """
        return Spread.of([figure(taken) for taken, is_quiet in self.found if is_quiet or not self.is_conclusive])


def ratio(one: str, other: str, taken: Round) -> float:
    """Of two variants in a round."""
    return taken[one] / taken[other]


def ratio_of(one: str, other: str) -> Callable[[Round], float]:
    """Gives the ratio of two variants in a round."""
    return partial(ratio, one, other)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of several ways to do the same.

    Attributes:
        name: In the rounds.
        run: Does it once, timed; may return what counts instead of wall time.
        lead_in: Does it once before, untimed: what one run leaves to be sent burdens the next, as in a long training.
    """

    name: str
    run: Callable[[], float | None]
    lead_in: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds there are.

    Attributes:
        enough: Kept rounds that end the measurement.
        most: Rounds that end it anyhow.
        warm: Rounds before, which don't count: connections, programs and weights travel.
        limit_s: No round begins after so many seconds.
        settle_s: How long a variant waits at most for what runs beside it to come to rest.
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

    Each round begins with another variant, so that none always follows the same one.

    Args:
        variants: In the order of the first round.
        cores: Whose neighbours are watched.
        plan: When to stop.
        compare: Called after each round, also the warm ones; raises UnequalGradientsError.
        measured: Runs a variant and says what it took and whether undisturbed; `timed` unless given.
    """
    measured = measured or partial(timed, settle_s=plan.settle_s)
    rounds, began_s = Rounds(), time.monotonic()
    for number in range(plan.warm + plan.most):
        turn = number % len(variants)
        found = {v.name: measured(v, cores) for v in (*variants[turn:], *variants[:turn])}
        compare()
        if number >= plan.warm:
            rounds.add({name: taken for name, (taken, _) in found.items()}, is_quiet=all(q for _, q in found.values()))
        if rounds.kept >= plan.enough or (rounds.found and time.monotonic() - began_s > plan.limit_s):
            break
    return rounds


def timed(variant: Alternative, cores: Sequence[Core], settle_s: float = 5.0) -> tuple[float, bool]:
    """Runs a variant once on cores that have come to rest. Returns seconds, or what it returns, and whether quiet."""
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
