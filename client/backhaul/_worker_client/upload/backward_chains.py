"""Chains of segments: after the backward of a segment, the worker continues with that of its predecessor.

A predecessor is a segment whose output is a source of the later segment. The worker assumes that the gradient which it
computed for that source arrives at the predecessor unchanged. The trainer always requests the backward with the actual
gradient, named by its contents. If that gradient differs (because of a skip connection, an auxiliary loss or a hook),
the speculative backward was useless. So after two wrong predictions in a row a source is not named again.
"""

import weakref
from dataclasses import dataclass
from typing import Protocol

from backhaul_runtime.tensors.layout import Layout

MOST_MISSES = 2


class SpeculationHistory:
    """Counts a worker's wrong predictions for the segments of one call site, by source.

    Thread-safe without a lock: if two threads count at once, a miss may be lost, which costs one useless prediction.

    Attributes:
        is_derived: Whether the worker was to compute a source of the last segment itself.
        can_derive: Whether it has never computed another value than the trainer's.
    """

    def __init__(self) -> None:
        self.is_derived, self.can_derive = False, True
        self._misses: dict[int, int] = {}

    def should_speculate(self, source: int) -> bool:
        """Returns whether to name the source again: its last two predictions were not both wrong."""
        return self._misses.get(source, 0) < MOST_MISSES

    def count(self, source: int, *, is_right: bool) -> None:
        """Notes whether the gradient of this source was predicted correctly."""
        self._misses[source] = 0 if is_right else self._misses.get(source, 0) + 1


class ChainedSegment(Protocol):
    """A segment that a worker stores: `SavedSegment`, whose layer is above this one.

    Attributes:
        expected: The gradients with which the worker has already run its backward, by output.
    """

    expected: dict[int, "SpeculativeGradient"]

    @property
    def number(self) -> int:
        """The number of the segment, unique within the session."""
        ...


@dataclass(frozen=True, slots=True)
class Predecessor:
    """A segment whose output is a source of a later segment.

    Attributes:
        speculation: The history of the call site of the later segment.
        source: Index among the later segment's sources.
        segment: The segment that produced the output.
        output: Position among that segment's outputs.
        derived: The layout of the source if the worker is to compute it from the output; None if it is sent.
    """

    speculation: SpeculationHistory
    source: int
    segment: weakref.ref[ChainedSegment]
    output: int
    derived: Layout | None = None


@dataclass(frozen=True, slots=True)
class SpeculativeGradient:
    """A gradient with which a worker ran a speculative backward.

    Attributes:
        address: Content address of the gradient.
        predecessor: The relation between the two segments, through which the worker predicted the gradient.
    """

    address: bytes
    predecessor: Predecessor

    def check(self, actual: bytes | None) -> None:
        """Notes whether the prediction was right.

        Args:
            actual: Content address of the gradient in backward; None if there is none.
        """
        self.predecessor.speculation.count(self.predecessor.source, is_right=actual == self.address)
