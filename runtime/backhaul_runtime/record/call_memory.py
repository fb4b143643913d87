"""The memory that a running call reads, makes and writes to."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from backhaul_runtime.record.contents import Contents, FixedDigests
from backhaul_runtime.record.interior_memory import InteriorMemory
from backhaul_runtime.record.recording import RecordedSource
from backhaul_runtime.record.sources import MakeCopy, SourceLedger


class SavedVersion(NamedTuple):
    """The version of a tensor that autograd has saved. A backward that reads another version is an error.

    Attributes:
        counter: A tensor without memory that has the version counter of the saved one.
        version: The version when the tensor was saved.
    """

    counter: Tensor
    version: int


Overwritten = Callable[[Tensor, Mapping[int, SavedVersion]], None]
"""Takes a tensor in the memory of saved tensors, and the versions of these by position."""


class CallMemory:
    """What the parts of a recording know of memory.

    Args:
        noted: The list to which sources are added. It may outlive the call.
        arguments: The tensors passed to the call.
        make_copy: Makes copies of tensors that may change before backward.
        fixed: Digests of parameters that do not change during the call; None to compute all digests.

    Attributes:
        sources: The tensors from outside that ops have used.
        interior: The memory that the ops have made.
        contents: Takes the digests of tensors.
        saved: The versions of the saved tensors in memory that the ops have made, by the key of the storage and by
            position.
        overwritten: Called before a write to such memory.
        has_overwritten_saved: Whether there was such a write.
    """

    def __init__(
        self, noted: list[RecordedSource], arguments: Sequence[Tensor], make_copy: MakeCopy, fixed: FixedDigests | None
    ) -> None:
        self.sources = SourceLedger(noted, arguments, make_copy)
        self.interior = InteriorMemory(self.sources)
        self.contents = Contents(fixed)
        self.saved: defaultdict[int, dict[int, SavedVersion]] = defaultdict(dict)
        self.overwritten: Overwritten = lambda *_: None
        self.has_overwritten_saved = False
