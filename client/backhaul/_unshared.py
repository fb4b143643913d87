"""Inputs of a segment that nobody used after it, so that the worker may add their gradient's contributions up.

Autograd adds what the uses of a tensor contribute one by one, those made last first. Contributions that come first may
be added up before: (a + b) + c is what it does. Whether others came before is not to be seen in backward. But a tensor
that dies before any other node of autograd was made can have been used by nobody later.
"""

import threading
import weakref
from collections.abc import Iterable

from torch import Tensor
from torch._C._autograd import _get_sequence_nr


class Unshared:
    """Of one segment.

    Attributes:
        sources: Indices of those found so far.
    """

    def __init__(self) -> None:
        self.sources: set[int] = set()
        self._watched: list[weakref.ref[Tensor]] = []

    def watch(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        """Watches sources, by index, once the segment's own nodes are made. Called by the thread that made them."""
        sources, last = self.sources, (threading.get_ident(), _get_sequence_nr())

        def watched(index: int, tensor: Tensor) -> weakref.ref[Tensor]:
            def died(_: object) -> None:
                if (threading.get_ident(), _get_sequence_nr()) == last:  # each thread counts for itself
                    sources.add(index)

            return weakref.ref(tensor, died)

        self._watched = [watched(index, tensor) for index, tensor in tensors]
