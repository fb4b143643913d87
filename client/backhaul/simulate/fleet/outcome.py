"""What a simulated fleet did. Imports no torch."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """What a simulated fleet did.

    Attributes:
        ends_s: Time of the end of every simulated step, in seconds, ascending.
        durations_s: Duration of the same steps, in seconds.
        counted_from_s: Time from which on steps counted.
        until_s: Time at which the simulation ended.
        lost_at_s: Time at which racks were lost; None without a loss.
        recomputed_calls: Segment calls that trainers recomputed because their worker was lost.
        busy_calls: Segment calls that trainers computed because their worker's queue was too long.
        resent_bytes: Bytes of frozen parameters that were sent to other workers after the loss.
        busy_s: For each kind of shared resource the mean seconds for which it was used, from the beginning on.
        utilization: The part of the time during which it was used while steps counted, from 0 to 1.
        events: Number of simulated events.
    """

    ends_s: Sequence[float]
    durations_s: Sequence[float]
    counted_from_s: float
    until_s: float
    lost_at_s: float | None
    recomputed_calls: float
    busy_calls: int
    resent_bytes: float
    busy_s: Mapping[str, float]
    utilization: Mapping[str, float]
    events: int

    @property
    def counted_s(self) -> Sequence[float]:
        """Durations of the steps that ended while steps were counted, in seconds."""
        return self.durations_s[bisect_left(self.ends_s, self.counted_from_s) :]

    @property
    def step_s(self) -> float:
        """Mean duration of these steps, in seconds; NaN if there are none."""
        return fmean(self.counted_s) if self.counted_s else math.nan

    def percentile_s(self, percent: int) -> float:
        """Returns the duration that so many percent of these steps do not exceed, in seconds; NaN if there are none."""
        counted_s = self.counted_s
        if len(counted_s) < 2:  # noqa: PLR2004  quantiles need two
            return self.step_s
        return quantiles(counted_s, n=100, method="inclusive")[percent - 1]
