"""Memory that a trainer and a worker on the same host have both mapped, and the slots through which tensors pass.

NOTE [Regions]
1. A region is a memfd, sealed so that neither side can shrink it: access to memory that the other side has cut off
   would raise SIGBUS. It has no name, so the kernel frees it when the last process that has mapped it exits. The worker
   creates all regions, for both directions, because their bytes are part of the worker's budget.
2. A region has one direction. Only its sender decides where in the region a tensor is written. Each tensor gets a slot,
   which is two words in a table at the region's beginning. The sender writes a ticket, a number that it never uses
   twice, into the first word. The receiver copies the ticket into the second word when it no longer needs the tensor,
   and copies it with an additional bit set while it uses the tensor in place. So freeing a slot takes neither a message
   nor a lock, any destructor may do it, and a late destructor can't free a slot that holds another tensor since.
3. Seals do not prevent the sender from rewriting a tensor. So only processes of one user share regions, and the sender
   leaves the bytes of a slot alone until the receiver has freed the slot.
4. The worker uses tensors in place, and a trainer does so for saved tensors. A trainer copies gradients out of the
   region, because the user keeps them: memory of a region can't be resized, and a forked child of the trainer would see
   what the worker writes there later.
5. The seal of a message does not cover elements that lie in a region. Before the worker stores a tensor it compares
   the elements with the tensor's address. Before a trainer uses one it compares them with the checksum that the worker
   computed from the original and declared. After that they are memory like any other of the process.
6. The life of a slot, with ticket t. Word 0 is written by the sender only, word 1 by the receiver only:

       sender (Outbox)                          word 0   word 1       receiver (Region)
       put: takes free bytes and a slot            t     old or 0
       put: copies the tensor's bytes
       declares the Location in a message ──────────────────────▶     check: is the ticket t, are the bounds right?
                                                   t     t | IN_USE   use: maps the tensor in place
                                                   t     t            free_slot: the last reference died
                                              or   t     t            copy: has copied the bytes out
       sweep: reads t in word 1, reuses the slot

   The sender looks for freed slots only when it needs room.
7. A sender may free a slot itself only if the receiver will not read the declared location again. The trainer does so
   with `withdraw` when the worker has refused an upload. The worker does so with `end` when the trainer has sent ENDED
   for an answer; slots whose tensors the trainer uses in place stay taken. If the trainer does not know which slots of
   a failed upload the worker has used, it gives up all regions and asks for others.
"""

import ctypes
import fcntl
import itertools
import mmap
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import TransferError
from backhaul_runtime.tensors.layout import ALIGNMENT_BYTES, Layout, allocate, dense_bytes, payload, with_bits
from backhaul_runtime.wire.splicing import Batch
from backhaul_runtime.wire.tensor_batches import OutgoingTensor

LEAST_BYTES = 1 << 20
"""Size in bytes from which tensors use shared memory. Smaller ones are sent as chunks: a slot would save no time."""

IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")
"""Whether this system has sealed memfds and peer credentials, which only Linux has."""

_WORDS_PER_SLOT = 2
_WORD_BYTES = 8
_IN_USE = 1 << 63
Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"


class FreeList:
    """The free bytes of a region. Allocates first fit, and merges adjacent free ranges. Not thread-safe."""

    def __init__(self, begin: int, end: int) -> None:
        self._free = [(begin, end)]  # sorted, and never adjacent

    @property
    def free_bytes(self) -> int:
        """The sum of the free bytes, which need not be contiguous."""
        return sum(end - begin for begin, end in self._free)

    def take(self, size_bytes: int) -> int | None:
        """Allocates contiguous bytes. Returns their offset, or None if no free range is large enough."""
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size_bytes:
                self._free[index : index + 1] = [(begin + size_bytes, end)] if end - begin > size_bytes else []
                return begin
        return None

    def give(self, begin: int, size_bytes: int) -> None:
        """Frees bytes that `take` returned. Both arguments must be those of one allocation."""
        joined: list[tuple[int, int]] = []
        for piece in sorted([*self._free, (begin, begin + size_bytes)]):
            if joined and joined[-1][1] == piece[0]:
                joined[-1] = joined[-1][0], piece[1]
            else:
                joined.append(piece)
        self._free = joined


