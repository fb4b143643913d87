"""Tensors between processes of one host: memory that both have mapped, and who may write where.

NOTE [Regions]
1. A region is a memfd, sealed so that neither side can shrink it under the other, which would be a SIGBUS. It has no
   name, so nothing of it is left when the last process that has it is gone. The worker makes all of them: what they
   take is the worker's to bound.
2. A region has one direction. Its sender alone decides where in it a tensor goes. For each tensor it takes a slot, two
   words in a table at the region's beginning: it writes a ticket, never the same twice, into the first, and the
   receiver copies it into the second when it needs the tensor's bytes no more, with a bit set while it uses them in
   place. So giving back takes neither a message nor a lock, any destructor may do it, and one that comes late can't
   free what was given to somebody else since.
3. Seals don't stop rewriting: only processes of one user share regions, and what a slot holds is its receiver's until
   that gives it back.
4. The worker uses tensors in place, and a trainer what autograd saved. Gradients, which its user keeps, it copies out:
   memory of a region can't be resized, and a child that the trainer forks would see what comes after it.
5. The seal of a message does not cover elements that lie in a region. Before the worker stores a tensor it compares
   the elements with the tensor's address. Before a trainer uses one it compares them with the checksum that the worker
   took of the original and declared. After that they are memory like any other of the process.
"""

import ctypes
import fcntl
import itertools
import mmap
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import TransferError
from backhaul_runtime.tensors.layout import ALIGNMENT_BYTES, Layout, allocate, dense_bytes, payload, with_bits
from backhaul_runtime.wire.splicing import Batch
from backhaul_runtime.wire.tensor_stream import OutgoingTensor

LEAST_BYTES = 1 << 20
"""Smaller tensors go as chunks: there a slot saves nothing."""

IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")
"""Linux has what it takes."""

_WORDS_PER_SLOT = 2
_WORD_BYTES = 8
_IN_USE = 1 << 63
_CREDENTIALS = struct.Struct("3i")
_OFFER = struct.Struct("<?I")
_ASK = struct.Struct("<BQ")
Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"


class FreeList:
    """Which bytes of a region are free: first fit, and neighbours that are free become one."""

    def __init__(self, begin: int, end: int) -> None:
        self._free = [(begin, end)]  # in order

    @property
    def free_bytes(self) -> int:
        """In all."""
        return sum(end - begin for begin, end in self._free)

    def take(self, size_bytes: int) -> int | None:
        """Where so many bytes in a row are the caller's now, None where there are not as many."""
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size_bytes:
                self._free[index : index + 1] = [(begin + size_bytes, end)] if end - begin > size_bytes else []
                return begin
        return None

    def give(self, begin: int, size_bytes: int) -> None:
        """Takes bytes back that were taken."""
        joined: list[tuple[int, int]] = []
        for piece in sorted([*self._free, (begin, begin + size_bytes)]):
            if joined and joined[-1][1] == piece[0]:
                joined[-1] = joined[-1][0], piece[1]
            else:
                joined.append(piece)
        self._free = joined


