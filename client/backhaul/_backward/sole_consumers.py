"""Inputs of a segment that nothing used after it, so that the worker may sum the contributions to their gradients.

Autograd adds what the uses of a tensor contribute one by one, those made last first. Contributions that come first may
be added up before: (a + b) + c is what it does. Whether others came before is not to be seen in backward. But a tensor
that dies before any other node of autograd was made cannot have been used later.
"""

import threading
import weakref
from collections.abc import Iterable

from torch import Tensor

from backhaul_runtime.torch_internals.private import next_sequence_number


class SoleConsumers:
    """Of one segment."""

    def __init__(self) -> None:
        self._unused: list[int] = []
        self._watched: list[weakref.ref[Tensor]] = []

    @property
    def sources(self) -> set[int]:
        """Indices of those found so far."""
        return set(self._unused)

    def watch(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        """Watches sources, by index, once the segment's own nodes are made. Called by the thread that made them."""
        unused, last = self._unused, (threading.get_ident(), next_sequence_number())

        def watched(index: int, tensor: Tensor) -> weakref.ref[Tensor]:
            def died(_: object) -> None:
                if (threading.get_ident(), next_sequence_number()) == last:  # each thread counts for itself
                    unused.append(index)

            return weakref.ref(tensor, died)

        self._watched = [watched(index, tensor) for index, tensor in tensors]
