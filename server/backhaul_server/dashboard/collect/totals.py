"""What is summed over steps and segments: for the headline, for alerts, for Prometheus."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.intervals import Interval, common, union
from backhaul_server.dashboard.collect.series import Series

WINDOW_S = 300


class Totals(NamedTuple):
    """Of steps, and of their segments' calls as far as these were told. Seconds are sums over segments: they overlap.

    Attributes:
        steps: The number of steps that ended.
        gradients: Recomputations on a worker that gave gradients; activations likewise.
        on_trainer: Recomputations on the trainer.
        fallbacks: Those of them that were meant for a worker.
        wait_s: That backward stood still for workers.
        overhead_s: Spent on recording, digests and sending in the trainer's own threads.
        spared_s: What functions took whose recomputation a worker did.
        up_bytes: To workers; down_bytes from them.
        calls: The number of reported segment calls.
        retries: The number of repeated requests of these calls.
        mismatches: Recomputations whose values were refused.
        upload_s: Seconds of uploads of segments. queue_s, recompute_s, backward_s and download_s are the other phases.
        exposed_queue_s: The part of queue_s for which backward was blocked. The rest costs nothing: segments that are
            replayed ahead wait for each other.
        remote_forward_s: The forward time of those calls that a worker recomputed.
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

    @property
    def remote(self) -> float:
        """Recomputations on workers."""
        return self.gradients + self.activations

    @property
    def fallback_rate(self) -> float:
        """Of the recomputations that were meant for a worker."""
        return self.fallbacks / meant if (meant := self.remote + self.fallbacks) else 0.0

    @property
    def transfer_s(self) -> float:
        """Up and down."""
        return self.upload_s + self.download_s

    def plus(self, other: "Totals") -> "Totals":
        """Both together."""
        return Totals._make(a + b for a, b in zip(self, other, strict=True))

    @classmethod
    def of_all(cls, parts: Iterable["Totals"]) -> Self:
        """All together."""
        return cls._make(map(sum, zip(cls(), *parts, strict=True)))

    @classmethod
    def of_step(cls, step: telemetry_pb2.Step) -> Self:
        """What a step says of itself."""
        return cls(
            steps=1,
            gradients=step.gradients,
            activations=step.activations,
            on_trainer=step.on_trainer,
            fallbacks=min(step.fallbacks, step.on_trainer),
            wait_s=step.wait_s,
            overhead_s=step.overhead_s,
            spared_s=step.spared_s,
            up_bytes=step.up_bytes,
            down_bytes=step.down_bytes,
        )

    @classmethod
    def of_call(cls, call: telemetry_pb2.SegmentCall, lanes: list[float]) -> Self:
        """What a call says beyond its step. `lanes` has the seconds of its spans by lane."""
        is_remote = call.decision in {"gradients", "activations"}
        return cls(
            calls=1,
            retries=call.retries,
            mismatches=call.mismatches,
            upload_s=lanes[telemetry_pb2.LANE_UPLOAD],
            queue_s=lanes[telemetry_pb2.LANE_QUEUE],
            recompute_s=lanes[telemetry_pb2.LANE_RECOMPUTE],
            backward_s=lanes[telemetry_pb2.LANE_BACKWARD],
            download_s=lanes[telemetry_pb2.LANE_DOWNLOAD],
            exposed_queue_s=_exposed_queue_s(call) if lanes[telemetry_pb2.LANE_QUEUE] else 0.0,
            remote_forward_s=lanes[telemetry_pb2.LANE_FORWARD] if is_remote else 0.0,
        )


def _exposed_queue_s(call: telemetry_pb2.SegmentCall) -> float:
    def spans(lane: telemetry_pb2.Lane.ValueType) -> list[Interval]:
        return union(
            (span.started_at_s, span.started_at_s + span.duration_s) for span in call.spans if span.lane == lane
        )

    return common(spans(telemetry_pb2.LANE_QUEUE), spans(telemetry_pb2.LANE_WAIT))


class RecentTotals:
    """Sums, second by second, for the last five minutes."""

    def __init__(self) -> None:
        self._series = Series(WINDOW_S, len(Totals._fields))

    def add(self, at_s: float, sums: Totals) -> None:
        """Counts them at that time."""
        self._series.add(at_s, sums)

    def since(self, at_s: float) -> Totals:
        """From then on."""
        return Totals._make(self._series.sums(at_s))
