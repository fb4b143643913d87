"""What is known of one checkpointed call: for the report of its name, and for telemetry."""

from collections.abc import Callable
from functools import wraps
from time import time
from typing import ParamSpec

from backhaul._observe.journal import SegmentLog
from backhaul._observe.report import Decision
from backhaul._observe.run_events import EventKind
from backhaul._observe.telemetry import Telemetry
from backhaul_proto.v1 import segment_pb2, telemetry_pb2
from backhaul_runtime.errors import log_once
from backhaul_runtime.process.death_queue import DeathNotice
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.tensors.durations import Duration, wait_s
from backhaul_runtime.wire.protocol import MAX_NAME
from backhaul_runtime.wire.telemetry import MAX_SPANS

_SHOWN_OF_REASON = 1000
_USUAL_BACKWARD, _LONGEST_BACKWARD = 2.0, 3.0
"""A backward relative to its forward: that of matrix products, and the most that is assumed. Workers do other things
meanwhile, too, and what they took for those must not look like something that the trainer was spared."""

Lane = telemetry_pb2.Lane
P = ParamSpec("P")


def _safe(note: Callable[P, None]) -> Callable[P, None]:
    """Lets a method log what it would raise."""

    @wraps(note)
    def safely(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            note(*args, **kwargs)
        except Exception as error:  # no variable may refer to it: its traceback refers to frames
            log_once(error, "The report misses something. Please report it.")

    return safely


class CallLog:
    """The log of one checkpointed call. It is counted under its name, and reported with its step.

    All methods are thread-safe. Those that note something raise nothing: no count may end a forward or a backward.

    Args:
        log: The log of all calls with this name.
        telemetry: Where the call is reported; None if telemetry is off.

    Attributes:
        worker: Address of the worker that got the segment; empty if none did.
        reason: Why the segment is recomputed where it is, and returns what it does.
        retries: Number of repeated requests.
        mismatches: Number of recomputations whose values were rejected.
        micro_batch: The number of its micro-batch in an accumulation block, from 1; 0 outside a block.
        saved_bytes: Bytes that autograd saved in forward, minus those that the trainer keeps.
    """

    def __init__(self, log: SegmentLog, telemetry: Telemetry | None = None) -> None:
        self._log = log
        self._telemetry = telemetry
        self._frame: DeathNotice | None = None
        self.worker = ""
        self.decision: Decision | None = None
        self.reason = ""
        self.is_fallback = False
        self._function: Duration = 0.0
        self._backward_factor = 0.0
        self.overhead_s = 0.0
        self.spans: list[tuple[telemetry_pb2.Lane.ValueType, float, Duration]] = []
        self.up_bytes = self.down_bytes = self.retries = self.mismatches = self.micro_batch = 0
        self.saved_bytes = 0
        self.largest_drift = 0.0
        self._is_known, self._why_recorded, self._program = False, "", b""
        self.step = self.number = self.position = 0
        self._begin()

    @_safe
    def _begin(self) -> None:
        self._log.call()
        if self._telemetry is not None:
            self.step, self.number, self.position = self._telemetry.began(self, self.name)

    @property
    def name(self) -> str:
        """The name of the checkpointed function or module."""
        return self._log.name

    @_safe
    def forward(
        self, frame: object, recording: Recording, function: Duration, overhead_s: float, packed_bytes: int
    ) -> None:
        """Notes a forward that has just ended.

        Args:
            frame: The frame of the segment. When it dies, the call is complete.
            recording: The recording of the call.
            function: What the function took by itself.
            overhead_s: Seconds for which Backhaul occupied the thread.
            packed_bytes: Bytes that autograd saved and that are not kept.
        """
        self.saved_bytes = packed_bytes - recording.retained_bytes
        if self._telemetry is None:
            return
        self._function, self.overhead_s = function, overhead_s
        self._span(
            Lane.LANE_FORWARD, _began_at_s(function) - (overhead_s if isinstance(function, float) else 0.0), function
        )
        self._frame = self._telemetry.hold(frame, self.saved_bytes, overhead_s)

    @property
    def is_gone(self) -> bool:
        """Whether forward has ended and no backward can need the segment any more."""
        return self._frame is not None and self._frame() is None

    @_safe
    def add(self, decision: Decision, took: Duration) -> None:
        """Counts a recomputation that has just ended, and the time for which backward waited for it."""
        self._log.add(decision, took)
        # Kept activations say more about the call than a recomputation of its first part.
        if self.decision is not Decision.KEPT:
            self.decision = decision
        on_trainer = decision is Decision.TRAINER
        self._span(Lane.LANE_TRAINER if on_trainer else Lane.LANE_WAIT, _began_at_s(took), took)
        if self._telemetry is not None:
            # The time waited is that of the backward, too.
            factor = 1 + self._backward_factor if decision is Decision.GRADIENTS else 1.0
            spared = 0.0 if on_trainer else self._function
            self._telemetry.recomputed(decision, 0.0 if on_trainer else took, spared, factor)
        self._backward_factor = 0.0

    @_safe
    def wait(self, took: Duration) -> None:
        """Adds a time for which backward waited until now."""
        self._log.wait(took)
        self._span(Lane.LANE_WAIT, _began_at_s(took), took)
        if self._telemetry is not None:
            self._telemetry.waited(took)

    @_safe
    def known(self) -> None:
        """Counts a call whose program is known, see `SegmentLog`."""
        self._is_known = True
        self._log.known()

    @_safe
    def recorded(self, reason: str) -> None:
        """Notes why the call of a captured graph was recorded; empty if a later one of its kind need not be."""
        self._why_recorded = reason
        if reason:
            self._log.recorded(reason)

    @_safe
    def program(self, address: bytes) -> None:
        """Notes the address of the program that a worker gets."""
        self._program = address
        self._log.program(address)

    @_safe
    def traffic(self, up_bytes: int = 0, down_bytes: int = 0) -> None:
        """Counts the bytes of messages."""
        self._log.traffic(up_bytes, down_bytes)
        self.up_bytes += up_bytes
        self.down_bytes += down_bytes
        if self._telemetry is not None:
            self._telemetry.moved(up_bytes, down_bytes)

    @_safe
    def spared(self, size_bytes: int) -> None:
        """Counts bytes that were not sent because only the differences of parameters were."""
        self._log.spared(size_bytes)
        if self._telemetry is not None:
            self._telemetry.spared(size_bytes)

    @_safe
    def uploaded(self, took_s: float) -> None:
        """Notes the seconds of an upload that has just ended."""
        self._span(Lane.LANE_UPLOAD, time() - took_s, took_s)

    @_safe
    def answered(self, timing: segment_pb2.Timing, clock_offset_s: float) -> None:
        """Notes when a worker did the work of an answer whose last byte has just arrived.

        Args:
            timing: The times by the worker's clock.
            clock_offset_s: The worker's clock minus ours, in seconds, as estimated from the connection.
        """
        arrived_at_s = time()
        if self._telemetry is None or not timing.recompute_at_s:
            return
        done_at_s = timing.recompute_at_s + timing.recompute_s
        if timing.backward_at_s:
            done_at_s = timing.backward_at_s + timing.backward_s
        done_at_s = max(timing.requested_at_s, done_at_s)
        # The worker was done before its answer arrived. Where the estimate contradicts that, it is wrong by as much.
        clock_offset_s = max(clock_offset_s, done_at_s - arrived_at_s)
        self._span(Lane.LANE_QUEUE, timing.queued_at_s - clock_offset_s, timing.recompute_at_s - timing.queued_at_s)
        self._span(Lane.LANE_RECOMPUTE, timing.recompute_at_s - clock_offset_s, timing.recompute_s)
        ended_at_s = timing.recompute_at_s + timing.recompute_s
        if timing.backward_at_s:
            # The trainer never runs this backward. It would be slower than its forward by as much as on the worker.
            ratio = timing.backward_s / timing.recompute_s if timing.recompute_s > 0 else _USUAL_BACKWARD
            self._backward_factor = min(max(ratio, 0.0), _LONGEST_BACKWARD)
            ready_at_s = max(timing.requested_at_s, ended_at_s)
            self._span(Lane.LANE_QUEUE, ready_at_s - clock_offset_s, timing.backward_at_s - ready_at_s)
            self._span(Lane.LANE_BACKWARD, timing.backward_at_s - clock_offset_s, timing.backward_s)
        sent_at_s = done_at_s - clock_offset_s
        self._span(Lane.LANE_DOWNLOAD, sent_at_s, arrived_at_s - sent_at_s)

    @_safe
    def drift(self, drift: float) -> None:
        """Notes the drift of a recomputation."""
        self._log.drift(drift)
        self.largest_drift = max(self.largest_drift, drift)
        if self._telemetry is not None:
            self._telemetry.drifted(drift)

    @_safe
    def rechecked(self) -> None:
        """Counts gradients of a worker that the trainer has computed as well, and found equal."""
        self._log.rechecked()

    @_safe
    def not_rechecked(self, reason: str) -> None:
        """Notes why gradients of a worker that were drawn could not be computed a second time."""
        self._log.not_rechecked(reason)

    @_safe
    def on_trainer(self, reason: str, *, is_said: bool = False) -> None:
        """Notes why the trainer recomputes the segment, see `SegmentLog`."""
        self.reason = reason
        self._log.on_trainer(reason, is_said=is_said, step=self._counted_step)

    @_safe
    def kept(self, reason: str) -> None:
        """Notes why activations are kept, see `SegmentLog`."""
        self.reason, self.decision = reason, Decision.KEPT
        self._log.kept(reason, step=self._counted_step)

    @_safe
    def taken(self, needs_inside: str) -> None:
        """Notes that a worker got the segment, and why it will return activations; empty if it returns gradients."""
        self.reason = needs_inside or "only its gradients are needed"
        if needs_inside:
            self._log.inside(needs_inside)

    @_safe
    def fallback(self, reason: str, *, is_said: bool = False, is_refusal: bool = False) -> None:
        """Notes why the segment runs on the trainer instead of a worker, see `SegmentLog`.

        Args:
            reason: The reason, as the log and the report show it.
            is_said: Whether the reason was logged elsewhere.
            is_refusal: Whether a worker has refused the segment, for example for lack of memory.
        """
        self.reason, self.is_fallback = reason, True
        self._log.fallback(reason, is_said=is_said, step=self._counted_step)
        if self._telemetry is not None:
            self._telemetry.fell_back()
            kind: EventKind = "refused" if is_refusal else "fell_back"
            did = "was refused by its worker" if is_refusal else "ran on the trainer"
            text = f"Segment {self.name} {did}: {reason}"
            self._telemetry.events.add(kind, text, worker=self.worker, segment=self.name)

    def to_message(self) -> telemetry_pb2.SegmentCall:
        """Returns the call as a message of a report. Waits for what is being measured."""
        spans = ((lane, began_at_s, wait_s(took)) for lane, began_at_s, took in list(self.spans)[-MAX_SPANS:])
        return telemetry_pb2.SegmentCall(
            step=self.step,
            number=self.number,
            name=self.name[:MAX_NAME],
            position=self.position,
            worker=self.worker,
            decision=self.decision.value if self.decision else "",
            reason=self.reason[:_SHOWN_OF_REASON],
            is_fallback=self.is_fallback,
            spans=[
                telemetry_pb2.Span(lane=lane, started_at_s=began_at_s, duration_s=took_s)
                for lane, began_at_s, took_s in spans
            ],
            up_bytes=self.up_bytes,
            down_bytes=self.down_bytes,
            retries=self.retries,
            mismatches=self.mismatches,
            drift=self.largest_drift,
            overhead_s=self.overhead_s,
            micro_batch=self.micro_batch,
            capture=telemetry_pb2.Capture(
                is_known=self._is_known,
                reason=self._why_recorded[:_SHOWN_OF_REASON],
                program=int.from_bytes(self._program[:4], "big"),
                compilations=[
                    telemetry_pb2.TorchCompilation(took_s=one.took_s, guard=one.guard[:_SHOWN_OF_REASON])
                    for one in self._log.new_compilations()
                ],
            ),
        )

    @property
    def _counted_step(self) -> int | None:
        return self.step if self._telemetry is not None else None

    def _span(self, lane: telemetry_pb2.Lane.ValueType, began_at_s: float, took: Duration) -> None:
        if self._telemetry is not None and not (isinstance(took, float) and took <= 0):
            self.spans.append((lane, began_at_s, took))


def _began_at_s(took: Duration) -> float:
    """Returns when something began that has ended on the host now, in seconds since 1970."""
    return time() - took if isinstance(took, float) else took.began_at_s
