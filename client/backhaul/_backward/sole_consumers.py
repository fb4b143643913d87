"""Finds sources of a segment that nothing has used after it, so that the worker may sum their contributions.

Autograd adds the contributions to a gradient one by one, those of the latest uses first. The first contributions may be
summed beforehand, because (a + b) + c is what autograd computes. Backward cannot see whether other contributions came
before. But a tensor that dies before any further autograd node was created cannot have been used later.
"""

import threading
import weakref
from collections.abc import Iterable

from torch import Tensor

from backhaul_runtime.torch_internals.private import next_sequence_number


class SoleConsumers:
    """The sources of one segment that nothing else can have used later.

    Attributes:
        watched: Indices of the sources that are outputs of earlier segments. Only these can become known.
    """

    def __init__(self) -> None:
        self.watched: frozenset[int] = frozenset()
        self._unused: list[int] = []
        self._watched: list[weakref.ref[Tensor]] = []

    @property
    def sources(self) -> set[int]:
        """Indices of the sources known so far."""
        return set(self._unused)

    def watch(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        """Watches sources, by index. Call it in the thread of forward, after the segment's own nodes were created."""
        unused, last = self._unused, (threading.get_ident(), next_sequence_number())

        def watched(index: int, tensor: Tensor) -> weakref.ref[Tensor]:
            def died(_: object) -> None:
                if (threading.get_ident(), next_sequence_number()) == last:  # each thread counts its own nodes
                    unused.append(index)

            return weakref.ref(tensor, died)

        by_index = dict(tensors)
        self.watched = frozenset(by_index)
        self._watched = [watched(index, tensor) for index, tensor in by_index.items()]