class Region:
    """A region as this process has it mapped, until no tensor in it is referenced.

    Args:
        number: Names it between the two processes.
        descriptor: The file descriptor of its memfd, which the caller still owns.

    Attributes:
        size_bytes: The size of the region, including its table.
        slots: How many tensors it can hold.
        begin: The offset of the bytes behind the table.

    Raises:
        TransferError: It is not sealed.
        OSError: It can't be mapped.
    """

    def __init__(self, number: int, descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransferError(f"region {number} of shared memory is not sealed")
        self.number = number
        self.size_bytes = os.fstat(descriptor).st_size
        self.slots = self.size_bytes // LEAST_BYTES
        self.begin = _aligned(self.slots * _WORDS_PER_SLOT * _WORD_BYTES)
        # Every page is mapped now, instead of one by one when it is needed.
        self._memory = mmap.mmap(descriptor, self.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._words = memoryview(self._memory).cast("Q")
        # In place by us, the receiver: its bytes, by slot and ticket. A destructor may let go in the midst of anything,
        # so it takes an entry out and leaves the sum to those who ask for it.
        self._used: dict[tuple[int, int], range] = {}
        self._let_go = deque[int]()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Of the tensors in it that this process uses in place. To be asked by the thread that calls `use`."""
        while self._let_go:
            with suppress(IndexError):  # threads of a trainer, none of which asks, may be here at once
                self._used_bytes -= self._let_go.popleft()
        return self._used_bytes

    def raw(self, begin: int, size_bytes: int) -> Bytes:
        """A stretch of it, which keeps it mapped."""
        return np.frombuffer(self._memory, np.uint8, size_bytes, begin)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is in it."""
        begin = self.raw(0, 1).ctypes.data
        return begin <= tensor.data_ptr() < begin + self.size_bytes

    # The sender's

    def open(self, slot: int, ticket: int) -> None:
        """Begins another use of a slot."""
        self._words[_WORDS_PER_SLOT * slot] = ticket

    def is_back(self, slot: int, ticket: int) -> bool:
        """Whether the receiver has ended this use of it."""
        return self._words[_WORDS_PER_SLOT * slot + 1] == ticket

    def is_used(self, slot: int, ticket: int) -> bool:
        """Whether the receiver uses the tensor in place."""
        return self._words[_WORDS_PER_SLOT * slot + 1] == ticket | _IN_USE

    # The receiver's

    def check(self, location: tensor_pb2.Location, layout: Layout) -> None:
        """Raises TransferError where no tensor of this layout can be, before anything there is read."""
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
        """A tensor that was checked, in place. Its slot is given back when its memory is let go.

        The caller compares its elements (Rule 5).
        """
        begin = location.offset_bytes
        self._used[location.slot, location.ticket] = range(begin, begin + layout.span_bytes)
        self._used_bytes = self.used_bytes + layout.span_bytes
        self._words[_WORDS_PER_SLOT * location.slot + 1] = location.ticket | _IN_USE
        raw = self._raw_of(location, layout)
        # Torch keeps the array, which keeps the mapping.
        weakref.finalize(raw, self.free_slot, location.slot, location.ticket).atexit = False
        return _tensor_in(raw, layout)

    def free_slot(self, slot: int, ticket: int) -> None:
        """Gives the slot of a tensor in use back, also before its memory is let go: nobody will read it."""
        used = self._used.pop((slot, ticket), None)
        if used is not None:
            self._let_go.append(len(used))
            self._give_back(slot, ticket)

    def copy(self, location: tensor_pb2.Location, layout: Layout) -> Tensor:
        """A copy of a tensor that was checked, owned by the caller. Its slot is given back.

        The caller compares its elements (Rule 5).
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
    """The xxh3_64 of the elements of a tensor that shared memory takes."""
    return xxhash.xxh3_64_intdigest(dense_bytes(tensor, layout))


_move = ctypes.memmove
"""Releases the GIL, and is a fifth faster than Tensor.copy_: it leaves the caches alone."""


def _aligned(size_bytes: int) -> int:
    return size_bytes + -size_bytes % ALIGNMENT_BYTES


def _tensor_in(raw: Bytes, layout: Layout) -> Tensor:
    tensor = torch.empty(0, dtype=layout.dtype)
    storage = torch.from_numpy(raw).untyped_storage()
    tensor.set_(storage, layout.alignment_bytes // layout.dtype.itemsize, layout.shape, layout.strides)
    return with_bits(tensor, layout)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor was written to.

    Attributes:
        region: The number of the region.
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
        """As it stands in a declaration.

        Args:
            layout: The layout of the tensor.
            checksum: `checksum_of` the tensor, where its receiver compares that (Rule 5).
        """
        offset = self.begin + layout.alignment_bytes
        return tensor_pb2.Location(
            region=self.region.number, slot=self.slot, offset_bytes=offset, ticket=self.ticket, checksum=checksum
        )


class _Sending:
    """A region that this process sends through."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.room = FreeList(region.begin, region.size_bytes)
        self.taken: dict[int, Slot] = {}  # by slot

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
        if taken is not None and taken.ticket == returned.ticket:
            del self.taken[returned.slot]
            self.room.give(returned.begin, returned.size_bytes)


class Outbox:
    """The regions that this process sends through. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, _Sending] = {}
        self._tickets = itertools.count(1)

    def add(self, region: Region) -> None:
        """More room."""
        with self._lock:
            self._regions[region.number] = _Sending(region)

    def close(self) -> None:
        """Has no room from now on. Takes no lock: in the child of a fork its holder may not exist."""
        self._regions = {}

    @staticmethod
    def takes(layout: Layout) -> bool:
        """Whether a tensor of this layout goes through shared memory where there is room."""
        return layout.payload_bytes == layout.span_bytes >= LEAST_BYTES and layout.device == "cpu"

    def lacks_bytes(self, next_bytes: int) -> int:
        """What would have to be given back for an upload of so many bytes."""
        with self._lock:
            for sending in self._regions.values():
                sending.sweep()
            return next_bytes - sum(sending.room.free_bytes for sending in self._regions.values())

    def put(self, outgoing: OutgoingTensor) -> Slot | None:
        """Writes a tensor that it takes to where there is room, and returns None where there is none.

        Raises:
            UnsupportedTensorError: The tensor's memory was freed.
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

    def withdraw(self, places: Iterable[Slot]) -> None:
        """Frees places that the receiver will not look at again; it may have given back some."""
        with self._lock:
            for slot in places:
                sending = self._regions.get(slot.region.number)
                if sending is not None:
                    sending.give(slot)

    def end(self, places: Iterable[Slot]) -> None:
        """Frees places that the receiver will not look at again, but for those where it uses a tensor now."""
        self.withdraw([slot for slot in places if not slot.region.is_used(slot.slot, slot.ticket)])

    def _take(self, size_bytes: int) -> Slot | None:
        with self._lock:
            ticket = next(self._tickets)
            slots = (sending.take(size_bytes, ticket) for sending in self._regions.values())
            return next((slot for slot in slots if slot is not None), None)


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if IS_AVAILABLE else 0


def make_memory(size_bytes: int) -> int:
    """Descriptor of a sealed memfd whose pages are there. Raises OSError where there is not as much memory."""
    descriptor = os.memfd_create("backhaul", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def offer(peer: socket.socket, region: Region, descriptor: int, *, is_down: bool) -> None:
    """Hands a region over to the process at the other end of a Unix socket. Raises OSError."""
    socket.send_fds(peer, [_OFFER.pack(is_down, region.number)], [descriptor])


def offer_nothing(peer: socket.socket) -> None:
    """Answers a trainer that asked for more without a region. Raises OSError."""
    peer.send(_OFFER.pack(False, 0))


def take_offer(peer: socket.socket) -> tuple[bool, Region | None] | None:
    """A region that was handed over, or that there is none, and whether tensors come down through it.

    Returns:
        None where the other end is closed.

    Raises:
        BlockingIOError: The peer has sent nothing yet.
        TransferError: It is no region.
        OSError: It can't be mapped.
    """
    data, descriptors, _, _ = socket.recv_fds(peer, _OFFER.size, 1)
    try:
        if not data:
            return None
        if len(data) != _OFFER.size:
            raise TransferError("what was handed over is no shared memory")
        is_down, number = _OFFER.unpack(data)
        return is_down, Region(number, descriptors[0]) if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class SharedMemoryRequest(IntEnum):
    """What a trainer tells its worker beside its calls, once it has named its session."""

    MORE = 1
    """It has found no room for a tensor; with its bytes. Answered by an offer."""

    ROOM = 2
    """It has less than half of its room left; with the bytes that would make it half."""

    ENDED = 3
    """It will look at no more tensors of an answer than those it uses in place; with the answer's number."""

    def message(self, number: int) -> bytes:
        """As it is sent."""
        return _ASK.pack(self, number)

    @staticmethod
    def read(message: bytes) -> "tuple[SharedMemoryRequest, int]":
        """What a message says. Raises TransferError."""
        try:
            kind, number = _ASK.unpack(message)
            return SharedMemoryRequest(kind), number
        except (struct.error, ValueError):
            raise TransferError("a trainer said what no trainer says") from None


def is_same_user(peer: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this process's user (Rule 3)."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def shared_bytes(batch: Batch | tensor_pb2.TensorBatch | None) -> int:
    """Bytes of the tensors of a message that go through shared memory."""
    declarations = batch.declarations if batch is not None else ()
    return sum(declaration.size_bytes for declaration in declarations if declaration.HasField("location"))
