"""The memory that a running call reads, makes and writes to."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from backhaul_runtime.record.contents import Contents, FixedDigests
from backhaul_runtime.record.interior_memory import InteriorMemory
from backhaul_runtime.record.recording import RecordedSource
from backhaul_runtime.record.sources import Hold, SourceLedger

Overwritten = Callable[[Tensor, Iterable[int], int | None], None]
"""Takes a tensor in the memory of saved tensors that autograd does not see a write to, their positions, and the version
that the tensor must keep; None for any version."""


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
        saved: Positions of the saved tensors in memory that the ops have made, with their versions when they were
            saved, by the key of their storage.
        unseen_aliases: Tensors in such memory that no op has made, as `.data` does.
        overwritten: Called before a write to such memory that autograd does not see.
    """

    def __init__(
        self, noted: list[RecordedSource], arguments: Sequence[Tensor], hold: Hold, fixed: FixedDigests | None
    ) -> None:
        self.sources = SourceLedger(noted, arguments, hold)
        self.interior = InteriorMemory(self.sources)
        self.contents = Contents(fixed)
        self.saved: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self.unseen_aliases: list[Tensor] = []
        self.overwritten: Overwritten = lambda *_: None
