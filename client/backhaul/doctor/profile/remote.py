"""Measures a model with a worker: what recording, sending, recomputing and receiving a segment costs.

NOTE [Remote costs]
1. A session runs real steps. Its reports, which go to dashboards otherwise, stay here and give the durations of each
   call: the replay and the backward by the worker's clock and, on an accelerator, what recording added on the trainer.
   On a CPU, recording is what the caller's thread computes in forward more than without a session.
2. Sending and receiving is counted in CPU time of the threads that did not exist before the session, so that waiting
   does not count. The caller's thread checks answers, which counts as receiving.
3. Parameters change between steps, as in training, so that trained weights travel in each of them.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import thread_time

import torch

from backhaul._config import GraphUse
from backhaul._torch_api.wrap import unwrap
from backhaul.doctor.profile.costs import PlainProfile, SegmentTimes
from backhaul.doctor.profile.observed import ObservedSession
from backhaul.doctor.profile.plain import ROUNDS, synchronise, undisturbed, update
from backhaul.doctor.profile.target import Target
from backhaul.doctor.profile.thread_times import thread_times
from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.resources import usable_cores

WARM_ROUNDS = 3
"""Steps before those that count: the first sends all weights, and the second one is the first with joined layers."""

Lane = telemetry_pb2.Lane


def has_free_transport() -> bool:
    """Whether other cores than those that compute are free to send and receive."""
    return usable_cores() > torch.get_num_threads()


def compute_threads() -> frozenset[int]:
    """Returns the ids of this process's threads. Call it before the session opens, after a step (Rule 2)."""
    return frozenset(_ran_s())


def _ran_s() -> dict[int, float]:
    """Returns the CPU seconds of each thread of this process; only of the calling one if the kernel has no /proc."""
    ran = {thread: times.ran_s for thread, times in thread_times().items()}
    return ran or {threading.get_native_id(): thread_time()}


def _transport_s(computing: frozenset[int]) -> float:
    return sum(seconds for thread, seconds in _ran_s().items() if thread not in computing)


@dataclass(slots=True)
class _Step:
    number: int
    forward_s: float  # of the caller's thread, as the next one
    backward_s: float
    upload_s: float  # of the other threads in forward, as the next one in backward
    finish_s: float


class RemoteMeasurement:
    """Steps of a model with one length of segments. `times` returns what they cost once the session is closed.

    Args:
        target: The model to measure.
        session: The open session with the worker.
        segment_layers: Number of layers of a segment.
        computing: Ids of the threads that compute, from `compute_threads`.
        graphs: Whether Backhaul compiles the segments, see `backhaul.connect`.
    """

    def __init__(
        self,
        target: Target,
        session: ObservedSession,
        segment_layers: int,
        computing: frozenset[int],
        graphs: GraphUse = "off",
    ) -> None:
        self._target, self._session, self._segment_layers = target, session, segment_layers
        self._graphs = graphs
        self._computing = computing
        self._steps: list[_Step] = []

    def run(self, rounds: int = ROUNDS) -> None:
        """Runs some steps. Changes the model's parameters a little.

        Raises:
            Exception: Whatever the model raises.
        """
        target, session = self._target, self._session
        trained = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
        session.wrap(target.model, target.kinds, segment_layers=self._segment_layers, graphs=self._graphs)
        try:
            for number in range(WARM_ROUNDS + rounds):
                torch.manual_seed(number)
                step = self._step()
                update(trained)
                step.number = session.end_step()
                if number >= WARM_ROUNDS:
                    self._steps.append(step)
        finally:
            unwrap(target.model)

    def _step(self) -> _Step:
        device = self._target.device
        transport_s, main_s = _transport_s(self._computing), thread_time()
        loss = self._target.forward()
        synchronise(device)
        sent_s, forward_s = _transport_s(self._computing), thread_time() - main_s
        main_s = thread_time()
        loss.backward()  # type: ignore[no-untyped-call]
        synchronise(device)
        received_s = _transport_s(self._computing)
        return _Step(0, forward_s, thread_time() - main_s, sent_s - transport_s, received_s - sent_s)

    def times(self, plain: PlainProfile) -> SegmentTimes:
        """Returns what a segment costs. The session must be closed.

        Args:
            plain: What the model costs without a worker.
        """
        numbers = {step.number for step in self._steps}
        calls = [call for call in self._session.calls if call.step in numbers]
        steps = max(1, len(self._steps))
        segments = max(1, round(len(calls) / steps))
        remote = [call for call in calls if call.decision in {"gradients", "activations"}]
        reasons = Counter(call.reason for call in calls if call.decision in {"trainer", "kept"})
        return SegmentTimes(
            layers=self._segment_layers,
            segments=segments,
            record_s=self._record_s(plain, remote, segments),
            replay_s=_lane(remote, Lane.LANE_RECOMPUTE),
            replay_backward_s=_lane(remote, Lane.LANE_BACKWARD),
            upload_s=max(0.0, undisturbed([step.upload_s for step in self._steps])) / segments,
            finish_s=undisturbed(
                [step.finish_s + max(0.0, step.backward_s - plain.outside_backward_s) for step in self._steps]
            )
            / segments,
            remote=round(len(remote) / steps),
            reasons={reason: -(-count // steps) for reason, count in reasons.items()},
        )

    def _record_s(self, plain: PlainProfile, calls: Sequence[telemetry_pb2.SegmentCall], segments: int) -> float:
        """Returns the time that recording adds to the forward of a segment, in seconds (Rule 1)."""
        if self._target.device.type == "cpu":
            return max(0.0, undisturbed([step.forward_s for step in self._steps]) - plain.whole_forward_s) / segments
        return undisturbed([call.overhead_s for call in calls] or [0.0])


def _lane(calls: Sequence[telemetry_pb2.SegmentCall], lane: Lane.ValueType) -> float:
    """Returns the duration of a phase, in seconds; 0 if no call had it."""
    durations = [span.duration_s for call in calls for span in call.spans if span.lane == lane]
    return undisturbed(durations) if durations else 0.0
