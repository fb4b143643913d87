"""The memory that a running call reads, makes and writes to."""

from collections.abc import Sequence

from torch import Tensor

from backhaul_runtime.record.contents import Contents, FixedDigests
from backhaul_runtime.record.interior_memory import InteriorMemory
from backhaul_runtime.record.recording import RecordedSource
from backhaul_runtime.record.sources import Hold, SourceLedger


class CallMemory:
    """What the parts of a recording know of memory.

    Args:
        noted: The list to which sources are added. It may outlive the call.
        arguments: The tensors passed to the call.
        hold: Makes copies of tensors that may change before backward.
        fixed: Digests of parameters that do not change during the call; None to compute all digests.

    Attributes:
        sources: The tensors from outside that ops have used.
        interior: The memory that the ops have made.
        contents: Takes the digests of tensors.
    """

    def __init__(
        self, noted: list[RecordedSource], arguments: Sequence[Tensor], hold: Hold, fixed: FixedDigests | None
    ) -> None:
        self.sources = SourceLedger(noted, arguments, hold)
        self.interior = InteriorMemory(self.sources)
        self.contents = Contents(fixed)
