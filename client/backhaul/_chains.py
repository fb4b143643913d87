"""Segments whose outputs are other segments' inputs: a worker goes on from one's backward into that of the one before.

It assumes that the gradient it found arrives there unchanged. The trainer always asks with the real one, by its
contents; where that is another (a skip connection, an auxiliary loss, a hook) the worker's guess was work for nothing.
So one whose gradient was another twice in a row is not named again.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backhaul._remote import SavedSegment

MOST_MISSES = 2
Site = tuple[bytes, int]
"""A program and a source of it."""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """A segment whose output is a source of another.

    Attributes:
        site: Where it is met step after step.
        segment: It.
        output: Position among its outputs.
    """

    site: Site
    segment: "weakref.ref[SavedSegment]"
    output: int

    @property
    def source(self) -> int:
        """Index among the other's sources."""
        return self.site[1]


class Chains:
    """Those of the segments on one worker, by what became of earlier ones. Used by several threads."""

    def __init__(self) -> None:
        self._misses: Counter[Site] = Counter()
        self._lock = threading.Lock()

    def is_worth(self, site: Site) -> bool:
        """Whether a guess has a chance."""
        return self._misses[site] < MOST_MISSES

    def check(self, expected: Mapping[int, tuple[bytes, Site]], actual: Mapping[int, bytes]) -> None:
        """Compares what a worker went on from with what came.

        Args:
            expected: Addresses by output, with their sites.
            actual: Likewise.
        """
        with self._lock:
            for output, (address, site) in expected.items():
                self._misses[site] = 0 if actual.get(output) == address else self._misses[site] + 1
