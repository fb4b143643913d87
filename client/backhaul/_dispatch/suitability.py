"""Whether a worker can recompute a segment of this trainer, and how people are told if it cannot."""

from collections.abc import Mapping

from backhaul._backward.frame import RecordedSegment
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul_runtime.errors import Refusal
from backhaul_runtime.process.fingerprint import DECISIVE


def check_suitable(
    segment: RecordedSegment, worker: str, worker_session: WorkerSession, mismatch: Mapping[str, tuple[str, str]]
) -> None:
    """Raises Refusal if a worker can't recompute a segment.

    Args:
        segment: The segment as it was recorded in forward.
        worker: The name of the worker.
        worker_session: The worker session that would get the segment.
        mismatch: Why the worker computes other bits than the trainer; empty if it does not.
    """
    recording = segment.call.recording
    # Other kernels round differently, which the tolerances of the value check allow for. Without recorded choices
    # they may also draw another mask or choose another maximum, which is another function.
    if mismatch and (not recording.has_recorded_choices or mismatch.keys() & DECISIVE):
        other = f"the worker {worker} computes other bits than this trainer: {in_words(mismatch)}"
        raise Refusal(recording.unrecorded_choices or other)
    # The worker itself refuses what exceeds its budget or is not allowed, but only after the tensors were sent.
    if segment.need_bytes > worker_session.budget_bytes:
        raise Refusal(
            f"it needs {segment.need_bytes} bytes on the worker, but the budget is {worker_session.budget_bytes}: "
            "start the worker with more --memory, or make the segment smaller"
        )
    if reason := worker_session.allowed.why_not_program(segment.program, recording.identities):
        raise Refusal(f"{reason}, says the worker {worker}")


def advice_on(mismatch: Mapping[str, tuple[str, str]]) -> str:
    """Returns what to do about differences of which one matters."""
    if "torch" in mismatch:
        return "Install the same torch on both sides"
    if "device" in mismatch:
        ours, theirs = mismatch["device"]
        return f"Start a worker with --device {ours}, or train on {theirs}"
    return 'Drop numerics="exact"'


def in_words(different: Mapping[str, tuple[str, str]]) -> str:
    """Returns what differs between two fingerprints, each with the trainer's value and the worker's."""
    return ", ".join(f"{key} is {ours} here and {theirs} there" for key, (ours, theirs) in different.items())
