"""What metrics are read from: the part of the watch that is exported to Prometheus."""

from collections.abc import Sequence
from typing import Protocol

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.addresses import Address


class WorkerSource(Protocol):
    """A worker as it was last seen."""

    @property
    def address(self) -> Address:
        """As given on the command line."""

    @property
    def state(self) -> str:
        """One of "serving", "draining" and "unreachable"."""

    @property
    def telemetry(self) -> telemetry_pb2.GetTelemetryResponse | None:
        """Its last answer, None before the first."""


class TrainerSums(Protocol):
    """Sums over steps and their segments, see `Sums`. Seconds of segments overlap."""

    @property
    def steps(self) -> float:
        """That ended."""

    @property
    def gradients(self) -> float:
        """Recomputations on a worker that gave gradients."""

    @property
    def activations(self) -> float:
        """Recomputations on a worker that gave activations."""

    @property
    def on_trainer(self) -> float:
        """Recomputations on the trainer."""

    @property
    def fallbacks(self) -> float:
        """Of those on the trainer: meant for a worker."""

    @property
    def retries(self) -> float:
        """Requests made again."""

    @property
    def mismatches(self) -> float:
        """Recomputations whose values were refused."""

    @property
    def wait_s(self) -> float:
        """That backward stood still for workers."""

    @property
    def overhead_s(self) -> float:
        """Spent on recording, digests and sending in trainers' own threads."""

    @property
    def spared_s(self) -> float:
        """What functions took whose recomputation a worker did."""

    @property
    def remote_forward_s(self) -> float:
        """Forward on the trainer, of segments that a worker recomputed."""

    @property
    def upload_s(self) -> float:
        """Of segments on their way up."""

    @property
    def queue_s(self) -> float:
        """Of segments behind other work."""

    @property
    def exposed_queue_s(self) -> float:
        """Of it: with backward standing still."""

    @property
    def recompute_s(self) -> float:
        """Of segments under recomputation on a worker."""

    @property
    def backward_s(self) -> float:
        """Of segments under backward on a worker."""

    @property
    def download_s(self) -> float:
        """Of results on their way down."""

    @property
    def up_bytes(self) -> float:
        """To workers."""

    @property
    def down_bytes(self) -> float:
        """From workers."""


class TrainerTotals(Protocol):
    """What trainers told since the dashboard began, those forgotten since included: sums and counts never fall."""

    @property
    def totals(self) -> TrainerSums:
        """Of all steps."""

    @property
    def dropped(self) -> int:
        """Steps and calls that were not reported, or not kept, because there was no room."""

    @property
    def saved_bytes(self) -> int:
        """What running trainers' last steps held less thanks to workers, at their end."""

    @property
    def running(self) -> int:
        """Runs that were heard of a moment ago."""


class MetricSource(Protocol):
    """All of it. `Watch` is one."""

    @property
    def workers(self) -> Sequence[WorkerSource]:
        """In the order of the command line."""

    @property
    def trainers(self) -> TrainerTotals:
        """Together: there may be many, and their names are no labels."""
