"""Segments whose outputs are other segments' inputs: a worker goes on from one's backward into that of the one before.

It assumes that the gradient it found arrives there unchanged. The trainer always asks with the real one, by its
contents; where that is another (a skip connection, an auxiliary loss, a hook) the worker's guess was work for nothing.
So an input whose gradient was another twice in a row is not named again.
"""

import weakref
from dataclasses import dataclass
from typing import Protocol

MOST_MISSES = 2


class SpeculationHistory:
    """Counts wrong guesses of a worker for the segments called at one place, by source.

    Thread-safe without a lock: if two threads count at once a miss may be lost, which costs one useless guess.
    """

    def __init__(self) -> None:
        self._misses: dict[int, int] = {}

    def should_speculate(self, source: int) -> bool:
        """Whether to name the source again: its last guesses were not both wrong."""
        return self._misses.get(source, 0) < MOST_MISSES

    def count(self, source: int, *, is_right: bool) -> None:
        """Notes whether a guess of this source's gradient was right."""
        self._misses[source] = 0 if is_right else self._misses.get(source, 0) + 1


class ChainedSegment(Protocol):
    """A segment that a worker has.

    Attributes:
        expected: The gradients with which the worker has run its backward already, by output.
    """

    expected: dict[int, "SpeculativeGradient"]

    @property
    def number(self) -> int:
        """The number, unique within the session."""
        ...


@dataclass(frozen=True, slots=True)
class Predecessor:
    """A segment whose output is a source of another.

    Attributes:
        speculation: The guesses at the place where the other segment was called.
        source: Index among the other segment's sources.
        segment: The segment that made the output.
        output: Position among that segment's outputs.
    """

    speculation: SpeculationHistory
    source: int
    segment: weakref.ref[ChainedSegment]
    output: int


@dataclass(frozen=True, slots=True)
class SpeculativeGradient:
    """A gradient with which a worker ran a backward before it was asked to.

    Attributes:
        address: Content address of the gradient.
        predecessor: The connection between two segments by which the worker guessed it.
    """

    address: bytes
    predecessor: Predecessor

    def check(self, actual: bytes | None) -> None:
        """Notes whether the guess was right.

        Args:
            actual: Content address of the gradient that backward has, None if it has none.
        """
        self.predecessor.speculation.count(self.predecessor.source, is_right=actual == self.address)
