"""Transfers whose tensors travel over several connections at once.

NOTE [Stripes]
1. A session has one main connection and any number of lanes, which are further connections to the same worker. A
   transfer, an upload or an answer, is a call on the main connection. Its first message with tensors declares all of
   them, so that the receiver can refuse them, and charge them, as in any other transfer.
2. Nobody plans which connection carries what. The pieces are one list, and each connection takes the next message from
   it when it can send one. So a slow connection takes fewer, and one that never joins takes none: nothing waits for it.
3. The pieces come in any order. The receiver accepts each byte once: an overlap, a piece outside its tensor and a
   second declaration are errors. A tensor is complete when all of its bytes have come, and is then compared with its
   digest like any other.
4. A lane names the transfer by the session's id, which only the worker and the trainer know, and by a number within
   the session. The call must show a token of the credential that opened the session.
5. A message that a broken lane has taken is lost, and with it the transfer. The trainer gives up the lane, makes sure
   that the worker answers on the main connection, and repeats the transfer there without lanes.
6. A stalled lane counts as broken when nothing of its transfer has moved for the trainer's `silence_s`, or for half of
   it in an upload.
"""

import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Generic, TypeVar

from backhaul_runtime.wire.protocol import CHUNK_BYTES, MAX_DECLARED
from backhaul_runtime.wire.splicing import Batch
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches, payload_bytes

T = TypeVar("T")

STRIPED_BYTES = 2 * CHUNK_BYTES
"""Transfers of fewer bytes are not striped: they take one message, or hardly more."""


def can_stripe(outgoing_tensors: Sequence[OutgoingTensor]) -> bool:
    """Whether a transfer is large enough to be striped, and one message can declare all of its tensors."""
    return payload_bytes(outgoing_tensors) >= STRIPED_BYTES and len(outgoing_tensors) <= MAX_DECLARED


def stripes(outgoing_tensors: Sequence[OutgoingTensor]) -> tuple[Batch, Generator[Batch]]:
    """Returns the batch that declares all tensors, and the batches with their pieces, of about CHUNK_BYTES each.

    The batches share the memory of the tensors, which must not change until all messages have been sent.
    """
    declaring = Batch([outgoing.declaration() for outgoing in outgoing_tensors])
    return declaring, _pieces(outgoing_tensors)


def _pieces(outgoing_tensors: Sequence[OutgoingTensor]) -> Generator[Batch]:
    for batch in batches(outgoing_tensors):
        batch.declarations.clear()
        if batch.chunks:
            yield batch


class InTurns(Generic[T]):
    """An iterator that several threads share: each item goes to one of them. Thread-safe.

    Args:
        items: The iterator to share. Its code runs in the threads that take items, in one at a time.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()  # held by the thread that takes an item

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)