class Region:
    """A region as this process has mapped it. It stays mapped while any tensor in it is referenced.

    Args:
        number: The number by which both processes name the region.
        descriptor: The file descriptor of the memfd. The caller keeps ownership, and may close it once this returns.

    Attributes:
        size_bytes: The size of the region in bytes, including its table.
        slots: The number of slots in its table: it holds at most that many tensors.
        begin: The offset in bytes of the first byte after the table.

    Raises:
        TransferError: The memfd is not sealed against resizing (Rule 1).
        OSError: The memfd can't be mapped.
    """

    def __init__(self, number: int, descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransferError(
                f"region {number} of shared memory is not sealed: its sender could shrink it while it is read"
            )
        self.number = number
        self.size_bytes = os.fstat(descriptor).st_size
        self.slots = self.size_bytes // LEAST_BYTES
        self.begin = _aligned(self.slots * _WORDS_PER_SLOT * _WORD_BYTES)
        # MAP_POPULATE maps all pages now. Otherwise the first copy into each page would take a page fault.
        self._memory = mmap.mmap(descriptor, self.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._words = memoryview(self._memory).cast("Q")
        # The byte range of each tensor that this process, as receiver, uses in place, by slot and ticket. A destructor
        # can run between any two instructions, also inside `use`. So it takes no lock: it removes the entry and queues
        # the size, and `used_bytes` subtracts what is queued.
        self._used: dict[tuple[int, int], range] = {}
        self._freed_bytes = deque[int]()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors in it that this process uses in place. Only for the thread that calls `use`."""
        while self._freed_bytes:
            # The threads of a trainer call `use` concurrently, so another may have emptied the queue. Their sum may be
            # off, but only the worker reads it, and the worker calls from one thread.
            with suppress(IndexError):
                self._used_bytes -= self._freed_bytes.popleft()
        return self._used_bytes

    def raw(self, begin: int, size_bytes: int) -> Bytes:
        """Returns a range of its bytes as a view that keeps the region mapped. Writable: only the sender may write."""
        return np.frombuffer(self._memory, np.uint8, size_bytes, begin)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory lies in the region."""
        begin = self.raw(0, 1).ctypes.data
        return begin <= tensor.data_ptr() < begin + self.size_bytes

    # Called by the sender only

    def open(self, slot: int, ticket: int) -> None:
        """Writes the ticket of the next tensor into a slot that is free (Rule 2)."""
        self._words[_WORDS_PER_SLOT * slot] = ticket

    def is_back(self, slot: int, ticket: int) -> bool:
        """Whether the receiver has freed the slot since this ticket was written."""
        return self._words[_WORDS_PER_SLOT * slot + 1] == ticket

    def is_used(self, slot: int, ticket: int) -> bool:
        """Whether the receiver uses the tensor with this ticket in place."""
        return self._words[_WORDS_PER_SLOT * slot + 1] == ticket | _IN_USE

    # Called by the receiver only

    def check(self, location: tensor_pb2.Location, layout: Layout) -> None:
        """Raises TransferError if no tensor of this layout can be at the location. Reads no element."""
        slot, ticket, begin = location.slot, location.ticket, location.offset_bytes
        end = begin + layout.span_bytes
        problem = None
        if not Outbox.takes(layout):
            problem = "can't be in shared memory"
        elif begin < self.begin + layout.alignment_bytes or end > self.size_bytes:
            problem = f"is outside of its {self.size_bytes} bytes"
        elif begin % ALIGNMENT_BYTES != layout.alignment_bytes:
            problem = "is not aligned as declared"
        elif slot >= self.slots or self._words[_WORDS_PER_SLOT * slot] != ticket or self.is_back(slot, ticket):
            problem = f"is not what slot {slot} is used for"
        elif any(begin < used.stop and used.start < end for used in list(self._used.values())):
            problem = "overlaps one that is in use"
        if problem is not None:
            raise TransferError(f"a tensor at byte {begin} of region {self.number} {problem}: {layout}")

    def use(self, location: tensor_pb2.Location, layout: Layout) -> Tensor:
        """Returns the tensor at a location that `check` accepted, without copying it.

        The tensor must not be written to. Its slot is freed when its storage dies. The caller compares the elements
        before anything uses them (Rule 5).
        """
        begin = location.offset_bytes
        self._used[location.slot, location.ticket] = range(begin, begin + layout.span_bytes)
        self._used_bytes = self.used_bytes + layout.span_bytes
        self._words[_WORDS_PER_SLOT * location.slot + 1] = location.ticket | _IN_USE
        raw = self._raw_of(location, layout)
        # The finalizer watches the array, not the tensor: the storage, which views share, keeps the array alive, and
        # the array keeps the mapping.
        weakref.finalize(raw, self.free_slot, location.slot, location.ticket).atexit = False
        return _tensor_in(raw, layout)

    def free_slot(self, slot: int, ticket: int) -> None:
        """Frees the slot of a tensor in use. Does nothing if it is free already. Any thread may call it.

        The caller may free the slot while the tensor still exists, provided that nothing reads the tensor again.
        """
        used = self._used.pop((slot, ticket), None)
        if used is not None:
            self._freed_bytes.append(len(used))
            self._give_back(slot, ticket)

    def copy(self, location: tensor_pb2.Location, layout: Layout) -> Tensor:
        """Returns a copy of the tensor at a location that `check` accepted, and frees its slot. The caller owns it.

        The caller compares the elements before anything uses them (Rule 5).
        """
        copied = allocate(layout)
        _move(copied.data_ptr(), self.raw(location.offset_bytes, layout.span_bytes).ctypes.data, layout.span_bytes)
        self._give_back(location.slot, location.ticket)
        return with_bits(copied, layout)

    def _raw_of(self, location: tensor_pb2.Location, layout: Layout) -> Bytes:
        gap = layout.alignment_bytes
        return self.raw(location.offset_bytes - gap, gap + layout.span_bytes)

    def _give_back(self, slot: int, ticket: int) -> None:
        self._words[_WORDS_PER_SLOT * slot + 1] = ticket


def checksum_of(tensor: Tensor, layout: Layout) -> int:
    """Returns the xxh3_64 of the elements of a tensor whose layout `Outbox.takes`."""
    return xxhash.xxh3_64_intdigest(dense_bytes(tensor, layout))


_move = ctypes.memmove
"""Releases the GIL. A fifth faster than Tensor.copy_, because it writes large copies past the caches."""


def _aligned(size_bytes: int) -> int:
    return size_bytes + -size_bytes % ALIGNMENT_BYTES


def _tensor_in(raw: Bytes, layout: Layout) -> Tensor:
    tensor = torch.empty(0, dtype=layout.dtype)
    storage = torch.from_numpy(raw).untyped_storage()
    tensor.set_(storage, layout.alignment_bytes // layout.dtype.itemsize, layout.shape, layout.strides)
    return with_bits(tensor, layout)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place that a sender has written one tensor to.

    Attributes:
        region: The region that holds the tensor.
        slot: The number of the slot in its region.
        begin: The offset of the bytes that were taken from the region.
        size_bytes: The number of bytes that were taken.
        ticket: A number that identifies this use of the slot.
    """

    region: Region
    slot: int
    begin: int
    size_bytes: int
    ticket: int

    def location(self, layout: Layout, checksum: int = 0) -> tensor_pb2.Location:
        """Returns the location of the tensor for its declaration in a message.

        Args:
            layout: The layout of the tensor.
            checksum: `checksum_of` the tensor if the receiver is a trainer; a worker compares the address (Rule 5).
        """
        offset = self.begin + layout.alignment_bytes
        return tensor_pb2.Location(
            region=self.region.number, slot=self.slot, offset_bytes=offset, ticket=self.ticket, checksum=checksum
        )


class _Sending:
    """The allocations in a region that this process sends through. The caller holds the lock of the `Outbox`."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.room = FreeList(region.begin, region.size_bytes)
        self.taken: dict[int, Slot] = {}  # slots that are not free, by number

    def sweep(self) -> None:
        for slot in list(self.taken.values()):
            if self.region.is_back(slot.slot, slot.ticket):
                self.give(slot)

    def take(self, size_bytes: int, ticket: int) -> Slot | None:
        self.sweep()
        begin = self.room.take(size_bytes)
        if begin is None:
            return None
        slot = next(slot for slot in range(self.region.slots) if slot not in self.taken)
        self.region.open(slot, ticket)
        taken = self.taken[slot] = Slot(self.region, slot, begin, size_bytes, ticket)
        return taken

    def give(self, returned: Slot) -> None:
        taken = self.taken.get(returned.slot)
        # A caller may return a slot that a sweep has freed and that holds another tensor now. Without the comparison of
        # tickets that tensor would be overwritten while the receiver reads it.
        if taken is not None and taken.ticket == returned.ticket:
            del self.taken[returned.slot]
            self.room.give(returned.begin, returned.size_bytes)


class Outbox:
    """The regions that this process sends through. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the free lists and slots in `_regions`, not the bytes of taken slots
        self._regions: dict[int, _Sending] = {}
        self._tickets = itertools.count(1)

    def add(self, region: Region) -> None:
        """Adds a region to send through."""
        with self._lock:
            self._regions[region.number] = _Sending(region)

    def close(self) -> None:
        """Drops all regions, so that `put` returns None.

        Takes no lock: in a forked child the thread that held the lock does not exist, and the lock is never released.
        """
        self._regions = {}

    @staticmethod
    def takes(layout: Layout) -> bool:
        """Returns whether a tensor of this layout may use shared memory: on the CPU, without gaps, large enough."""
        return layout.payload_bytes == layout.span_bytes >= LEAST_BYTES and layout.device == "cpu"

    def lacks_bytes(self, next_bytes: int) -> int:
        """Returns how many bytes must become free before an upload of `next_bytes` fits; 0 or less if it fits now."""
        with self._lock:
            for sending in self._regions.values():
                sending.sweep()
            return next_bytes - sum(sending.room.free_bytes for sending in self._regions.values())

    def put(self, outgoing: OutgoingTensor) -> Slot | None:
        """Copies a tensor, whose layout it `takes`, into a free slot. Returns None if no region has room.

        The tensor may change once this returns.

        Raises:
            UnsupportedTensorError: The tensor's storage was freed.
        """
        layout = outgoing.layout
        slot = self._take(_aligned(layout.alignment_bytes + layout.span_bytes))
        if slot is not None:
            try:
                data = payload(outgoing.tensor.detach(), layout)
                target = slot.region.raw(slot.begin + layout.alignment_bytes, layout.span_bytes)
                _move(target.ctypes.data, data.data_ptr(), layout.span_bytes)
            except BaseException:
                self.withdraw([slot])
                raise
        return slot

    def withdraw(self, slots: Iterable[Slot]) -> None:
        """Frees slots that the receiver will not read again (Rule 7). Ignores those that the receiver has freed."""
        with self._lock:
            for slot in slots:
                sending = self._regions.get(slot.region.number)
                if sending is not None:
                    sending.give(slot)

    def end(self, slots: Iterable[Slot]) -> None:
        """Frees the slots of an answer that the receiver has finished reading, except those that it uses in place."""
        self.withdraw([slot for slot in slots if not slot.region.is_used(slot.slot, slot.ticket)])

    def _take(self, size_bytes: int) -> Slot | None:
        with self._lock:
            ticket = next(self._tickets)
            slots = (sending.take(size_bytes, ticket) for sending in self._regions.values())
            return next((slot for slot in slots if slot is not None), None)


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if IS_AVAILABLE else 0


def make_memory(size_bytes: int) -> int:
    """Creates a sealed memfd with all pages allocated, and returns its descriptor, which the caller owns.

    Raises:
        OSError: The host has too little memory, or too few descriptors are left.
    """
    descriptor = os.memfd_create("backhaul", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        # Without the allocation a write to a page that the host can't provide would kill the process with SIGBUS.
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def shared_bytes(batch: Batch | tensor_pb2.TensorBatch | None) -> int:
    """Returns the bytes of those tensors of a message that lie in shared memory."""
    declarations = batch.declarations if batch is not None else ()
    return sum(declaration.size_bytes for declaration in declarations if declaration.HasField("location"))
