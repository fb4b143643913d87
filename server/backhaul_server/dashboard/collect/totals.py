"""Sums over steps and segments for the headline, the alerts and Prometheus."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.intervals import Interval, common, union
from backhaul_server.dashboard.collect.series import Series

WINDOW_S = 300


class Totals(NamedTuple):
    """Sums over steps and their reported calls. Seconds are summed over segments, which overlap.

    Attributes:
        steps: The number of steps that ended.
        gradients: Number of recomputations on a worker that returned gradients.
        activations: Number of recomputations on a worker that returned activations.
        on_trainer: Number of recomputations on the trainer.
        fallbacks: Those of `on_trainer` that were meant for a worker.
        wait_s: Time for which backward was blocked by workers.
        overhead_s: Time of recording, digests and sending in the trainer's own threads.
        spared_s: What workers did, in seconds of the trainer: the forward that it measured, and the backward where
            workers return gradients.
        up_bytes: Bytes sent to workers.
        down_bytes: Bytes received from workers.
        calls: The number of reported segment calls.
        retries: The number of repeated requests of these calls.
        mismatches: Number of recomputations whose values were rejected.
        upload_s: Time of uploads; queue_s, recompute_s, backward_s and download_s are the other phases.
        exposed_queue_s: The part of queue_s for which backward was blocked. The rest costs nothing, because
            speculative replays wait for each other.
        remote_forward_s: Forward time of the reported calls that a worker recomputed.
        spared_bytes: Bytes of parameters that were not sent, because only their differences were.
    """

    steps: float = 0
    gradients: float = 0
    activations: float = 0
    on_trainer: float = 0
    fallbacks: float = 0
    wait_s: float = 0
    overhead_s: float = 0
    spared_s: float = 0
    up_bytes: float = 0
    down_bytes: float = 0
    calls: float = 0
    retries: float = 0
    mismatches: float = 0
    upload_s: float = 0
    queue_s: float = 0
    recompute_s: float = 0
    backward_s: float = 0
    download_s: float = 0
    exposed_queue_s: float = 0
    remote_forward_s: float = 0
    spared_bytes: float = 0

    @property
    def remote(self) -> float:
        """The number of recomputations on workers."""
        return self.gradients + self.activations

    @property
    def fallback_rate(self) -> float:
        """Fallbacks as a share of the recomputations that were meant for a worker."""
        return self.fallbacks / meant if (meant := self.remote + self.fallbacks) else 0.0

    def per_step_ms(self, seconds: float) -> float | None:
        """Returns seconds of all steps as milliseconds of the mean step; None without steps."""
        return 1e3 * seconds / self.steps if self.steps else None

    @property
    def added_s(self) -> float:
        """Time that workers added to the steps, in seconds."""
        return self.wait_s + self.overhead_s

    @property
    def transfer_s(self) -> float:
        """Time of uploads and downloads, in seconds."""
        return self.upload_s + self.download_s

    @classmethod
    def of_all(cls, parts: Iterable["Totals"]) -> Self:
        """Returns the sum of all parts."""
        return cls._make(map(sum, zip(cls(), *parts, strict=True)))

    @classmethod
    def of_step(cls, step: telemetry_pb2.Step) -> Self:
        """Returns the sums that a step reports itself."""
        reported = {name: getattr(step, name) for name in _OF_STEP}
        reported |= {
            "steps": 1,
            "fallbacks": min(step.fallbacks, step.on_trainer),
            "calls": 0,
        }  # `of_call` counts calls
        return cls(**reported)

    @classmethod
    def of_call(cls, call: telemetry_pb2.SegmentCall, lanes_s: list[float]) -> Self:
        """Returns the sums that a call adds to those of its step. `lanes_s` has the seconds of its spans by lane."""
        is_remote = call.decision in {"gradients", "activations"}
        return cls(
            calls=1,
            retries=call.retries,
            mismatches=call.mismatches,
            upload_s=lanes_s[telemetry_pb2.LANE_UPLOAD],
            queue_s=lanes_s[telemetry_pb2.LANE_QUEUE],
            recompute_s=lanes_s[telemetry_pb2.LANE_RECOMPUTE],
            backward_s=lanes_s[telemetry_pb2.LANE_BACKWARD],
            download_s=lanes_s[telemetry_pb2.LANE_DOWNLOAD],
            exposed_queue_s=_exposed_queue_s(call) if lanes_s[telemetry_pb2.LANE_QUEUE] else 0.0,
            remote_forward_s=lanes_s[telemetry_pb2.LANE_FORWARD] if is_remote else 0.0,
        )


_OF_STEP = [name for name in Totals._fields if name in telemetry_pb2.Step.DESCRIPTOR.fields_by_name]
"""The sums that have the name of a field of a step."""


def _exposed_queue_s(call: telemetry_pb2.SegmentCall) -> float:
    def spans(lane: telemetry_pb2.Lane.ValueType) -> list[Interval]:
        return union(
            (span.started_at_s, span.started_at_s + span.duration_s) for span in call.spans if span.lane == lane
        )

    return common(spans(telemetry_pb2.LANE_QUEUE), spans(telemetry_pb2.LANE_WAIT))


class RecentTotals:
    """Sums per second over the last five minutes."""

    def __init__(self) -> None:
        self._series = Series(WINDOW_S, len(Totals._fields))

    def add(self, at_s: float, sums: Totals) -> None:
        """Adds sums at a time in seconds since 1970."""
        self._series.add(at_s, sums)

    def since(self, at_s: float) -> Totals:
        """Returns the sums at or after a time."""
        return Totals._make(self._series.sums(at_s))
