"""A checkpointed call, from before it runs until no backward can need it."""

from dataclasses import dataclass

import torch

from backhaul._observe.call_log import CallLog
from backhaul._torch_api.call_options import Options
from backhaul_runtime.errors import NotRemoteError
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.torch_internals.private import is_plain_backward

CPU = torch.device("cpu")


def not_remote(name: str, reason: str) -> NotRemoteError:
    """Returns the error for a segment of this name that no worker would recompute, for this reason."""
    return NotRemoteError(
        f"segment {name} would not be recomputed on a worker: {reason}. Remove the cause, or drop strict=True to let "
        "the trainer recompute it",
        segment=name,
        reason=reason,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointedCall:
    """A checkpointed call. It is created before the call runs.

    Attributes:
        name: The name of the function or module, for messages and reports.
        log: Counts what happens to the call.
        options: The options of the call.
        recording: The recording of the call. It grows during the call and does not change afterwards.
        local_reason: Why only the trainer can recompute the call, if that is known before the call; else empty.
        inside_reason: Why the graph of the segment's inside must stay, if options or regions decide that; else empty.
        device: The device that the call computes on, as far as its arguments show it.
    """

    name: str
    log: CallLog
    options: Options
    recording: Recording
    local_reason: str = ""
    inside_reason: str = ""
    device: torch.device = CPU

    def check_strict(self, reason: str, cause: Exception | None = None) -> None:
        """Raises NotRemoteError under `strict`. Call it before the trainer recomputes the segment or decides to.

        Args:
            reason: Why no worker recomputes the segment.
            cause: The unexpected exception behind the reason, from which the error is raised.
        """
        if self.options.strict:
            raise not_remote(self.name, reason) from cause

    def check_backward(self) -> None:
        """Raises RuntimeError for a backward that the reentrant form of torch's checkpoint rejects."""
        if self.options.use_reentrant and not is_plain_backward():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` "
                "parameter to .backward(). To resolve this error, you can either set use_reentrant=False, or call "
                ".backward() without passing the `inputs` argument."
            )
